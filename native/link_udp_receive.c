/* The UDP link, receiving: what the kernel has merged, when it got it, and what it dropped. */
#include "link_udp.h"

#include <errno.h>
#include <string.h>
#include <time.h>

static const uint64_t STAMP_AGE_NS = 10000000000u;
static const uint64_t CLOCKS_APART_NS = 20000;

void lc_udp_prepare_receive(lc_udp *u) {
    for (int i = 0; i < LC_RECEIVE_BUFFERS; i++) {
        u->in_iov[i].iov_base = u->buffers + (size_t)i * LC_AGGREGATE_BYTES;
        u->in_iov[i].iov_len = LC_AGGREGATE_BYTES;
        struct msghdr *m = &u->in[i].msg_hdr;
        m->msg_name = &u->in_from[i];
        m->msg_iov = &u->in_iov[i];
        m->msg_iovlen = 1;
        m->msg_control = u->in_control[i];
    }
}

static void count_overflow(lc_udp *u, uint32_t seen) {
    u->stats.overflow += (uint32_t)(seen - u->overflow_seen);
    u->overflow_seen = seen;
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

static uint32_t read_control(lc_udp *u, struct msghdr *m, lc_arrival *arrival) {
    uint32_t stride = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
            int size = 0;
            memcpy(&size, CMSG_DATA(c), sizeof size);
            stride = size > 0 ? (uint32_t)size : 0;
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
            uint32_t seen = 0;
            memcpy(&seen, CMSG_DATA(c), sizeof seen);
            count_overflow(u, seen);
        } else if (u->stamped && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            arrival->came_ns = came_at(c, u->day_ns, u->now_ns);
        }
    }
    return stride;
}

static void arm_receive(lc_udp *u, int n) {
    for (int i = 0; i < n; i++) {
        struct msghdr *m = &u->in[i].msg_hdr;
        m->msg_namelen = sizeof u->in_from[i];
        m->msg_controllen = LC_UDP_CONTROL_BYTES;
        m->msg_flags = 0;
    }
}

static int receive_messages(lc_udp *u, int max) {
    u->stats.receive_calls++;
    if (lc_udp_batches(u)) {
        int n = u->calls.recvmmsg(u->socket.fd, u->in, (unsigned)max, MSG_DONTWAIT, NULL);
        if (n >= 0 || errno != ENOSYS)
            return n < 0 ? 0 : n;
        lc_udp_refuse_batching(u);
    }
    ssize_t bytes = u->calls.recvmsg(u->socket.fd, &u->in[0].msg_hdr, MSG_DONTWAIT);
    if (bytes < 0)
        return 0;
    u->in[0].msg_len = (unsigned)bytes;
    return 1;
}

/* Reads both clocks at one moment. A thread that was put to sleep between them would date every
 * packet back by its sleep, and one such packet passes for the shortest way for many seconds. */
static int read_clocks(lc_udp *u) {
    const lc_clock *clock = u->link.clock;
    for (int tries = 0; tries < 4; tries++) {
        u->now_ns = lc_clock_now(clock);
        u->day_ns = lc_clock_time_of_day(clock);
        if (lc_clock_now(clock) - u->now_ns < CLOCKS_APART_NS)
            return 1;
    }
    return 0;
}

int lc_udp_receive(lc_link *link, lc_arrival *arrivals, int max) {
    lc_udp *u = lc_udp_of(link);
    if (max > LC_RECEIVE_BUFFERS)
        max = LC_RECEIVE_BUFFERS;
    arm_receive(u, max);
    int n = receive_messages(u, max);
    u->stamped = n > 0 && (u->active & LC_STAMPS) && read_clocks(u);
    for (int i = 0; i < n; i++) {
        arrivals[i] = (lc_arrival){.from = &u->in_from[i]};
        uint32_t stride = read_control(u, &u->in[i].msg_hdr, &arrivals[i]);
        arrivals[i].data = u->in_iov[i].iov_base;
        arrivals[i].length = u->in[i].msg_len;
        arrivals[i].stride = stride ? stride : u->in[i].msg_len;
    }
    return n;
}

int lc_udp_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer) {
    const lc_udp *u = lc_udp_of_const(link);
    if (peer >= u->n_peers)
        return 0;
    const lc_udp_address *from = arrival->from;
    const lc_udp_address *want = &u->peers[peer].address;
    if (from->any.sa_family != want->any.sa_family)
        return 0;
    if (u->family == AF_INET)
        return from->v4.sin_port == want->v4.sin_port &&
               from->v4.sin_addr.s_addr == want->v4.sin_addr.s_addr;
    return from->v6.sin6_port == want->v6.sin6_port &&
           memcmp(&from->v6.sin6_addr, &want->v6.sin6_addr, sizeof want->v6.sin6_addr) == 0;
}
