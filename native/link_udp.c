/* The UDP link: one unconnected socket; offloads and batching where the kernel has them, each with
 * a fall-back and a switch. */
#include "link_udp.h"
#include "table.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BUFFER_WISH = 32 << 20,
    /* What the kernel charges for them. */
    CONTROL_CHARGE = LC_CONTROL_WAITING * 832,
    PACKET_MAX = 65535 - 28 /* what IPv4 and UDP leave of the largest datagram */
};

/* ---- addresses ---- */

static int parse_address(const char *host, uint16_t port, lc_udp_address *out) {
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

static int grow(lc_udp *u, uint32_t n) {
    lc_udp_peer *peers = lc_table_grown(u->peers, &u->n_peers, n, sizeof *peers);
    if (peers)
        u->peers = peers;
    return peers != NULL;
}

static int set_peer(lc_link *link, uint16_t peer, const lc_address *address) {
    lc_udp *u = lc_udp_of(link);
    lc_udp_peer known = {.error = 0};
    if (address && parse_address(address->host, address->port, &known.address) != u->family)
        return LC_E_ARGUMENT;
    if (peer >= u->n_peers && !grow(u, peer + 1u))
        return LC_E_MEMORY;
    lc_udp_segments_again(u, &u->peers[peer]);
    lc_udp_go_singly(link, peer, 0);
    u->peers[peer] = known;
    return LC_OK;
}

static int is_same(const lc_udp_address *a, const struct sockaddr *own) {
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
static int is_here(const lc_link *link, uint16_t peer) {
    const lc_udp *u = lc_udp_of_const(link);
    const lc_udp_address *a = &u->peers[peer].address;
    if (u->family == AF_INET && ntohl(a->v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET)
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

/* ---- the socket ---- */

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

/* ICMP isn't authenticated: whoever forges "fragmentation needed" would else make the kernel cut
 * every packet, or refuse offloads. So what routers say is ignored, and nothing is fragmented: the
 * packet size is the group's choice. */
static void ignore_path_mtu(int fd, int family) {
    int v4 = IP_PMTUDISC_PROBE;
    int v6 = IPV6_PMTUDISC_PROBE;
    if (family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &v6, sizeof v6);
    else
        (void)setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &v4, sizeof v4);
}

static int open_socket(lc_udp *u, const lc_host_config *config, lc_failure *failure) {
    u->family = parse_address(config->address, config->port, &u->here);
    if (u->family < 0) {
        errno = EINVAL;
        return fail(failure, LC_E_ARGUMENT);
    }
    int fd = socket(u->family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fail(failure, LC_E_SYSTEM);
    lc_owned_open(&u->socket, fd);
    int automatic = config->socket_buffer == 0;
    int wish = automatic ? BUFFER_WISH : config->socket_buffer;
    ask_buffer(fd, SO_RCVBUFFORCE, SO_RCVBUF, wish, automatic);
    ask_buffer(fd, SO_SNDBUFFORCE, SO_SNDBUF, wish, automatic);
    ignore_path_mtu(fd, u->family);
    int one = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &one, sizeof one);
    u->offered = u->active = probe_socket(fd) & ~config->disable;
    if (u->active & LC_GRO)
        (void)setsockopt(fd, IPPROTO_UDP, UDP_GRO, &one, sizeof one);
    if (u->active & LC_STAMPS)
        (void)setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
    if (bind(fd, &u->here.any, lc_udp_address_bytes(u->family)) != 0)
        return fail(failure, LC_E_SYSTEM);
    return 0;
}

static void close_udp(lc_link *link) {
    lc_udp *u = lc_udp_of(link);
    lc_owned_close(&u->socket);
    free(u->buffers);
    free(u->staging);
    free(u->peers);
    free(u);
}

/* ---- out-of-band datagrams ---- */

/* Reads nothing of the link that changes after it was opened, so any thread may call it. */
static int say(lc_link *link, const lc_address *to, const uint8_t *data, uint32_t n) {
    const lc_udp *u = lc_udp_of_const(link);
    lc_udp_address address;
    if (parse_address(to->host, to->port, &address) != u->family)
        return LC_E_ARGUMENT;
    struct iovec piece = {(void *)(uintptr_t)data, n};
    struct msghdr m = {.msg_name = &address,
                       .msg_namelen = lc_udp_address_bytes(u->family),
                       .msg_iov = &piece,
                       .msg_iovlen = 1};
    return u->calls.sendmsg(u->socket.fd, &m, MSG_DONTWAIT) == (ssize_t)n ? LC_OK : LC_E_SYSTEM;
}

static void source(const lc_link *link, const lc_arrival *arrival, lc_oob_datagram *datagram) {
    const lc_udp_address *from = arrival->from;
    static const uint8_t mapped[12] = {[10] = 0xFF, [11] = 0xFF};
    if (lc_udp_of_const(link)->family == AF_INET) {
        memcpy(datagram->address, mapped, sizeof mapped);
        memcpy(datagram->address + sizeof mapped, &from->v4.sin_addr, 4);
        datagram->port = ntohs(from->v4.sin_port);
    } else {
        memcpy(datagram->address, &from->v6.sin6_addr, sizeof datagram->address);
        datagram->port = ntohs(from->v6.sin6_port);
    }
}

/* ---- what it tells of itself ---- */

static void info(const lc_link *link, lc_link_info *info) {
    const lc_udp *u = lc_udp_of_const(link);
    lc_udp_address here;
    socklen_t n = sizeof here;
    memset(info, 0, sizeof *info);
    info->receive_buffer = got_buffer(u->socket.fd, SO_RCVBUF);
    info->send_buffer = got_buffer(u->socket.fd, SO_SNDBUF);
    info->active = __atomic_load_n(&u->active, __ATOMIC_RELAXED);
    info->payload_bytes = u->payload_bytes;
    if (getsockname(u->socket.fd, &here.any, &n) == 0)
        info->port = ntohs(u->family == AF_INET ? here.v4.sin_port : here.v6.sin6_port);
}

static uint32_t round_up_power(uint32_t v) {
    uint32_t p = 1;
    while (p < v)
        p *= 2;
    return p;
}

/* What the socket's buffer holds at what the kernel charges for a packet (its memory, not its
 * length), besides what is left for control, at most half of the rest. The kernel goes on charging
 * for packets that were read, until they are a quarter of the buffer or nothing is left to be read
 * (udp_rmem_release): that quarter can't be promised to anyone. */
static uint32_t credits(const lc_link *link, uint32_t packet_bytes, uint32_t peers) {
    uint64_t charge = (uint64_t)round_up_power(packet_bytes + 512) + 512;
    uint64_t buffer = (uint64_t)got_buffer(lc_udp_of_const(link)->socket.fd, SO_RCVBUF);
    uint64_t control = (uint64_t)peers * CONTROL_CHARGE, usable = buffer - buffer / 4;
    control = control < usable / 2 ? control : usable / 2;
    return (uint32_t)((usable - control) / charge / peers);
}

/* The kernel would call a socket writable whose sends fail for other reasons than a full buffer. */
static int descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns) {
    const lc_udp *u = lc_udp_of_const(link);
    short events = POLLIN;
    uint64_t now = lc_clock_now(link->clock);
    if (blocked && lc_trouble_holds(&u->failing, now)) {
        uint64_t left = u->failing.again.until_ns - now;
        *timeout_ns = left < *timeout_ns ? left : *timeout_ns;
    } else if (blocked) {
        events |= POLLOUT;
    }
    fds[0] = (struct pollfd){u->socket.fd, events, 0};
    return 1;
}

static void stats(const lc_link *link, lc_link_stats *stats) {
    *stats = lc_udp_of_const(link)->stats;
}

static int event(lc_link *link, lc_event *event) {
    lc_udp *u = lc_udp_of(link);
    if (u->events_in == u->events_out)
        return 0;
    *event = u->events[u->events_out++ % LC_UDP_EVENTS];
    return 1;
}

/* ---- opening ---- */

static const lc_link_ops udp_ops = {.name = "udp",
                                    .close = close_udp,
                                    .set_peer = set_peer,
                                    .is_here = is_here,
                                    .go_singly = lc_udp_go_singly,
                                    .info = info,
                                    .credits = credits,
                                    .send = lc_udp_send,
                                    .receive = lc_udp_receive,
                                    .is_from = lc_udp_is_from,
                                    .descriptors = descriptors,
                                    .event = event,
                                    .stats = stats,
                                    .say = say,
                                    .source = source};

/* C libraries differ on the signs of these two's arguments. */
static int send_many(int fd, struct mmsghdr *messages, unsigned n, int flags) {
    return sendmmsg(fd, messages, n, flags);
}

static int receive_many(int fd, struct mmsghdr *messages, unsigned n, int flags,
                        struct timespec *timeout) {
    return recvmmsg(fd, messages, n, flags, timeout);
}

static const lc_udp_calls system_calls = {send_many, sendmsg, receive_many, recvmsg};

lc_link *lc_udp_open(const lc_host_config *config, const lc_clock *clock, const lc_udp_calls *calls,
                     lc_failure *failure) {
    lc_udp *u = calloc(1, sizeof *u);
    if (!u) {
        failure->code = LC_E_MEMORY;
        return NULL;
    }
    u->link = (lc_link){.ops = &udp_ops, .clock = clock, .packet_max = PACKET_MAX, .routed = 1};
    u->calls = calls ? *calls : system_calls;
    u->socket.fd = -1;
    u->payload_bytes = config->payload_bytes;
    u->sizes = !(config->disable & LC_PATH_MTU);
    u->buffers = malloc((size_t)LC_RECEIVE_BUFFERS * LC_AGGREGATE_BYTES);
    u->staging = malloc(LC_AGGREGATE_BYTES);
    if (!u->buffers || !u->staging) {
        failure->code = LC_E_MEMORY;
        close_udp(&u->link);
        return NULL;
    }
    if (open_socket(u, config, failure) != 0) {
        close_udp(&u->link);
        return NULL;
    }
    u->link.aggregates = (u->offered & LC_GSO) != 0;
    lc_udp_prepare_receive(u);
    return &u->link;
}

lc_link *lc_link_open(const lc_host_config *config, const lc_clock *clock, lc_failure *failure) {
    return lc_udp_open(config, clock, NULL, failure);
}
