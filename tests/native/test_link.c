/* The UDP link against a kernel that refuses: system calls and clock are the test's. At the end the
 * real kernel, in a network of its own whose address and interface go away. */
#include "link_udp.h"

#include "check.h"
#include "waiter.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/sock_diag.h>
#include <net/if.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PEERS = 3, HEADER = 48, PAYLOAD = 256, PACKET = HEADER + PAYLOAD, PACKETS = 8 };

static const uint64_t MS = 1000000, SECOND = 1000000000;

/* ---- a clock and a kernel ---- */

static uint64_t test_now;

static uint64_t now_of(void *context) {
    (void)context;
    return test_now;
}

static uint64_t test_day; /* 0: as test_now */

static uint64_t day_of(void *context) {
    return test_day ? test_day : now_of(context);
}

static const lc_clock test_clock = {now_of, day_of, NULL};

static struct {
    int error;         /* of every send; 0: they work */
    int segment_error; /* of sends that are to be cut, to peer segment_peer alone */
    uint16_t segment_port;
    int batch_error; /* of calls for several messages */
    unsigned calls;  /* sends tried */
    unsigned segmented, plain, batches, received;
} kernel;

static int is_segmented(const struct msghdr *m) {
    return m->msg_controllen > 0;
}

static uint16_t port_of(const struct msghdr *m) {
    return ntohs(((const struct sockaddr_in *)m->msg_name)->sin_port);
}

static int refuses(const struct msghdr *m) {
    kernel.calls++;
    errno = kernel.error;
    if (!kernel.error && kernel.segment_error && is_segmented(m) &&
        port_of(m) == kernel.segment_port)
        errno = kernel.segment_error;
    else if (!kernel.error)
        return 0;
    return 1;
}

static ssize_t fake_sendmsg(int fd, const struct msghdr *m, int flags) {
    (void)fd;
    (void)flags;
    if (refuses(m))
        return -1;
    if (is_segmented(m))
        kernel.segmented++;
    else
        kernel.plain++;
    return 1;
}

static int fake_sendmmsg(int fd, struct mmsghdr *messages, unsigned n, int flags) {
    if (kernel.batch_error) {
        errno = kernel.batch_error;
        return -1;
    }
    kernel.batches++;
    for (unsigned i = 0; i < n; i++)
        if (fake_sendmsg(fd, &messages[i].msg_hdr, flags) < 0)
            return i ? (int)i : -1;
    return (int)n;
}

static ssize_t fake_recvmsg(int fd, struct msghdr *m, int flags) {
    (void)fd;
    (void)m;
    (void)flags;
    kernel.received++;
    errno = EAGAIN;
    return -1;
}

static int fake_recvmmsg(int fd, struct mmsghdr *m, unsigned n, int flags, struct timespec *t) {
    (void)fd;
    (void)m;
    (void)n;
    (void)flags;
    (void)t;
    errno = kernel.batch_error ? kernel.batch_error : EAGAIN;
    return -1;
}

static uint64_t test_stamp;

/* One datagram, with the time at which the kernel got it. */
static int stamped_recvmmsg(int fd, struct mmsghdr *m, unsigned n, int flags, struct timespec *t) {
    struct timespec stamp = {(time_t)(test_stamp / SECOND), (long)(test_stamp % SECOND)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m->msg_hdr);
    (void)fd;
    (void)n;
    (void)flags;
    (void)t;
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_TIMESTAMPNS;
    c->cmsg_len = CMSG_LEN(sizeof stamp);
    memcpy(CMSG_DATA(c), &stamp, sizeof stamp);
    m->msg_hdr.msg_controllen = CMSG_SPACE(sizeof stamp);
    m->msg_len = PACKET;
    return 1;
}

static const lc_udp_calls fake_calls = {fake_sendmmsg, fake_sendmsg, fake_recvmmsg, fake_recvmsg};

static lc_link *open_link(uint32_t disable, const lc_udp_calls *calls) {
    lc_host_config c = {
        .address = "127.0.0.1", .payload_bytes = PAYLOAD, .disable = disable | LC_PATH_MTU};
    lc_failure failure = {0};
    memset(&kernel, 0, sizeof kernel);
    test_now = 10 * SECOND;
    lc_link *link = lc_udp_open(&c, &test_clock, calls, &failure);
    CHECK(link != NULL);
    for (uint16_t i = 0; i < PEERS; i++) {
        lc_address peer = {.host = "127.0.0.1", .port = (uint16_t)(1000 + i)};
        CHECK(lc_link_set_peer(link, i, &peer) == LC_OK);
    }
    return link;
}

static uint8_t packets[PEERS][PACKETS][PACKET];
static struct iovec iov[PEERS][2 * PACKETS];
static lc_run runs[PEERS];

static const lc_run *a_run(uint16_t peer, uint32_t n) {
    for (uint32_t k = 0; k < n; k++) {
        iov[peer][2 * k] = (struct iovec){packets[peer][k], HEADER};
        iov[peer][2 * k + 1] = (struct iovec){packets[peer][k] + HEADER, PAYLOAD};
    }
    runs[peer] = (lc_run){.iov = iov[peer], .n_packets = n, .packet_bytes = PACKET, .peer = peer};
    return &runs[peer];
}

static int send_one(lc_link *link, uint16_t peer, uint32_t n) {
    int error = 0;
    return lc_link_send(link, a_run(peer, n), 1, &error);
}

static int is_event(lc_link *link, int kind, int error, int peer) {
    lc_event e = {0};
    return lc_link_event(link, &e) && e.kind == kind && e.sys_errno == error && e.peer == peer;
}

static int no_event(lc_link *link) {
    lc_event e;
    return !lc_link_event(link, &e);
}

static lc_link_stats stats_of(const lc_link *link) {
    lc_link_stats f;
    lc_link_stats_of(link, &f);
    return f;
}

static uint64_t sleep_of(lc_link *link, short *events) {
    struct pollfd fds[LC_LINK_DESCRIPTORS];
    uint64_t timeout = SECOND;
    CHECK(lc_link_descriptors(link, 1, fds, &timeout) == 1);
    *events = fds[0].events;
    return timeout;
}

/* ---- what a host's trouble does ---- */

/* Nothing is lost, nothing fails, nobody is kept busy; and when it is over, all goes on. */
static void test_put_off(int error, uint32_t disable, uint32_t n) {
    lc_link *link = open_link(disable, &fake_calls);
    lc_event e;
    short events;
    uint64_t wait = MS, begin = test_now;
    kernel.error = error;
    for (int tries = 0; tries < 10; tries++) {
        unsigned before = kernel.calls;
        CHECK_AT(send_one(link, 1, n) == 0, "errno %d", error);
        CHECK_AT(kernel.calls > before, "errno %d", error); /* the fault happened */
        before = kernel.calls;
        CHECK_AT(send_one(link, 1, n) == 0 && kernel.calls == before, "errno %d", error);
        CHECK_AT(sleep_of(link, &events) == wait, "errno %d, try %d", error, tries);
        CHECK(events == POLLIN);
        test_now += wait;
        wait = wait * 2 < 100 * MS ? wait * 2 : 100 * MS;
    }
    CHECK(stats_of(link).failed == 10 && link->handed == 0);
    CHECK_AT(is_event(link, LC_EVENT_FAILING, error, -1) && no_event(link), "errno %d", error);
    kernel.error = 0;
    CHECK(send_one(link, 1, n) == (int)n && link->handed == n);
    CHECK(lc_link_event(link, &e) && e.kind == LC_EVENT_WORKS && e.sys_errno == error);
    CHECK(e.waited_ns == test_now - begin);
    CHECK(stats_of(link).refused == 0); /* it wasn't the fast path's fault */
    (void)sleep_of(link, &events);
    CHECK(events == (POLLIN | POLLOUT));
    kernel.error = error; /* the next time is told again, and begins anew */
    CHECK(send_one(link, 1, n) == 0 && is_event(link, LC_EVENT_FAILING, error, -1));
    CHECK(sleep_of(link, &events) == MS);
    lc_link_close(link);
}

/* What one peer's packets meet is loss, and no other's. */
static void test_lost(int error, uint32_t disable) {
    lc_link *link = open_link(disable, &fake_calls);
    kernel.error = error;
    CHECK_AT(send_one(link, 2, PACKETS) == PACKETS, "errno %d", error);
    CHECK(kernel.calls > 0 && kernel.plain + kernel.segmented == 0);
    CHECK_AT(is_event(link, LC_EVENT_LOST, error, 2) && no_event(link), "errno %d", error);
    CHECK(send_one(link, 2, PACKETS) == PACKETS && no_event(link)); /* told once */
    kernel.error = 0;
    CHECK(send_one(link, 2, PACKETS) == PACKETS && kernel.plain + kernel.segmented > 0);
    kernel.error = error;
    CHECK(send_one(link, 2, PACKETS) == PACKETS && is_event(link, LC_EVENT_LOST, error, 2));
    CHECK(stats_of(link).failed == 0 && stats_of(link).refused == 0);
    lc_link_close(link);
}

static void test_errors(void) {
    const int put_off[] = {ENOMEM, ENOBUFS, ENETDOWN, EADDRNOTAVAIL, EINVAL, ENODEV, EIO, ENXIO};
    const int lost[] = {EPERM,        EACCES,    EHOSTUNREACH, ENETUNREACH,
                        ECONNREFUSED, EHOSTDOWN, EMSGSIZE};
    const uint32_t without[] = {0, LC_GSO, LC_GSO | LC_MMSG, LC_GSO | LC_GATHER};
    for (size_t d = 0; d < sizeof without / sizeof *without; d++) {
        for (size_t i = 0; i < sizeof put_off / sizeof *put_off; i++)
            for (uint32_t n = 1; n <= PACKETS; n += PACKETS - 1)
                test_put_off(put_off[i], without[d], n);
        for (size_t i = 0; i < sizeof lost / sizeof *lost; i++)
            test_lost(lost[i], without[d]);
    }
}

static void test_full(void) {
    lc_link *link = open_link(0, &fake_calls);
    short events;
    kernel.error = EAGAIN;
    CHECK(send_one(link, 0, PACKETS) == 0 && kernel.calls == 1);
    CHECK(sleep_of(link, &events) == SECOND && events == (POLLIN | POLLOUT));
    CHECK(stats_of(link).failed == 0 && no_event(link));
    lc_link_close(link);
}

/* The time of its next try is over, and it tells when it takes more: nobody is kept busy. */
static void test_full_after_a_failure(void) {
    lc_link *link = open_link(0, &fake_calls);
    short events;
    kernel.error = ENOBUFS;
    CHECK(send_one(link, 0, PACKETS) == 0 && sleep_of(link, &events) == MS);
    test_now += MS;
    kernel.error = EAGAIN;
    CHECK(send_one(link, 0, PACKETS) == 0 && kernel.calls == 2);
    CHECK(sleep_of(link, &events) == SECOND && events == (POLLIN | POLLOUT));
    lc_link_close(link);
}

static void test_broken(void) {
    lc_link *link = open_link(0, &fake_calls);
    int error = 0;
    kernel.error = EBADF;
    CHECK(lc_link_send(link, a_run(0, 1), 1, &error) == -1 && error == EBADF);
    lc_link_close(link);
}

/* ---- fast paths ---- */

static uint32_t active_of(const lc_link *link) {
    lc_link_info info;
    lc_link_info_of(link, &info);
    return info.active;
}

/* A run that can't be cut goes in pieces at once; only this peer's do from then on, and not for
 * good. */
static void test_segments_refused(int error) {
    lc_link *link = open_link(0, &fake_calls);
    CHECK(active_of(link) & LC_GSO);
    uint64_t wait = SECOND;
    kernel.segment_error = error;
    kernel.segment_port = 1001;
    for (int tries = 0; tries < 10; tries++) {
        kernel.plain = kernel.segmented = 0;
        CHECK(send_one(link, 1, PACKETS) == PACKETS && kernel.plain == PACKETS);
        CHECK_AT(is_event(link, LC_EVENT_REFUSED, error, 1) && no_event(link), "errno %d", error);
        CHECK_AT(stats_of(link).refused == (uint64_t)tries + 1, "try %d", tries);
        CHECK(!(active_of(link) & LC_GSO));
        CHECK(send_one(link, 2, PACKETS) == PACKETS && kernel.segmented == 1);
        test_now += wait - 1;
        CHECK(send_one(link, 1, PACKETS) == PACKETS && kernel.plain == 2 * PACKETS);
        CHECK(no_event(link));
        test_now += 1;
        wait = wait * 2 < 300 * SECOND ? wait * 2 : 300 * SECOND;
    }
    kernel.segment_error = 0;
    kernel.segmented = 0;
    CHECK(send_one(link, 1, PACKETS) == PACKETS && kernel.segmented == 1);
    CHECK(active_of(link) & LC_GSO);
    CHECK(stats_of(link).failed == 0);
    lc_link_close(link);
}

/* Runs to several peers in one call: only the refused one goes in pieces, in its order. */
static void test_batch(void) {
    lc_link *link = open_link(0, &fake_calls);
    lc_run batch[PEERS];
    int error = 0;
    kernel.segment_error = EIO;
    kernel.segment_port = 1001;
    for (uint16_t p = 0; p < PEERS; p++)
        batch[p] = *a_run(p, PACKETS);
    CHECK(lc_link_send(link, batch, PEERS, &error) == PEERS * PACKETS);
    CHECK(kernel.plain == PACKETS && kernel.segmented == 2);
    CHECK(lc_link_completed(link) == PEERS * PACKETS); /* what UDP has taken, it has copied */
    lc_link_close(link);
}

/* A peer that is forgotten takes its refusal along. */
static void test_forgotten(void) {
    lc_link *link = open_link(0, &fake_calls);
    kernel.segment_error = EIO;
    kernel.segment_port = 1001;
    CHECK(send_one(link, 1, PACKETS) == PACKETS && !(active_of(link) & LC_GSO));
    CHECK(lc_link_set_peer(link, 1, NULL) == LC_OK && (active_of(link) & LC_GSO));
    lc_link_close(link);
}

/* To one peer packets go one by one until that is called off, whatever is refused meanwhile. */
static void test_singly(void) {
    lc_link *link = open_link(0, &fake_calls);
    CHECK(link->aggregates);
    lc_link_go_singly(link, 1, 1);
    lc_link_go_singly(link, 1, 1);
    CHECK(!(active_of(link) & LC_GSO));
    CHECK(send_one(link, 1, PACKETS) == PACKETS && kernel.plain == PACKETS);
    CHECK(send_one(link, 2, PACKETS) == PACKETS && kernel.segmented == 1);
    CHECK(no_event(link) && stats_of(link).refused == 0);
    lc_link_go_singly(link, 1, 0);
    CHECK(active_of(link) & LC_GSO);
    CHECK(send_one(link, 1, PACKETS) == PACKETS && kernel.segmented == 2);
    kernel.segment_error = EIO;
    kernel.segment_port = 1001;
    CHECK(send_one(link, 1, PACKETS) == PACKETS);
    lc_link_go_singly(link, 1, 1);
    CHECK(lc_link_set_peer(link, 1, NULL) == LC_OK && (active_of(link) & LC_GSO));
    lc_link_close(link);
    link = open_link(LC_GSO, &fake_calls);
    CHECK(!link->aggregates);
    lc_link_close(link);
}

static void test_batching_refused(void) {
    lc_link *link = open_link(0, &fake_calls);
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    kernel.batch_error = ENOSYS;
    CHECK(send_one(link, 0, PACKETS) == PACKETS && kernel.batches == 0);
    CHECK(is_event(link, LC_EVENT_REFUSED, ENOSYS, -1) && !(active_of(link) & LC_MMSG));
    CHECK(lc_link_receive(link, arrivals, 8) == 0 && kernel.received == 1);
    CHECK(no_event(link)); /* it is known by now */
    kernel.batch_error = 0;
    CHECK(send_one(link, 0, 1) == 1 && kernel.batches == 0);
    test_now += 60 * SECOND;
    CHECK(send_one(link, 0, 1) == 1 && kernel.batches == 1 && (active_of(link) & LC_MMSG));
    kernel.batch_error = ENOSYS;
    CHECK(lc_link_receive(link, arrivals, 8) == 0 && kernel.received == 2);
    CHECK(is_event(link, LC_EVENT_REFUSED, ENOSYS, -1));
    lc_link_close(link);
}

/* The time of day may be set between a packet's stamp and its reading, or stand still. */
static void test_stamps(void) {
    const lc_udp_calls calls = {fake_sendmmsg, fake_sendmsg, stamped_recvmmsg, fake_recvmsg};
    const uint64_t day = 1000 * SECOND;
    const struct {
        uint64_t now, stamp, came; /* 0: the stamp isn't believed */
    } cases[] = {
        {20 * SECOND, day - MS, 20 * SECOND - MS}, /* right */
        {20 * SECOND, day + MS, 0},                /* set back since */
        {20 * SECOND, day + 3600 * SECOND, 0},
        {20 * SECOND, day - 3600 * SECOND, 0}, /* set forward since */
        {20 * SECOND, 5, 0},                   /* it stands still */
        {MS, day - 2 * MS, 0},                 /* before the machine started */
    };
    lc_link *link = open_link(0, &calls);
    lc_arrival arrival;
    if (!(active_of(link) & LC_STAMPS) && getenv("EMULATED")) {
        printf("test_link    no stamps under an emulator: not tried\n");
        lc_link_close(link);
        return;
    }
    CHECK(active_of(link) & LC_STAMPS);
    test_day = day;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_now = cases[i].now;
        test_stamp = cases[i].stamp;
        CHECK(lc_link_receive(link, &arrival, 1) == 1);
        CHECK_AT(arrival.came_ns == cases[i].came, "case %zu", i);
    }
    test_day = 0;
    lc_link_close(link);
}

/* ---- the socket ---- */

static void test_path_mtu(void) {
    lc_failure failure;
    const char *here[] = {"127.0.0.1", "::1"};
    for (int i = 0; i < 2; i++) {
        lc_host_config c = {.address = here[i], .payload_bytes = PAYLOAD};
        lc_link *link = lc_udp_open(&c, &lc_system_clock, NULL, &failure);
        if (!link && i == 1)
            continue; /* no IPv6 on this machine */
        int found = -1;
        socklen_t n = sizeof found;
        if (i == 0)
            (void)getsockopt(lc_udp_of(link)->socket.fd, IPPROTO_IP, IP_MTU_DISCOVER, &found, &n);
        else
            (void)getsockopt(lc_udp_of(link)->socket.fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &found,
                             &n);
        CHECK(found == (i == 0 ? IP_PMTUDISC_PROBE : IPV6_PMTUDISC_PROBE));
        lc_link_close(link);
    }
}

static void test_peers(void) {
    lc_link *link = open_link(0, NULL);
    const lc_address v6 = {.host = "::1", .port = 5}, no = {.host = "nowhere", .port = 5},
                     far = {.host = "127.0.0.1", .port = 999};
    CHECK(lc_link_set_peer(link, 1, &v6) == LC_E_ARGUMENT);
    CHECK(lc_link_set_peer(link, 1, &no) == LC_E_ARGUMENT);
    CHECK(lc_link_set_peer(link, 300, &far) == LC_OK); /* the table grows */
    struct sockaddr_in from = {
        .sin_family = AF_INET, .sin_port = htons(999), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    lc_arrival a = {.from = &from};
    CHECK(lc_link_is_from(link, &a, 300) && !lc_link_is_from(link, &a, 1));
    CHECK(!lc_link_is_from(link, &a, 299) && !lc_link_is_from(link, &a, 60000));
    CHECK(lc_link_set_peer(link, 300, NULL) == LC_OK && !lc_link_is_from(link, &a, 300));
    lc_link_close(link);
}

/* An address is this machine's if an interface has it: of IPv6, with the same scope. */
static void test_here(void) {
    static const struct {
        const char *address;
        int here;
    } known[] = {{"127.0.0.1", 1}, {"127.9.8.7", 1},   {"198.51.100.7", 0},
                 {"::1", 1},       {"2001:db8::7", 0}, {"::2", 0}};
    struct ifaddrs *all = NULL;
    CHECK(getifaddrs(&all) == 0);
    lc_link *link = open_link(0, NULL);
    lc_udp *u = lc_udp_of(link);
    int own = 0, has_v6 = 0;
    for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET6)
            continue;
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)i->ifa_addr;
        has_v6 |= IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
        u->family = AF_INET6;
        lc_udp_address *a = &u->peers[0].address;
        a->v6 = *v6;
        CHECK(link->ops->is_here(link, 0));
        a->v6.sin6_scope_id += 1000;
        CHECK(!link->ops->is_here(link, 0));
        own++;
    }
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        u->family = strchr(known[k].address, ':') ? AF_INET6 : AF_INET;
        if (u->family == AF_INET6 && !has_v6 && known[k].here)
            continue;
        const lc_address peer = {.host = known[k].address, .port = 778};
        CHECK(lc_link_set_peer(link, 0, &peer) == LC_OK);
        const lc_udp_address *a = &u->peers[0].address;
        CHECK(ntohs(u->family == AF_INET ? a->v4.sin_port : a->v6.sin6_port) == 778);
        CHECK_AT(link->ops->is_here(link, 0) == known[k].here, "%s", known[k].address);
    }
    CHECK(own > 0 || !has_v6);
    freeifaddrs(all);
    lc_link_close(link);
}

/* Who sends is known by address and port, in either family. The link is told its family, so that
 * this needs no IPv6 of the machine. */
static void test_senders(void) {
    static const struct {
        int family;
        const char *peer, *other;
    } ways[] = {{AF_INET, "127.0.0.1", "127.0.0.2"}, {AF_INET6, "fd00::1", "fd00::2"}};
    for (int i = 0; i < 2; i++) {
        lc_link *link = open_link(0, NULL);
        lc_udp *u = lc_udp_of(link);
        u->family = ways[i].family;
        const lc_address peers[] = {{.host = ways[i].peer, .port = 999},
                                    {.host = ways[i].other, .port = 999},
                                    {.host = ways[i].peer, .port = 998}};
        for (uint16_t k = 0; k < PEERS; k++)
            CHECK(lc_link_set_peer(link, k, &peers[k]) == LC_OK);
        for (uint16_t from = 0; from < PEERS; from++)
            for (uint16_t peer = 0; peer < PEERS; peer++) {
                lc_udp_address address = u->peers[from].address;
                lc_arrival a = {.from = &address};
                CHECK_AT(lc_link_is_from(link, &a, peer) == (from == peer),
                         "family %d: from %d, taken for %d", ways[i].family, from, peer);
                address.any.sa_family = i ? AF_INET : AF_INET6;
                CHECK(!lc_link_is_from(link, &a, peer));
            }
        lc_link_close(link);
    }
}

/* What out-of-band datagrams say of their sender, in either family. */
static void test_sources(void) {
    static const uint8_t v4[16] = {[10] = 0xFF, [11] = 0xFF, [12] = 127, [15] = 5},
                         v6[16] = {[0] = 0xFD, [15] = 5};
    for (int i = 0; i < 2; i++) {
        lc_link *link = open_link(0, NULL);
        lc_udp *u = lc_udp_of(link);
        u->family = i ? AF_INET6 : AF_INET;
        const lc_address peer = {.host = i ? "fd00::5" : "127.0.0.5", .port = 777};
        CHECK(lc_link_set_peer(link, 0, &peer) == LC_OK);
        lc_arrival a = {.from = &u->peers[0].address};
        lc_oob_datagram datagram = {.port = 0};
        link->ops->source(link, &a, &datagram);
        CHECK(datagram.port == 777 && memcmp(datagram.address, i ? v6 : v4, sizeof v4) == 0);
        lc_link_close(link);
    }
}

static uint32_t charged(const lc_link *link) {
    uint32_t of[SK_MEMINFO_VARS] = {0};
    socklen_t n = sizeof of;
    CHECK(getsockopt(lc_udp_of_const(link)->socket.fd, SOL_SOCKET, SO_MEMINFO, of, &n) == 0);
    return of[SK_MEMINFO_RMEM_ALLOC];
}

/* Without fast paths, with the buffer of an untouched Linux; its peer 0 is itself. */
static lc_link *open_to_itself(uint16_t payload_bytes, lc_link_info *info) {
    lc_host_config c = {.address = "127.0.0.1",
                        .payload_bytes = payload_bytes,
                        .socket_buffer = 106496,
                        .disable = LC_GSO | LC_GRO | LC_MMSG | LC_GATHER};
    lc_failure failure = {0};
    lc_link *link = lc_udp_open(&c, &lc_system_clock, NULL, &failure);
    CHECK(link != NULL);
    lc_link_info_of(link, info);
    const lc_address self = {.host = "127.0.0.1", .port = info->port};
    CHECK(lc_link_set_peer(link, 0, &self) == LC_OK);
    return link;
}

/* Beside all data that peers may send, their control finds room: a process that is stopped loses
 * none of it. */
static void test_credits_leave_room_for_control(void) {
    enum { LARGE = 8896, SENDERS = 4, CONTROL = 2 * HEADER };
    static uint8_t large[HEADER + LARGE];
    lc_link_info info;
    lc_link *link = open_to_itself(LARGE, &info);
    struct iovec parts[2] = {{large, HEADER}, {large + HEADER, CONTROL - HEADER}};
    lc_run run = {.iov = parts, .n_packets = 1, .packet_bytes = CONTROL};
    int error = 0;
    uint32_t credits = lc_link_credits(link, sizeof large, SENDERS);
    CHECK(lc_link_send(link, &run, 1, &error) == 1);
    uint64_t control = charged(link);
    parts[1].iov_len = LARGE;
    run.packet_bytes = sizeof large;
    for (uint32_t k = 0; k < SENDERS * credits; k++)
        CHECK(lc_link_send(link, &run, 1, &error) == 1);
    uint64_t data = charged(link) - control, buffer = (uint64_t)info.receive_buffer;
    CHECK_AT(credits && control && data + SENDERS * LC_CONTROL_WAITING * control <= buffer * 3 / 4,
             "%u credits, charged %lu and %lu of %lu", credits, (unsigned long)data,
             (unsigned long)control, (unsigned long)buffer);
    lc_link_close(link);
}

/* What is in the buffer must fit, as the kernel counts it: real packets, none of them dropped. */
static void test_credits(void) {
    lc_link *link = open_link(0, NULL);
    lc_link_info info;
    lc_link_info_of(link, &info);
    uint32_t credits = lc_link_credits(link, PACKET, 1);
    CHECK(credits > 10 && (uint64_t)credits * PACKET < (uint64_t)info.receive_buffer);
    CHECK(lc_link_credits(link, 8 * PACKET, 1) < credits);
    CHECK(lc_link_credits(link, PACKET, 4) <= credits / 4);
    const lc_address self = {.host = "127.0.0.1", .port = info.port};
    CHECK(lc_link_set_peer(link, 0, &self) == LC_OK);
    if (credits > 20000)
        credits = 20000;
    for (uint32_t k = 0; k < credits; k++)
        CHECK(send_one(link, 0, 1) == 1);
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    uint32_t got = 0;
    for (int n; (n = lc_link_receive(link, arrivals, LC_RECEIVE_BUFFERS)) > 0;)
        for (int i = 0; i < n; i++)
            got += arrivals[i].length / PACKET;
    CHECK_AT(got == credits && stats_of(link).overflow == 0, "%u of %u", got, credits);
    lc_link_close(link);
}

/* As many packets as there is room for, again and again, read one at a time and sent anew at once.
 * The kernel still charges for some of those that were read. */
static void test_credits_of_what_is_read(void) {
    enum { LARGE = 8896, ROUNDS = 50 };
    static uint8_t large[HEADER + LARGE];
    lc_link_info info;
    lc_link *link = open_to_itself(LARGE, &info);
    struct iovec parts[2] = {{large, HEADER}, {large + HEADER, LARGE}};
    lc_run run = {.iov = parts, .n_packets = 1, .packet_bytes = sizeof large};
    uint32_t credits = lc_link_credits(link, sizeof large, 1);
    CHECK(credits > 4);
    int error = 0;
    for (uint32_t k = 0; k < credits; k++)
        CHECK(lc_link_send(link, &run, 1, &error) == 1);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        lc_arrival arrival;
        for (uint32_t k = 0; k <= round % credits; k++)
            CHECK_AT(lc_link_receive(link, &arrival, 1) == 1, "round %u", round);
        for (uint32_t k = 0; k <= round % credits; k++)
            CHECK(lc_link_send(link, &run, 1, &error) == 1);
    }
    CHECK_AT(stats_of(link).overflow == 0, "%u credits", credits);
    lc_link_close(link);
}

/* Bit i of blocked: links[i] is. */
static int sleep_on(lc_waiter *w, lc_link *const *links, int n, uint32_t blocked,
                    uint64_t longest_ns) {
    lc_sleep sleep;
    lc_sleep_begin(&sleep, longest_ns);
    for (int i = 0; i < n; i++)
        lc_sleep_on(&sleep, links[i], blocked >> i & 1);
    return lc_waiter_sleep(w, &sleep);
}

static void test_waiter(void) {
    lc_link *a = open_link(0, NULL), *b = open_link(0, NULL);
    lc_link *both[] = {a, b};
    lc_waiter w;
    lc_link_info info;
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    CHECK(lc_waiter_open(&w));
    CHECK(!sleep_on(&w, both, 2, 0, MS));
    lc_waiter_wake(&w);
    lc_waiter_wake(&w);
    CHECK(sleep_on(&w, both, 2, 0, 3600 * SECOND));
    CHECK(!sleep_on(&w, NULL, 0, 0, MS)); /* two wakes are one */
    lc_link_info_of(b, &info);
    const lc_address to = {.host = "127.0.0.1", .port = info.port};
    CHECK(lc_link_set_peer(a, 0, &to) == LC_OK && send_one(a, 0, 1) == 1);
    CHECK(!sleep_on(&w, both, 2, 0, 3600 * SECOND));
    CHECK(lc_link_receive(b, arrivals, 8) == 1);
    CHECK(!sleep_on(&w, both, 2, 1, 3600 * SECOND)); /* a takes packets */
    lc_waiter_close(&w);
    lc_link_close(a);
    lc_link_close(b);
}

/* ---- the real kernel ---- */

static int set_address(int fd, const char *address) {
    struct ifreq r = {.ifr_name = "lo:1"};
    struct sockaddr_in *a = (struct sockaddr_in *)(void *)&r.ifr_addr;
    a->sin_family = AF_INET;
    a->sin_addr.s_addr = inet_addr(address);
    if (ioctl(fd, SIOCSIFADDR, &r) != 0)
        return -1;
    a->sin_addr.s_addr = INADDR_NONE; /* a single host, or all its neighbours would be local too */
    return ioctl(fd, SIOCSIFNETMASK, &r);
}

static int set_up(int fd, const char *name, int up) {
    struct ifreq r = {.ifr_flags = 0};
    memcpy(r.ifr_name, name, strlen(name) + 1);
    if (ioctl(fd, SIOCGIFFLAGS, &r) != 0)
        return -1;
    r.ifr_flags = (short)(up ? r.ifr_flags | IFF_UP : r.ifr_flags & ~IFF_UP);
    return ioctl(fd, SIOCSIFFLAGS, &r);
}

static int took_all(lc_link *link) {
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    uint32_t bytes = 0;
    int n = lc_link_receive(link, arrivals, LC_RECEIVE_BUFFERS);
    for (int i = 0; i < n; i++)
        bytes += arrivals[i].length;
    return bytes == PACKETS * PACKET;
}

/* The address that the socket is bound to goes, and comes back; then the interface. */
static int lose_the_network(void) {
    lc_host_config c = {.address = "10.99.0.1", .payload_bytes = PAYLOAD, .disable = LC_PATH_MTU};
    lc_host_config other = {.address = "127.0.0.1", .payload_bytes = PAYLOAD};
    lc_failure failure;
    lc_link_info info;
    lc_event e;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (set_up(fd, "lo", 1) != 0 || set_address(fd, "10.99.0.1") != 0)
        return 2;
    test_now = SECOND;
    lc_link *link = lc_udp_open(&c, &test_clock, NULL, &failure);
    lc_link *there = lc_udp_open(&other, &test_clock, NULL, &failure);
    if (!CHECK(link && there))
        return 1;
    lc_link_info_of(there, &info);
    const lc_address to = {.host = "127.0.0.1", .port = info.port};
    CHECK(lc_link_set_peer(link, 0, &to) == LC_OK);
    CHECK(send_one(link, 0, PACKETS) == PACKETS && took_all(there) && no_event(link));

    CHECK(set_address(fd, "10.99.0.2") == 0); /* and no longer 10.99.0.1 */
    CHECK(send_one(link, 0, PACKETS) == 0 && !took_all(there));
    CHECK(lc_link_event(link, &e) && e.kind == LC_EVENT_FAILING);
    printf("test_link    without its address: %s\n", strerror(e.sys_errno));
    CHECK(set_address(fd, "10.99.0.1") == 0);
    test_now += SECOND;
    CHECK(send_one(link, 0, PACKETS) == PACKETS && took_all(there));
    CHECK(is_event(link, LC_EVENT_WORKS, e.sys_errno, -1));

    CHECK(set_up(fd, "lo", 0) == 0);
    int gone = send_one(link, 0, PACKETS);
    CHECK(!took_all(there));
    e = (lc_event){.kind = LC_EVENT_LOST};
    (void)lc_link_event(link, &e); /* some kernels say nothing */
    printf("test_link    without its interface: %s\n", strerror(e.sys_errno));
    CHECK(gone == (e.kind == LC_EVENT_LOST ? PACKETS : 0));
    CHECK(set_up(fd, "lo", 1) == 0 && set_address(fd, "10.99.0.1") == 0);
    test_now += SECOND;
    CHECK(send_one(link, 0, PACKETS) == PACKETS && took_all(there));
    CHECK(stats_of(link).refused == 0);
    lc_link_close(link);
    lc_link_close(there);
    close(fd);
    return check_failed != 0;
}

/* A child has no copy of the socket, nor does its own child take another file for one. */
static int own_nothing(const lc_udp *u, int had) {
    if (u->socket.fd != -1 || fcntl(had, F_GETFD) != -1 || dup2(0, had) != had)
        return 1;
    pid_t child = fork();
    if (child == 0)
        _exit(fcntl(had, F_GETFD) == -1);
    int status = 1;
    return waitpid(child, &status, 0) != child || status != 0;
}

static void test_forked_child(void) {
    lc_host_config c = {.address = "127.0.0.1", .payload_bytes = PAYLOAD};
    lc_failure failure;
    lc_link_info info;
    int lives[2], ready[2];
    char right = 0;
    lc_link *other = lc_udp_open(&c, &test_clock, NULL, &failure);
    lc_link *link = lc_udp_open(&c, &test_clock, NULL, &failure);
    if (!CHECK(other && link && pipe(lives) == 0 && pipe(ready) == 0))
        return;
    lc_link_info_of(link, &info);
    c.port = info.port;
    CHECK(!lc_udp_open(&c, &test_clock, NULL, &failure) && failure.sys_errno == EADDRINUSE);
    int had = lc_udp_of(link)->socket.fd;
    pid_t child = fork();
    if (child == 0) {
        close(lives[1]);
        right = own_nothing(lc_udp_of(link), had) ? 'n' : 'y';
        _exit(write(ready[1], &right, 1) != 1 || read(lives[0], &right, 1) != 0);
    }
    CHECK(read(ready[0], &right, 1) == 1 && right == 'y');
    lc_link_close(link);
    link = lc_udp_open(&c, &test_clock, NULL, &failure); /* the child lives */
    CHECK(link != NULL);
    lc_link_close(other);
    if (link)
        lc_link_close(link);
    for (int i = 0; i < 2; i++) {
        close(lives[1 - i]);
        close(ready[i]);
    }
    CHECK(waitpid(child, NULL, 0) == child);
}

static void test_real_kernel(void) {
    if (getenv("EMULATED")) { /* which doesn't hand on all errors of sockets */
        printf("test_link    an emulator between it and the kernel: not tried\n");
        return;
    }
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
            _exit(2);
        int code = lose_the_network();
        fflush(NULL);
        _exit(code);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 2)
        printf("test_link    no network of its own here: not tried with the real kernel\n");
    else
        CHECK(WEXITSTATUS(status) == 0);
}

int main(void) {
    test_errors();
    test_full();
    test_full_after_a_failure();
    test_broken();
    test_segments_refused(EIO);
    test_segments_refused(EINVAL);
    test_segments_refused(EMSGSIZE);
    test_segments_refused(EOPNOTSUPP);
    test_batch();
    test_forgotten();
    test_singly();
    test_batching_refused();
    test_stamps();
    test_path_mtu();
    test_peers();
    test_here();
    test_senders();
    test_sources();
    test_credits();
    test_credits_leave_room_for_control();
    test_credits_of_what_is_read();
    test_waiter();
    test_forked_child();
    test_real_kernel();
    return check_result("test_link");
}
