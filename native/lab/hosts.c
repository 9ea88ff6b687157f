#define _GNU_SOURCE
#include "hosts.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if_arp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <linux/if.h>
#include <linux/if_tun.h>

#include "frame.h"

#ifndef TUN_F_USO4
#define TUN_F_USO4 0x20
#define TUN_F_USO6 0x40
#endif

static const char DEVICE[] = "eth0";
static const char CONGESTION[] = "/proc/sys/net/ipv4/tcp_congestion_control";
enum { QUEUE_PACKETS = 4000 }; /* of the device, towards the switch */

static int failed(lab_shared *shared, const char *what) {
    snprintf(shared->text, sizeof shared->text, "%s", what);
    return -1;
}

/* ---- a host's device ---- */

static void address_of(const lab_shared *shared, uint32_t host, struct sockaddr *out) {
    struct sockaddr_in in = {.sin_family = AF_INET};
    in.sin_addr.s_addr = htonl(shared->network + host + 1);
    memcpy(out, &in, sizeof in);
}

static void hardware_of(uint32_t host, struct sockaddr *out) {
    const uint8_t bytes[6] = {0x02, 'l', 'a', 'b', 0, (uint8_t)(host + 1)};
    out->sa_family = ARPHRD_ETHER;
    memcpy(out->sa_data, bytes, sizeof bytes);
}

static struct ifreq request_for(const char *name) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    return request;
}

static int raise_device(int socket_, const char *name) {
    struct ifreq request = request_for(name);
    if (ioctl(socket_, SIOCGIFFLAGS, &request))
        return -1;
    request.ifr_flags |= IFF_UP;
    return ioctl(socket_, SIOCSIFFLAGS, &request);
}

static int set_addresses(const lab_shared *shared, uint32_t host, int socket_) {
    struct ifreq request = request_for(DEVICE);
    hardware_of(host, &request.ifr_hwaddr);
    if (ioctl(socket_, SIOCSIFHWADDR, &request))
        return -1;
    request.ifr_mtu = (int)shared->mtu;
    if (ioctl(socket_, SIOCSIFMTU, &request))
        return -1;
    request.ifr_qlen = QUEUE_PACKETS;
    if (ioctl(socket_, SIOCSIFTXQLEN, &request))
        errno = 0; /* only the machine's own root may; then it stays at 500 */
    address_of(shared, host, &request.ifr_addr);
    if (ioctl(socket_, SIOCSIFADDR, &request))
        return -1;
    struct sockaddr_in mask = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xffffff00u)};
    memcpy(&request.ifr_netmask, &mask, sizeof mask);
    return ioctl(socket_, SIOCSIFNETMASK, &request);
}

/* Hosts know each other from the start: a question would be lost, or late, as anything else. */
static int add_neighbours(const lab_shared *shared, uint32_t host, int socket_) {
    for (uint32_t other = 0; other < shared->hosts; other++) {
        struct arpreq entry;
        memset(&entry, 0, sizeof entry);
        address_of(shared, other, &entry.arp_pa);
        hardware_of(other, &entry.arp_ha);
        entry.arp_flags = ATF_COM | ATF_PERM;
        snprintf(entry.arp_dev, sizeof entry.arp_dev, "%s", DEVICE);
        if (other != host && ioctl(socket_, SIOCSARP, &entry))
            return -1;
    }
    return 0;
}

static int write_file(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0)
        return -1;
    ssize_t written = write(file, text, strlen(text));
    int reason = errno;
    close(file);
    errno = reason;
    return written < 0 ? -1 : 0;
}

/* Settings that make runs alike; a kernel without one of them does as well. */
static void set_sysctl(const char *path, const char *value) {
    if (write_file(path, value))
        errno = 0;
}

static int open_tap(void) {
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0)
        return -1;
    struct ifreq request = request_for(DEVICE);
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    unsigned aggregates = TUN_F_CSUM | TUN_F_TSO4, datagrams = TUN_F_USO4 | TUN_F_USO6;
    if (ioctl(tap, TUNSETIFF, &request) ||
        /* Kernels before 6.2 don't aggregate datagrams for a TAP: they come one by one. */
        (ioctl(tap, TUNSETOFFLOAD, aggregates | datagrams) &&
         ioctl(tap, TUNSETOFFLOAD, aggregates))) {
        int reason = errno;
        close(tap);
        errno = reason;
        return -1;
    }
    return tap;
}

static int make_host(lab_shared *shared, uint32_t host, int *device) {
    int socket_ = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (socket_ < 0)
        return failed(shared, "open a socket in a new namespace");
    set_sysctl("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
    set_sysctl("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    set_sysctl("/proc/sys/net/ipv4/tcp_no_metrics_save", "1");
    /* Room for 64 MiB on the way: 5 Gbit/s at 100 ms. */
    set_sysctl("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 67108864");
    set_sysctl("/proc/sys/net/ipv4/tcp_wmem", "4096 131072 67108864");
    const char *what = NULL;
    if (raise_device(socket_, "lo"))
        what = "raise lo";
    if (!what && *shared->congestion && write_file(CONGESTION, shared->congestion))
        what = "set the congestion control of TCP";
    if (!what && shared->devices) {
        if ((*device = open_tap()) < 0)
            what = "make a TAP device with /dev/net/tun";
        else if (set_addresses(shared, host, socket_))
            what = "set addresses and MTU of a host";
        else if (raise_device(socket_, DEVICE))
            what = "raise a host's device";
        else if (add_neighbours(shared, host, socket_))
            what = "tell a host of its neighbours";
    }
    int reason = errno;
    close(socket_);
    errno = reason;
    return what ? failed(shared, what) : 0;
}

/* ---- namespaces ---- */

/* Whoever isn't root becomes root of a user namespace of its own. */
static int become_owner(lab_shared *shared) {
    uid_t user = geteuid();
    gid_t group = getegid();
    if (!user)
        return 0;
    char map[64];
    if (unshare(CLONE_NEWUSER))
        return failed(shared, "make a user namespace");
    if (write_file("/proc/self/setgroups", "deny"))
        return failed(shared, "write /proc/self/setgroups");
    snprintf(map, sizeof map, "0 %u 1", user);
    if (write_file("/proc/self/uid_map", map))
        return failed(shared, "write /proc/self/uid_map");
    snprintf(map, sizeof map, "0 %u 1", group);
    if (write_file("/proc/self/gid_map", map))
        return failed(shared, "write /proc/self/gid_map");
    shared->user_fd = open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC);
    return shared->user_fd < 0 ? failed(shared, "open /proc/self/ns/user") : 0;
}

int lab_hosts_make(lab_shared *shared, int *device) {
    shared->user_fd = -1;
    for (uint32_t i = 0; i <= LAB_HOSTS; i++)
        shared->net_fd[i] = -1;
    if (become_owner(shared))
        return -1;
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (home < 0)
        return failed(shared, "open /proc/self/ns/net");
    int status = 0;
    for (uint32_t i = 0; !status && i < shared->hosts + !shared->devices; i++) {
        if (unshare(CLONE_NEWNET))
            status = failed(shared, "make a network namespace");
        else if ((shared->net_fd[i] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
            status = failed(shared, "open a new network namespace");
        else
            status = make_host(shared, i, device + i);
    }
    /* Root goes home. Others stay in the last namespace: home isn't theirs any more. */
    int reason = errno;
    if (shared->user_fd < 0 && setns(home, CLONE_NEWNET) && !status)
        status = failed(shared, "return to the network namespace of the start");
    else
        errno = reason;
    close(home);
    return status;
}

void lab_hosts_overrun(lab_shared *shared) {
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    for (uint32_t i = 0; i < shared->hosts && home >= 0; i++) {
        if (setns(shared->net_fd[i], CLONE_NEWNET))
            break;
        FILE *table = fopen("/proc/thread-self/net/dev", "re");
        char line[512], name[32];
        unsigned long long dropped;
        while (table && fgets(line, sizeof line, table))
            /* Of 16 columns the fourth of the sender's eight is what it dropped. */
            if (sscanf(line, " %31[^:]: %*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %llu", name,
                       &dropped) == 2 &&
                !strcmp(name, DEVICE))
                shared->host_counts[i].overrun = dropped;
        if (table)
            fclose(table);
    }
    if (home >= 0) {
        if (setns(home, CLONE_NEWNET))
            abort(); /* lost in a namespace that isn't its own */
        close(home);
    }
}

/* ---- the end ---- */

static int is_of_lab(const lab_shared *shared, const char *pid) {
    char path[64];
    struct stat its, ours;
    snprintf(path, sizeof path, "/proc/%.20s/ns/net", pid);
    if (stat(path, &its))
        return 0;
    for (uint32_t i = 0; i <= LAB_HOSTS; i++)
        if (shared->net_fd[i] >= 0 && !fstat(shared->net_fd[i], &ours) &&
            its.st_ino == ours.st_ino && its.st_dev == ours.st_dev)
            return 1;
    return 0;
}

static int kill_all(const lab_shared *shared) {
    int found = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && (entry = readdir(proc));) {
        int pid = atoi(entry->d_name);
        if (pid > 1 && pid != getpid() && is_of_lab(shared, entry->d_name))
            found += !kill(pid, SIGKILL);
    }
    if (proc)
        closedir(proc);
    return found;
}

void lab_hosts_reap(const lab_shared *shared) {
    /* Again, as one of them may just have started another. The dead have no namespace. */
    for (int round = 0; round < 100 && kill_all(shared); round++)
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
}
