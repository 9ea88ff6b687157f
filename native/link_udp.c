/* The UDP link: one unconnected socket; offloads and batching where the kernel has them, each with
 * a fall-back for good and a switch. */
#define _GNU_SOURCE
#include "clock.h"
#include "link.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef SCM_TIMESTAMPNS
#define SCM_TIMESTAMPNS SO_TIMESTAMPNS
#endif
#ifndef SO_RXQ_OVFL
#define SO_RXQ_OVFL 40
#endif

enum {
    CONTROL_BYTES = 128,
    BUFFER_WISH = 32 << 20,
    GATHER_BYTES = 4096 /* packets below this are packed: two pieces each cost more than the copy */
};

static const uint64_t STAMP_AGE_NS = 10000000000u;
static const uint64_t CLOCKS_APART_NS = 20000;

typedef union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} address;

struct lc_link {
    int fd;
    int wake_fd;
    int watch_fd; /* an epoll of fd: who sleeps can be spared its packets */
    int family;
    uint32_t active; /* lc_fast_path bits */
    uint16_t n_peers;
    uint16_t payload_bytes;
    address *peers;
    uint64_t overflow;
    uint32_t overflow_seen; /* the kernel's own counter, which wraps */
    uint64_t send_calls, receive_calls;
    uint64_t now_ns, day_ns; /* both clocks, at the latest receive */
    int stamped;             /* they belong together */
    uint8_t *buffers;        /* LC_RECEIVE_BUFFERS aggregates */
    uint8_t *staging;        /* one aggregate, for sends without gather */
    struct mmsghdr in[LC_RECEIVE_BUFFERS];
    struct iovec in_iov[LC_RECEIVE_BUFFERS];
    address in_from[LC_RECEIVE_BUFFERS];
    char in_control[LC_RECEIVE_BUFFERS][CONTROL_BYTES];
    struct mmsghdr out[LC_BATCH_RUNS * LC_RUN_PACKETS];
    char out_control[LC_BATCH_RUNS][CMSG_SPACE(sizeof(uint16_t))];
};

static int parse_address(const char *host, uint16_t port, address *out) {
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, host, &out->v4.sin_addr) == 1) {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons(port);
        return AF_INET;
    }
    if (inet_pton(AF_INET6, host, &out->v6.sin6_addr) == 1) {
        out->v6.sin6_family = AF_INET6;
        out->v6.sin6_port = htons(port);
        return AF_INET6;
    }
    return -1;
}

static socklen_t address_bytes(int family) {
    return family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

static int fail(lc_failure *failure, int code) {
    failure->code = code;
    failure->sys_errno = errno;
    return -1;
}

/* The forced form passes the system's limit, where we may; the plain one takes what it gives. */
static void ask_buffer(int fd, int forced, int plain, int bytes, int automatic) {
    if (!automatic || setsockopt(fd, SOL_SOCKET, forced, &bytes, sizeof bytes) != 0)
        (void)setsockopt(fd, SOL_SOCKET, plain, &bytes, sizeof bytes);
}

static int got_buffer(int fd, int option) {
    int bytes = 0;
    socklen_t n = sizeof bytes;
    (void)getsockopt(fd, SOL_SOCKET, option, &bytes, &n);
    return bytes;
}

static uint32_t probe_socket(int fd) {
    uint32_t found = LC_MMSG | LC_GATHER | LC_SIMD;
    int zero = 0;
    int one = 1;
    if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &zero, sizeof zero) == 0)
        found |= LC_GSO;
    if (setsockopt(fd, IPPROTO_UDP, UDP_GRO, &one, sizeof one) == 0) {
        (void)setsockopt(fd, IPPROTO_UDP, UDP_GRO, &zero, sizeof zero);
        found |= LC_GRO;
    }
    if (setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one) == 0) {
        (void)setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &zero, sizeof zero);
        found |= LC_STAMPS;
    }
    return found;
}

uint32_t lc_probe(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    uint32_t found = probe_socket(fd);
    close(fd);
    return found;
}

static void prepare_receive(lc_link *link) {
    for (int i = 0; i < LC_RECEIVE_BUFFERS; i++) {
        link->in_iov[i].iov_base = link->buffers + (size_t)i * LC_AGGREGATE_BYTES;
        link->in_iov[i].iov_len = LC_AGGREGATE_BYTES;
        struct msghdr *m = &link->in[i].msg_hdr;
        m->msg_name = &link->in_from[i];
        m->msg_iov = &link->in_iov[i];
        m->msg_iovlen = 1;
        m->msg_control = link->in_control[i];
    }
}

static int open_socket(lc_link *link, const lc_config *config, lc_failure *failure) {
    address here;
    link->family = parse_address(config->address, config->port, &here);
    if (link->family < 0) {
        errno = EINVAL;
        return fail(failure, LC_E_ARGUMENT);
    }
    link->fd = socket(link->family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    link->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    link->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event arrivals = {.events = EPOLLIN};
    if (link->fd < 0 || link->wake_fd < 0 || link->watch_fd < 0 ||
        epoll_ctl(link->watch_fd, EPOLL_CTL_ADD, link->fd, &arrivals) != 0)
        return fail(failure, LC_E_SYSTEM);
    int automatic = config->socket_buffer == 0;
    int wish = automatic ? BUFFER_WISH : config->socket_buffer;
    ask_buffer(link->fd, SO_RCVBUFFORCE, SO_RCVBUF, wish, automatic);
    ask_buffer(link->fd, SO_SNDBUFFORCE, SO_SNDBUF, wish, automatic);
    int one = 1;
    (void)setsockopt(link->fd, SOL_SOCKET, SO_RXQ_OVFL, &one, sizeof one);
    link->active = probe_socket(link->fd) & ~config->disable;
    if (link->active & LC_GRO)
        (void)setsockopt(link->fd, IPPROTO_UDP, UDP_GRO, &one, sizeof one);
    if (link->active & LC_STAMPS)
        (void)setsockopt(link->fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
    if (bind(link->fd, &here.any, address_bytes(link->family)) != 0)
        return fail(failure, LC_E_SYSTEM);
    return 0;
}

lc_link *lc_link_open(const lc_config *config, lc_failure *failure) {
    lc_link *link = calloc(1, sizeof *link);
    if (!link) {
        failure->code = LC_E_MEMORY;
        return NULL;
    }
    link->fd = link->wake_fd = link->watch_fd = -1;
    link->payload_bytes = config->payload_bytes;
    link->buffers = malloc((size_t)LC_RECEIVE_BUFFERS * LC_AGGREGATE_BYTES);
    link->staging = malloc(LC_AGGREGATE_BYTES);
    if (!link->buffers || !link->staging) {
        failure->code = LC_E_MEMORY;
        lc_link_close(link);
        return NULL;
    }
    if (open_socket(link, config, failure) != 0) {
        lc_link_close(link);
        return NULL;
    }
    prepare_receive(link);
    return link;
}

void lc_link_close(lc_link *link) {
    if (!link)
        return;
    if (link->fd >= 0)
        close(link->fd);
    if (link->wake_fd >= 0)
        close(link->wake_fd);
    if (link->watch_fd >= 0)
        close(link->watch_fd);
    free(link->buffers);
    free(link->staging);
    free(link->peers);
    free(link);
}

int lc_link_set_peers(lc_link *link, const lc_address *peers, uint16_t n, int *bad) {
    link->peers = calloc(n, sizeof *link->peers);
    if (!link->peers)
        return LC_E_MEMORY;
    link->n_peers = n;
    for (uint16_t i = 0; i < n; i++) {
        if (parse_address(peers[i].host, peers[i].port, &link->peers[i]) != link->family) {
            *bad = i;
            return LC_E_ARGUMENT;
        }
    }
    return LC_OK;
}

static int is_same(const address *a, const struct sockaddr *own) {
    if (!own || own->sa_family != a->any.sa_family)
        return 0;
    if (own->sa_family == AF_INET)
        return ((const struct sockaddr_in *)own)->sin_addr.s_addr == a->v4.sin_addr.s_addr;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)own;
    return own->sa_family == AF_INET6 &&
           memcmp(&v6->sin6_addr, &a->v6.sin6_addr, sizeof v6->sin6_addr) == 0 &&
           v6->sin6_scope_id == a->v6.sin6_scope_id;
}

/* That an address can be bound to says nothing: ip_nonlocal_bind lets any. */
int lc_link_is_here(const lc_link *link, uint16_t peer) {
    const address *a = &link->peers[peer];
    if (link->family == AF_INET && ntohl(a->v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET)
        return 1;
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0)
        return 0;
    int here = 0;
    for (const struct ifaddrs *i = all; i && !here; i = i->ifa_next)
        here = is_same(a, i->ifa_addr);
    freeifaddrs(all);
    return here;
}

void lc_link_info_of(const lc_link *link, lc_link_info *info) {
    address here;
    socklen_t n = sizeof here;
    memset(info, 0, sizeof *info);
    info->receive_buffer = got_buffer(link->fd, SO_RCVBUF);
    info->send_buffer = got_buffer(link->fd, SO_SNDBUF);
    info->active = __atomic_load_n(&link->active, __ATOMIC_RELAXED);
    info->payload_bytes = link->payload_bytes;
    if (getsockname(link->fd, &here.any, &n) == 0)
        info->port = ntohs(link->family == AF_INET ? here.v4.sin_port : here.v6.sin6_port);
}

/* ---- sending ---- */

static void downgrade(lc_link *link, uint32_t path, const char *name, int why) {
    __atomic_store_n(&link->active, link->active & ~path, __ATOMIC_RELAXED);
    fprintf(stderr, "lossycoll: %s refused by the kernel (%s); going on without it\n", name,
            strerror(why));
}

static void address_message(lc_link *link, struct msghdr *m, uint16_t peer) {
    memset(m, 0, sizeof *m);
    m->msg_name = &link->peers[peer];
    m->msg_namelen = address_bytes(link->family);
}

static void segment_message(struct msghdr *m, char *control, uint16_t bytes) {
    m->msg_control = control;
    m->msg_controllen = CMSG_SPACE(sizeof bytes);
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    c->cmsg_level = IPPROTO_UDP;
    c->cmsg_type = UDP_SEGMENT;
    c->cmsg_len = CMSG_LEN(sizeof bytes);
    memcpy(CMSG_DATA(c), &bytes, sizeof bytes);
}

/* Loss like any other: a local firewall, or a route or neighbour that is gone for now. */
static int is_loss(int error) {
    return error == EPERM || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == ECONNREFUSED || error == EHOSTDOWN;
}

static int is_full(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == EINTR;
}

/* Sends messages [0, n) in one call or one by one. Returns how many went; 0 with errno set. */
static int send_messages(lc_link *link, struct mmsghdr *messages, int n) {
    link->send_calls++;
    if (link->active & LC_MMSG) {
        int sent = sendmmsg(link->fd, messages, (unsigned)n, 0);
        if (sent >= 0 || errno != ENOSYS)
            return sent < 0 ? 0 : sent;
        downgrade(link, LC_MMSG, "sendmmsg", ENOSYS);
    }
    return sendmsg(link->fd, &messages[0].msg_hdr, 0) < 0 ? 0 : 1;
}

/* One packet is one message. */
static int send_plain(lc_link *link, const lc_run *run, int *sys_errno) {
    int sent = 0;
    int n = (int)run->n_packets;
    for (int i = 0; i < n; i++) {
        address_message(link, &link->out[i].msg_hdr, run->peer);
        link->out[i].msg_hdr.msg_iov = &run->iov[2 * i];
        link->out[i].msg_hdr.msg_iovlen = 2;
    }
    while (sent < n) {
        int now = 0;
        if (link->active & LC_GATHER) {
            now = send_messages(link, &link->out[sent], n - sent);
        } else {
            struct iovec *v = &run->iov[2 * sent];
            struct iovec flat = {link->staging, v[0].iov_len + v[1].iov_len};
            memcpy(link->staging, v[0].iov_base, v[0].iov_len);
            memcpy(link->staging + v[0].iov_len, v[1].iov_base, v[1].iov_len);
            link->out[sent].msg_hdr.msg_iov = &flat;
            link->out[sent].msg_hdr.msg_iovlen = 1;
            now = send_messages(link, &link->out[sent], 1);
        }
        if (now > 0) {
            sent += now;
        } else if (is_loss(errno)) {
            sent++;
        } else if (is_full(errno)) {
            break;
        } else {
            *sys_errno = errno;
            return -1;
        }
    }
    return sent;
}

static uint32_t flatten(lc_link *link, const lc_run *run) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < 2 * run->n_packets; i++) {
        memcpy(link->staging + used, run->iov[i].iov_base, run->iov[i].iov_len);
        used += (uint32_t)run->iov[i].iov_len;
    }
    return used;
}

static int gathers(const lc_link *link, const lc_run *run) {
    return (link->active & LC_GATHER) && (run->n_packets == 1 || run->packet_bytes >= GATHER_BYTES);
}

/* One run is one message. Returns the runs that went, or 0 with errno set. */
static int send_offloaded(lc_link *link, const lc_run *runs, int n) {
    struct iovec flat = {link->staging, 0};
    int packed = !gathers(link, &runs[0]);
    int count = 0;
    do {
        const lc_run *run = &runs[count];
        struct msghdr *m = &link->out[count].msg_hdr;
        address_message(link, m, run->peer);
        m->msg_iov = run->iov;
        m->msg_iovlen = 2 * run->n_packets;
        if (packed) {
            flat.iov_len = flatten(link, run);
            m->msg_iov = &flat;
            m->msg_iovlen = 1;
        }
        if (run->n_packets > 1)
            segment_message(m, link->out_control[count], (uint16_t)run->packet_bytes);
        count++;
    } while (!packed && count < n && gathers(link, &runs[count]));
    return send_messages(link, link->out, count);
}

int lc_link_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno) {
    int packets = 0;
    int i = 0;
    while (i < n_runs) {
        if (!(link->active & LC_GSO)) {
            int sent = send_plain(link, &runs[i], sys_errno);
            if (sent < 0)
                return -1;
            packets += sent;
            if ((uint32_t)sent < runs[i].n_packets)
                return packets;
            i++;
            continue;
        }
        int went = send_offloaded(link, &runs[i], n_runs - i);
        if (went == 0) {
            if (is_full(errno))
                return packets;
            if (is_loss(errno)) {
                went = 1;
            } else if (runs[i].n_packets > 1 && (errno == EIO || errno == EINVAL ||
                                                 errno == EMSGSIZE || errno == EOPNOTSUPP)) {
                downgrade(link, LC_GSO, "UDP segmentation offload", errno);
                continue;
            } else {
                *sys_errno = errno;
                return -1;
            }
        }
        for (int k = 0; k < went; k++)
            packets += (int)runs[i + k].n_packets;
        i += went;
    }
    return packets;
}

/* ---- receiving ---- */

static void count_overflow(lc_link *link, uint32_t seen) {
    link->overflow += (uint32_t)(seen - link->overflow_seen);
    link->overflow_seen = seen;
}

/* The kernel stamps with the time of day, which may be set; how old the stamp is can't be more than
 * the receive buffer explains, and a clock that was set in between is left out. */
static uint64_t came_at(const struct cmsghdr *c, uint64_t day_ns, uint64_t now) {
    struct timespec t;
    memcpy(&t, CMSG_DATA(c), sizeof t);
    uint64_t stamp = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    uint64_t age = day_ns - stamp;
    return stamp <= day_ns && age < STAMP_AGE_NS && age < now ? now - age : 0;
}

static uint32_t read_control(lc_link *link, struct msghdr *m, lc_arrival *arrival) {
    uint32_t stride = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
            int size = 0;
            memcpy(&size, CMSG_DATA(c), sizeof size);
            stride = size > 0 ? (uint32_t)size : 0;
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
            uint32_t seen = 0;
            memcpy(&seen, CMSG_DATA(c), sizeof seen);
            count_overflow(link, seen);
        } else if (link->stamped && c->cmsg_level == SOL_SOCKET &&
                   c->cmsg_type == SCM_TIMESTAMPNS) {
            arrival->came_ns = came_at(c, link->day_ns, link->now_ns);
        }
    }
    return stride;
}

static void arm_receive(lc_link *link, int n) {
    for (int i = 0; i < n; i++) {
        struct msghdr *m = &link->in[i].msg_hdr;
        m->msg_namelen = sizeof link->in_from[i];
        m->msg_controllen = CONTROL_BYTES;
        m->msg_flags = 0;
    }
}

static int receive_messages(lc_link *link, int max) {
    link->receive_calls++;
    if (link->active & LC_MMSG) {
        int n = recvmmsg(link->fd, link->in, (unsigned)max, MSG_DONTWAIT, NULL);
        if (n >= 0 || errno != ENOSYS)
            return n < 0 ? 0 : n;
        downgrade(link, LC_MMSG, "recvmmsg", ENOSYS);
    }
    ssize_t bytes = recvmsg(link->fd, &link->in[0].msg_hdr, MSG_DONTWAIT);
    if (bytes < 0)
        return 0;
    link->in[0].msg_len = (unsigned)bytes;
    return 1;
}

/* Reads both clocks at one moment. A thread that was put to sleep between them would date every
 * packet back by its sleep, and one such packet passes for the shortest way for many seconds. */
static int read_clocks(lc_link *link) {
    for (int tries = 0; tries < 4; tries++) {
        link->now_ns = lc_now();
        link->day_ns = lc_time_of_day();
        if (lc_now() - link->now_ns < CLOCKS_APART_NS)
            return 1;
    }
    return 0;
}

int lc_link_receive(lc_link *link, lc_arrival *arrivals, int max) {
    if (max > LC_RECEIVE_BUFFERS)
        max = LC_RECEIVE_BUFFERS;
    arm_receive(link, max);
    int n = receive_messages(link, max);
    link->stamped = n > 0 && (link->active & LC_STAMPS) && read_clocks(link);
    for (int i = 0; i < n; i++) {
        arrivals[i].came_ns = 0;
        uint32_t stride = read_control(link, &link->in[i].msg_hdr, &arrivals[i]);
        arrivals[i].data = link->in_iov[i].iov_base;
        arrivals[i].length = link->in[i].msg_len;
        arrivals[i].stride = stride ? stride : link->in[i].msg_len;
        arrivals[i].from = &link->in_from[i];
    }
    return n;
}

int lc_link_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer) {
    const address *from = arrival->from;
    const address *want = &link->peers[peer];
    if (from->any.sa_family != want->any.sa_family)
        return 0;
    if (link->family == AF_INET)
        return from->v4.sin_port == want->v4.sin_port &&
               from->v4.sin_addr.s_addr == want->v4.sin_addr.s_addr;
    return from->v6.sin6_port == want->v6.sin6_port &&
           memcmp(&from->v6.sin6_addr, &want->v6.sin6_addr, sizeof want->v6.sin6_addr) == 0;
}

/* ---- waiting ---- */

void lc_link_sleep(lc_link *link, uint64_t timeout_ns, int writable) {
    struct pollfd fds[3] = {
        {link->watch_fd, POLLIN, 0},
        {link->wake_fd, POLLIN, 0},
        {link->fd, POLLOUT, 0},
    };
    struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    if (ppoll(fds, writable ? 3 : 2, &t, NULL) > 0 && (fds[1].revents & POLLIN)) {
        uint64_t drained;
        (void)!read(link->wake_fd, &drained, sizeof drained);
    }
}

void lc_link_watch(lc_link *link, int on) {
    struct epoll_event arrivals = {.events = on ? EPOLLIN : 0};
    (void)epoll_ctl(link->watch_fd, EPOLL_CTL_MOD, link->fd, &arrivals);
}

void lc_link_wake(lc_link *link) {
    uint64_t one = 1;
    (void)!write(link->wake_fd, &one, sizeof one);
}

uint64_t lc_link_overflow(const lc_link *link) {
    return link->overflow;
}

void lc_link_calls(const lc_link *link, uint64_t *send_calls, uint64_t *receive_calls) {
    *send_calls = link->send_calls;
    *receive_calls = link->receive_calls;
}
