/* The verbs link on a fake libibverbs (fake_verbs.c): a device that drops, refuses and fails as the
 * test wants. */
#include "link_verbs.h"

#include "check.h"
#include "fake_verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 48, PAYLOAD = 4032, PACKET = HEADER + PAYLOAD, PACKETS = 64, MTU = 4096 };

static const uint64_t MS = 1000000, SECOND = 1000000000;

static char library[PATH_MAX];
static fake_verbs_state *fake;
static void (*raise_event)(int type, int port, int others);

/* ---- a clock ---- */

static uint64_t test_now = 1000000000;

static uint64_t now_of(void *context) {
    (void)context;
    return test_now;
}

static const lc_clock test_clock = {now_of, now_of, NULL};

/* ---- links ---- */

static lc_verbs_info info_of;
static lc_failure why;

static lc_link *open_with(lc_verbs_config config) {
    config.library = library;
    if (!config.device)
        config.device = "fake0";
    if (!config.port)
        config.port = 1;
    return lc_verbs_link(&config, &test_clock, &info_of, &why);
}

typedef struct {
    lc_link *link;
    lc_verbs_info info;
} end;

static end open_end(uint32_t queue) {
    end e = {open_with((lc_verbs_config){.gid = 1, .queue = queue}), info_of};
    if (!CHECK(e.link != NULL))
        abort();
    return e;
}

static void introduce(end *a, uint16_t number, const end *b) {
    lc_address address = {.verbs = b->info.address};
    CHECK(lc_link_set_peer(a->link, number, &address) == LC_OK);
}

typedef struct {
    end a, b; /* each is the other's peer 1 */
} pair;

static pair open_pair(uint32_t queue) {
    pair p = {open_end(queue), open_end(queue)};
    introduce(&p.a, 1, &p.b);
    introduce(&p.b, 1, &p.a);
    return p;
}

static void close_pair(pair *p) {
    lc_link_close(p->a.link);
    lc_link_close(p->b.link);
    CHECK(fake->ways == 0);
    fake_verbs_state none = {.sent = 0};
    *fake = none;
}

/* ---- packets ---- */

static uint8_t headers[PACKETS][HEADER], payloads[PACKETS][PAYLOAD];
static struct iovec iov[2 * PACKETS];
static uint64_t contents[PACKETS];

static lc_run a_run(uint32_t first, uint32_t n, size_t payload) {
    for (uint32_t k = 0; k < n; k++) {
        memset(headers[k], (int)(first + k), HEADER);
        memset(payloads[k], (int)(first + k + 1), payload);
        iov[2 * k] = (struct iovec){headers[k], HEADER};
        iov[2 * k + 1] = (struct iovec){payloads[k], payload};
    }
    return (lc_run){.iov = iov,
                    .n_packets = n,
                    .packet_bytes = (uint32_t)(HEADER + payload),
                    .peer = 1,
                    .contents = contents};
}

static int send_some(lc_link *link, uint32_t first, uint32_t n, size_t payload) {
    lc_run run = a_run(first, n, payload);
    int error = 0;
    int gone = lc_link_send(link, &run, 1, &error);
    memset(headers, 0xEE, sizeof headers); /* they are the caller's again */
    memset(payloads, 0xEE, sizeof payloads);
    return gone;
}

static void pause_a_little(void) {
    const struct timespec t = {0, 200000};
    nanosleep(&t, NULL);
}

/* The device's thread has seen to all that was sent. */
static void settle(void) {
    for (int i = 0;
         i < 20000 && __atomic_load_n(&fake->arrived, __ATOMIC_RELAXED) <
                          __atomic_load_n(&fake->sent, __ATOMIC_RELAXED) - fake->swallowed;
         i++)
        pause_a_little();
}

static int is_packet(const lc_arrival *a, uint8_t first, size_t payload) {
    if (a->length != HEADER + payload || a->stride != a->length || a->rest)
        return 0;
    for (size_t i = 0; i < a->length; i++)
        if (a->data[i] != (uint8_t)(i < HEADER ? first : first + 1))
            return 0;
    return 1;
}

/* Takes what has come, in order. Returns how many came. */
static uint32_t take_all(lc_link *link, uint32_t first, size_t payload, uint16_t from) {
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    uint32_t got = 0;
    int n;
    while ((n = lc_link_receive(link, arrivals, LC_RECEIVE_BUFFERS)) > 0)
        for (int i = 0; i < n; i++) {
            CHECK_AT(is_packet(&arrivals[i], (uint8_t)(first + got), payload), "packet %u", got);
            CHECK(lc_link_is_from(link, &arrivals[i], from) && !lc_link_is_from(link, arrivals, 7));
            got++;
        }
    return got;
}

static int is_event(lc_link *link, int kind, int error) {
    lc_event e = {0};
    test_now += 200 * MS;
    return lc_link_event(link, &e) && e.kind == kind && e.sys_errno == error && e.peer == -1;
}

static int no_event(lc_link *link) {
    lc_event e;
    test_now += 200 * MS;
    return !lc_link_event(link, &e);
}

/* ---- packets that come ---- */

static void test_packets(void) {
    pair p = open_pair(0);
    const size_t sizes[] = {0, 1, 80, 81, 2000, PAYLOAD};
    CHECK(p.a.info.mtu == MTU && p.a.link->packet_max == MTU && p.a.info.ethernet);
    CHECK(p.a.info.queue == LC_VERBS_QUEUE && p.a.info.queue_of == LC_VERBS_QUEUE);
    CHECK(p.a.info.address.key >> 31 == 0 && p.a.info.address.key != p.b.info.address.key);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t inlined = fake->inlined;
        for (uint32_t first = 0; first < 3 * PACKETS; first += PACKETS)
            CHECK(send_some(p.a.link, first, PACKETS, sizes[i]) == PACKETS);
        settle();
        CHECK_AT(take_all(p.b.link, 0, sizes[i], 1) == 3 * PACKETS, "%zu bytes", sizes[i]);
        int is_short = HEADER + sizes[i] <= LC_VERBS_INLINE;
        CHECK((fake->inlined - inlined) == (is_short ? 3 * PACKETS : 0));
    }
    CHECK(p.a.link->handed == 18 * PACKETS && lc_link_completed(p.a.link) == p.a.link->handed);
    CHECK(fake->completed == 18 * PACKETS / LC_VERBS_SIGNAL_EVERY);
    lc_link_stats f;
    lc_link_stats_of(p.a.link, &f);
    CHECK(f.send_calls == 18 && f.failed == 0 && f.overflow == 0); /* a chain for each run */
    CHECK(no_event(p.a.link));
    close_pair(&p);
}

/* A first piece that is larger than a head, as control has it. */
static void test_large_heads(void) {
    pair p = open_pair(0);
    static uint8_t head[1000], rest[500];
    memset(head, 5, sizeof head);
    memset(rest, 6, sizeof rest);
    for (size_t n = 0; n <= sizeof rest; n += sizeof rest) {
        struct iovec pieces[2] = {{head, sizeof head}, {n ? rest : NULL, n}};
        lc_run run = {
            .iov = pieces, .n_packets = 1, .packet_bytes = (uint32_t)(1000 + n), .peer = 1};
        lc_arrival a[LC_RECEIVE_BUFFERS];
        int error;
        CHECK(lc_link_send(p.a.link, &run, 1, &error) == 1);
        settle();
        CHECK(lc_link_receive(p.b.link, a, LC_RECEIVE_BUFFERS) == 1 && a[0].length == 1000 + n);
        CHECK(!memcmp(a[0].data, head, sizeof head));
        CHECK(!memcmp(a[0].data + sizeof head, rest, n));
    }
    close_pair(&p);
}

/* More than the device has requests for, and more than one copy of each payload. */
static void test_payloads_of_several(void) {
    enum { RECEIVERS = 3 };
    end from = open_end(0), to[RECEIVERS];
    lc_run runs[RECEIVERS];
    int error;
    for (uint16_t i = 0; i < RECEIVERS; i++) {
        to[i] = open_end(0);
        introduce(&from, (uint16_t)(i + 1), &to[i]);
        introduce(&to[i], 1, &from);
    }
    for (uint32_t round = 0; round < 20; round++) {
        for (uint32_t k = 0; k < PACKETS; k++)
            contents[k] = 1 + round * PACKETS + k;
        runs[0] = a_run(round, PACKETS, PAYLOAD);
        for (uint16_t i = 0; i < RECEIVERS; i++) {
            runs[i] = runs[0];
            runs[i].peer = (uint16_t)(i + 1);
            runs[i].receivers = RECEIVERS;
        }
        uint32_t free_before = lc_verbs_of(from.link)->n_free;
        CHECK(lc_link_send(from.link, runs, RECEIVERS, &error) == RECEIVERS * PACKETS);
        CHECK(free_before < PACKETS ||
              lc_verbs_of(from.link)->n_free + PACKETS >= free_before); /* one copy of each */
        settle();
        for (uint16_t i = 0; i < RECEIVERS; i++)
            CHECK(take_all(to[i].link, round, PAYLOAD, 1) == PACKETS);
    }
    for (uint16_t i = 0; i < RECEIVERS; i++)
        lc_link_close(to[i].link);
    lc_link_close(from.link);
    fake_verbs_state none = {.sent = 0};
    *fake = none;
}

/* A payload is filled again only when nobody reads it, and not just its first reader. */
static void test_payloads_that_are_read(void) {
    pair p = open_pair(0);
    introduce(&p.a, 2, &p.b);
    for (uint32_t k = 0; k < PACKETS; k++)
        contents[k] = 77 + k;
    lc_run runs[2] = {a_run(0, PACKETS, PAYLOAD)};
    int error;
    runs[0].receivers = 2;
    runs[1] = runs[0];
    runs[1].peer = 2;
    runs[1].n_packets = PACKETS - 1; /* so these are not reported as done */
    CHECK(lc_link_send(p.a.link, runs, 2, &error) == 2 * PACKETS - 1);
    CHECK(lc_verbs_of(p.a.link)->n_free == LC_VERBS_SENDS - PACKETS);
    lc_run none = {.n_packets = 0, .peer = 1};
    CHECK(lc_link_send(p.a.link, &none, 1, &error) == 0); /* takes back what is done */
    CHECK(lc_verbs_of(p.a.link)->n_free == LC_VERBS_SENDS - (PACKETS - 1));
    CHECK(send_some(p.a.link, 0, 1, PAYLOAD) == 1);
    CHECK(lc_link_send(p.a.link, &none, 1, &error) == 0);
    CHECK(lc_verbs_of(p.a.link)->n_free == LC_VERBS_SENDS);
    close_pair(&p);
}

/* So many may be sent before any is taken, and none of them is dropped; more are, and are told. */
static void test_credits(void) {
    char folder[] = "/tmp/fake-verbs-XXXXXX", path[64];
    CHECK(mkdtemp(folder) != NULL);
    lc_verbs_config config = {.gid = 1, .queue = 256, .counters = folder};
    end a = open_end(256), b = {open_with(config), info_of};
    introduce(&a, 1, &b);
    introduce(&b, 1, &a);
    uint32_t credits = lc_link_credits(b.link, PACKET, 1);
    CHECK(credits > 150 && credits < 256);
    CHECK(lc_link_credits(b.link, PACKET, 4) <= credits / 4);
    CHECK(lc_link_credits(b.link, 64, 1) == credits); /* a small one takes as much */
    for (int round = 0; round < 5; round++) {
        for (uint32_t k = 0; k < credits; k++)
            CHECK(send_some(a.link, k, 1, 1000) == 1);
        settle();
        CHECK(take_all(b.link, 0, 1000, 1) == credits);
    }
    CHECK(fake->dropped == 0);
    for (uint32_t k = 0; k < 300; k++)
        CHECK(send_some(a.link, k, 1, 1000) == 1);
    settle();
    CHECK(fake->dropped >= 300 - 256);
    snprintf(path, sizeof path, "%s/out_of_buffer", folder);
    FILE *file = fopen(path, "w");
    fprintf(file, "%llu\n", (unsigned long long)fake->dropped);
    fclose(file);
    lc_link_stats f;
    test_now += SECOND;
    CHECK(no_event(b.link));
    lc_link_stats_of(b.link, &f);
    CHECK(f.overflow == fake->dropped);
    remove(path);
    const char *soft[] = {"rcvd_pkts", "rdma_recvs"};
    const int says[] = {90, 50};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, soft[i]);
        file = fopen(path, "w");
        fprintf(file, "%d\n", says[i]);
        fclose(file);
    }
    test_now += SECOND;
    CHECK(no_event(b.link));
    lc_link_stats_of(b.link, &f);
    CHECK(f.overflow == 40);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, soft[i]);
        remove(path);
    }
    rmdir(folder);
    pair p = {a, b};
    close_pair(&p);
}

/* ---- what isn't from a peer, or is no packet ---- */

static int comes_from_peer(pair *p) {
    lc_arrival a[LC_RECEIVE_BUFFERS];
    CHECK(send_some(p->a.link, 1, 1, 500) == 1);
    settle();
    int n = lc_link_receive(p->b.link, a, LC_RECEIVE_BUFFERS);
    return n == 1 ? lc_link_is_from(p->b.link, a, 1) : -1;
}

static void test_strangers(void) {
    pair p = open_pair(0);
    CHECK(comes_from_peer(&p) == 1);
    fake->forged_grh = 1;
    CHECK(comes_from_peer(&p) == 0);
    fake->forged_grh = 0;
    fake->no_grh = 1; /* on InfiniBand, within a subnet: the lid tells */
    CHECK(comes_from_peer(&p) == 0);
    lc_address other = {.verbs = p.a.info.address};
    other.verbs.lid = 7;
    CHECK(lc_link_set_peer(p.b.link, 1, &other) == LC_OK && comes_from_peer(&p) == 1);
    fake->no_grh = 0;
    other.verbs.queue_pair ^= 1;
    CHECK(lc_link_set_peer(p.b.link, 1, &other) == LC_OK && comes_from_peer(&p) == 0);
    CHECK(lc_link_set_peer(p.b.link, 1, NULL) == LC_OK && comes_from_peer(&p) == 0);
    other.verbs = p.b.info.address;
    other.verbs.key ^= 1;
    CHECK(lc_link_set_peer(p.a.link, 1, &other) == LC_OK);
    CHECK(comes_from_peer(&p) == -1 && fake->wrong_key == 1); /* the device drops it */
    close_pair(&p);
}

static void test_nonsense(void) {
    pair p = open_pair(0);
    lc_arrival a[LC_RECEIVE_BUFFERS];
    fake->short_status = -1;
    CHECK(send_some(p.a.link, 1, 1, 500) == 1);
    settle();
    CHECK(lc_link_receive(p.b.link, a, LC_RECEIVE_BUFFERS) == 1 && a[0].length == 0);
    fake->short_status = 0;
    CHECK(comes_from_peer(&p) == 1);
    close_pair(&p);
}

/* A receive that fails stops the queue pair, which gives back all its buffers: it is begun anew. */
static void test_failed_receive(void) {
    pair p = open_pair(0);
    lc_arrival a[LC_RECEIVE_BUFFERS];
    for (int i = 0; i < 3; i++) {
        CHECK(send_some(p.a.link, 1, 5, 500) == 5);
        settle();
        fake->short_status = 2;
        CHECK(send_some(p.a.link, 1, 5, 500) == 5);
        settle();
        fake->short_status = 0;
        int n = 0, turns = 0;
        while (turns++ < 100)
            n += lc_link_receive(p.b.link, a, LC_RECEIVE_BUFFERS);
        CHECK(n <= 5);
        CHECK(comes_from_peer(&p) == 1);
        if (i == 0)
            CHECK(is_event(p.b.link, LC_EVENT_FAILING, EIO));
    }
    CHECK(lc_link_credits(p.b.link, PACKET, 1) > 4000);
    close_pair(&p);
}

static void test_too_large(void) {
    pair p = open_pair(0);
    static uint8_t large[MTU];
    struct iovec pieces[4] = {
        {headers[0], HEADER}, {large, sizeof large}, {headers[0], HEADER}, {large, 100}};
    lc_run run = {.iov = pieces, .n_packets = 2, .packet_bytes = HEADER + MTU, .peer = 1};
    int error;
    CHECK(lc_link_send(p.a.link, &run, 1, &error) == 2);
    settle();
    CHECK(fake->swallowed == 0 && fake->sent == 1); /* the other is sent */
    lc_link_stats f;
    lc_link_stats_of(p.a.link, &f);
    CHECK(f.failed == 1);
    close_pair(&p);
}

/* ---- peers ---- */

static void test_peers(void) {
    end a = open_end(0), b = open_end(0);
    lc_address address = {.verbs = b.info.address};
    CHECK(lc_link_set_peer(a.link, 300, &address) == LC_OK && lc_link_is_here(a.link, 300));
    address.verbs.gid[15] = 9;
    CHECK(lc_link_set_peer(a.link, 3, &address) == LC_OK && !lc_link_is_here(a.link, 3));
    address.verbs.gid[15] = 255; /* no way there */
    CHECK(lc_link_set_peer(a.link, 4, &address) == LC_E_ARGUMENT);
    address.verbs = b.info.address;
    address.verbs.queue_pair |= 1u << 24;
    CHECK(lc_link_set_peer(a.link, 4, &address) == LC_E_ARGUMENT);
    CHECK(a.info.address.partition == 0xFFFF); /* not as the device has its bytes */
    const uint16_t partitions[] = {0x8001, 0x7FFF, 0x7FFE, 0xFFFF};
    for (int i = 0; i < 4; i++) {
        address.verbs = b.info.address;
        address.verbs.partition = partitions[i];
        int reached = i == 1 || i == 3; /* this end is a full member of the default one */
        CHECK_AT(lc_link_set_peer(a.link, 4, &address) == (reached ? LC_OK : LC_E_ARGUMENT),
                 "partition %x", partitions[i]);
    }
    CHECK(lc_link_set_peer(a.link, 60000, NULL) == LC_OK && !lc_link_is_here(a.link, 59999));
    struct iovec pieces[2] = {{headers[0], HEADER}, {NULL, 0}};
    lc_run run = {.iov = pieces, .n_packets = 1, .packet_bytes = HEADER, .peer = 8};
    int error;
    CHECK(lc_link_send(a.link, &run, 1, &error) == 1 && fake->sent == 0); /* nobody: it is lost */
    pair p = {a, b};
    close_pair(&p);
}

/* ---- sleeping ---- */

static int polled(lc_link *link, int blocked, uint64_t *timeout, int wait_ms) {
    struct pollfd fds[LC_LINK_DESCRIPTORS];
    *timeout = SECOND;
    CHECK(lc_link_descriptors(link, blocked, fds, timeout) == 2);
    return poll(fds, 2, wait_ms);
}

static void test_sleeping(void) {
    pair p = open_pair(0);
    lc_arrival a[LC_RECEIVE_BUFFERS];
    uint64_t timeout;
    CHECK(polled(p.b.link, 0, &timeout, 0) == 0 && timeout == SECOND);
    CHECK(send_some(p.a.link, 0, 3, 500) == 3);
    settle();
    struct pollfd fds[LC_LINK_DESCRIPTORS];
    uint64_t t = SECOND;
    (void)t;
    CHECK(polled(p.b.link, 0, &timeout, 0) == 0 && timeout == 0); /* it was drained: it is there */
    CHECK(lc_link_watch(p.b.link) == 1);
    CHECK(lc_link_receive(p.b.link, a, 2) == 2 && lc_link_receive(p.b.link, a, 8) == 1);
    CHECK(lc_link_watch(p.b.link) == 0);
    CHECK(lc_link_descriptors(p.b.link, 0, fds, &timeout) == 2);
    CHECK(send_some(p.a.link, 0, 1, 500) == 1);
    CHECK(poll(fds, 2, 5000) == 1 && fds[0].revents == POLLIN); /* it is woken */
    CHECK(lc_link_receive(p.b.link, a, 8) == 1);
    CHECK(lc_link_watch(p.b.link) == 0);
    CHECK(send_some(p.a.link, 0, 1, 500) == 1); /* after another thread has used the link */
    CHECK(poll(fds, 2, 5000) == 1);
    close_pair(&p);
}

/* ---- trouble ---- */

static void test_refused_requests(void) {
    const int takes[] = {0, 1, 63};
    for (int i = 0; i < 3; i++) {
        pair p = open_pair(0);
        uint64_t timeout, wait = MS;
        fake->send_errno = ENOMEM;
        fake->send_takes = takes[i];
        uint32_t free_before = lc_verbs_of(p.a.link)->n_free;
        CHECK(send_some(p.a.link, 0, PACKETS, PAYLOAD) == 0);
        CHECK(lc_verbs_of(p.a.link)->n_free == free_before - (uint32_t)takes[i]);
        fake->send_takes = 0;
        for (int tries = 0; tries < 8; tries++) {
            CHECK(send_some(p.a.link, 0, 1, PAYLOAD) == 0);
            polled(p.a.link, 1, &timeout, 0);
            CHECK_AT(timeout == wait, "try %d", tries);
            test_now += wait;
            CHECK(send_some(p.a.link, 0, 1, PAYLOAD) == 0);
            wait = wait * 2 < 100 * MS ? wait * 2 : 100 * MS;
        }
        CHECK(is_event(p.a.link, LC_EVENT_FAILING, ENOMEM) && no_event(p.a.link));
        fake->send_errno = 0;
        for (int round = 0; round < 10; round++)
            CHECK(send_some(p.a.link, 0, PACKETS, PAYLOAD) == PACKETS);
        CHECK(is_event(p.a.link, LC_EVENT_WORKS, ENOMEM) && no_event(p.a.link));
        close_pair(&p);
    }
}

/* A request that fails stops the queue pair; it goes on, and what was lost is loss. */
static void test_failed_request(void) {
    pair p = open_pair(0);
    fake->failing_status = 12;
    CHECK(send_some(p.a.link, 0, 10, 500) == 10);
    settle();
    CHECK(send_some(p.a.link, 0, 10, 500) == 10); /* it finds the failure, and begins anew */
    CHECK(is_event(p.a.link, LC_EVENT_FAILING, EIO));
    settle();
    CHECK(take_all(p.b.link, 0, 500, 1) == 10);
    for (int i = 0; i < 10; i++) {
        CHECK(send_some(p.a.link, 0, PACKETS, 500) == PACKETS);
        CHECK(send_some(p.b.link, 0, PACKETS, 500) == PACKETS);
        settle();
        CHECK(take_all(p.b.link, 0, 500, 1) == PACKETS); /* numbers and keys are as before */
        CHECK(take_all(p.a.link, 0, 500, 1) == PACKETS);
    }
    CHECK(is_event(p.a.link, LC_EVENT_WORKS, EIO));
    lc_link_stats f;
    lc_link_stats_of(p.a.link, &f);
    CHECK(f.failed == 1);
    fake->modify_errno = EINVAL;
    fake->failing_status = 12;
    CHECK(send_some(p.a.link, 0, 10, 500) == 10);
    CHECK(send_some(p.a.link, 0, 10, 500) == -1 && send_some(p.a.link, 0, 1, 500) == -1);
    close_pair(&p);
}

static void test_refused_buffers(void) {
    pair p = open_pair(64);
    for (int round = 0; round < 40; round++) {
        if (round == 10 || round == 20) {
            fake->receive_errno = ENOMEM;
            fake->receive_takes = round == 20 ? 5 : 0;
        }
        CHECK(send_some(p.a.link, 0, 8, 500) == 8);
        settle();
        CHECK_AT(take_all(p.b.link, 0, 500, 1) == 8, "round %d", round);
    }
    CHECK(fake->dropped == 0 && fake->receive_errno == 0);
    close_pair(&p);
}

static void test_events(void) {
    pair p = open_pair(0);
    lc_event e;
    raise_event(VB_EVENT_PORT_ERR, 2, 0); /* another port */
    raise_event(VB_EVENT_PORT_ACTIVE, 1, 0);
    raise_event(VB_EVENT_QP_FATAL, 0, 1); /* another's */
    raise_event(11, 1, 0);
    CHECK(no_event(p.a.link) && send_some(p.a.link, 0, 1, 500) == 1);
    raise_event(VB_EVENT_PORT_ERR, 1, 0);
    CHECK(is_event(p.a.link, LC_EVENT_FAILING, ENETDOWN));
    CHECK(send_some(p.a.link, 0, 1, 500) == 1); /* it is lost, if it is */
    raise_event(VB_EVENT_PORT_ACTIVE, 1, 0);
    test_now += SECOND;
    CHECK(lc_link_event(p.a.link, &e) && e.kind == LC_EVENT_WORKS && e.waited_ns >= SECOND);
    CHECK(no_event(p.a.link));
    const int fatal[] = {VB_EVENT_DEVICE_FATAL, VB_EVENT_QP_FATAL, VB_EVENT_CQ_ERR};
    for (int i = 0; i < 3; i++) {
        pair q = open_pair(0);
        uint64_t timeout;
        raise_event(fatal[i], 0, 0);
        CHECK(polled(q.a.link, 0, &timeout, 0) == 1); /* it wakes who sleeps */
        CHECK(no_event(q.a.link) && send_some(q.a.link, 0, 1, 500) == -1);
        lc_link_close(q.a.link);
        lc_link_close(q.b.link);
    }
    close_pair(&p);
    for (int i = 0; i < 3; i++) {
        pair q = open_pair(0);
        uint64_t timeout;
        fake->poll_fails = i == 0;
        fake->notify_fails = i > 0;
        polled(q.a.link, i == 2, &timeout, 0);
        CHECK(send_some(q.a.link, 0, 1, 500) == -1);
        close_pair(&q);
    }
}

/* ---- opening ---- */

static void refused_at(lc_verbs_config config, int step, int error) {
    lc_link *link = open_with(config);
    CHECK_AT(!link && why.code == LC_E_SYSTEM && why.mine[0] == (uint64_t)step &&
                 why.sys_errno == error,
             "step %d: %d at %d, errno %d", step, why.code, (int)why.mine[0], why.sys_errno);
}

static void test_opening(void) {
    const fake_verbs_state none = {.sent = 0};
    lc_verbs_config usual = {.gid = 1};
    refused_at((lc_verbs_config){.device = "mlx5_9"}, LC_VERBS_DEVICE, ENODEV);
    refused_at((lc_verbs_config){.port = 2}, LC_VERBS_PORT, EINVAL);
    refused_at((lc_verbs_config){.gid = 5}, LC_VERBS_GID, ENOENT);
    fake->open_errno = EACCES;
    refused_at(usual, LC_VERBS_OPEN, EACCES);
    *fake = none;
    fake->port_state = 1;
    refused_at(usual, LC_VERBS_PORT, ENETDOWN);
    *fake = none;
    fake->mtu = 9;
    refused_at(usual, LC_VERBS_PORT, EPROTO);
    *fake = none;
    fake->lock_max = 1000;
    refused_at(usual, LC_VERBS_MEMORY, ENOMEM);
    *fake = none;
    fake->create_errno = ENOSPC;
    refused_at(usual, LC_VERBS_QUEUES, ENOSPC);
    *fake = none;
    fake->receive_errno = ENOMEM; /* once: half as many fit */
    lc_link *half = open_with(usual);
    CHECK(half && info_of.queue == LC_VERBS_QUEUE / 2);
    lc_link_close(half);
    *fake = none;
    CHECK(!open_with((lc_verbs_config){.queue = 63}) && why.code == LC_E_ARGUMENT);
    const lc_verbs_config nowhere = {
        .library = "./no-such-library.so", .device = "fake0", .port = 1};
    CHECK(!lc_verbs_link(&nowhere, &test_clock, &info_of, &why));
    CHECK(why.mine[0] == LC_VERBS_LIBRARY);
    /* Fewer buffers where less may be locked; no room within requests where there is none. */
    fake->lock_max = 3 << 20;
    fake->no_inline = 1;
    pair p = open_pair(0);
    CHECK(p.a.info.queue == 256 && p.a.info.queue_of == LC_VERBS_QUEUE);
    CHECK(send_some(p.a.link, 0, 2, 0) == 2);
    settle();
    CHECK(take_all(p.b.link, 0, 0, 1) == 2 && fake->inlined == 0);
    close_pair(&p);
}

/* What the port says of itself is what others are told. */
static void test_infiniband(void) {
    fake->mtu = 3;
    fake->infiniband = 1;
    lc_link *link = open_with((lc_verbs_config){.device = "fake1"});
    CHECK(link && info_of.mtu == 1024 && !info_of.ethernet && info_of.address.lid);
    CHECK(info_of.address.gid[0] == 0xFE && info_of.address.gid[15] == 2);
    lc_link_close(link);
    fake_verbs_state none = {.sent = 0};
    *fake = none;
}

/* ---- greetings ---- */

enum { MEET = 3 };

typedef struct {
    lc_verbs_port *port;
    const lc_verbs_address *addresses;
    uint64_t token;
    uint16_t own;
    uint64_t timeout_ns;
    uint8_t heard[MEET];
} guest;

static void *meets(void *of) {
    guest *g = of;
    CHECK(lc_verbs_know(g->port, g->own, g->addresses, MEET) == LC_OK);
    CHECK(lc_verbs_greet(g->port, g->token, g->own, MEET, MTU, g->timeout_ns, g->heard) == LC_OK);
    return NULL;
}

/* Returns whether each heard each other one; absent: one that has no port; stranger: one that is of
 * another meeting. */
static uint32_t meet(int absent, int stranger, double loss, uint64_t timeout_ns) {
    lc_verbs_config config = {.library = library, .device = "fake0", .port = 1, .gid = 1};
    lc_verbs_address addresses[MEET] = {{.queue_pair = 0}};
    guest guests[MEET] = {{.own = 0}};
    pthread_t threads[MEET];
    uint32_t heard = 0;
    fake->loss = loss;
    for (int i = 0; i < MEET; i++) {
        guests[i] = (guest){.addresses = addresses,
                            .token = 5 + (i == stranger),
                            .own = (uint16_t)i,
                            .timeout_ns = timeout_ns};
        if (i == absent)
            continue;
        guests[i].port = lc_verbs_open(&config, &info_of, &why);
        CHECK(guests[i].port != NULL);
        addresses[i] = info_of.address;
    }
    for (int i = 0; i < MEET; i++)
        if (i != absent)
            CHECK(pthread_create(&threads[i], NULL, meets, &guests[i]) == 0);
    for (int i = 0; i < MEET; i++)
        if (i != absent) {
            pthread_join(threads[i], NULL);
            for (int k = 0; k < MEET; k++)
                heard |= (uint32_t)guests[i].heard[k] << (MEET * i + k);
            lc_verbs_close(guests[i].port);
        }
    fake_verbs_state none = {.sent = 0};
    *fake = none;
    return heard;
}

static void test_greetings(void) {
    CHECK(meet(-1, -1, 0, 20 * SECOND) == 0356); /* octal: who heard whom, from the last guest on */
    CHECK(meet(1, -1, 0, 20 * SECOND) == 0104);
    CHECK(meet(-1, 2, 0, SECOND / 2) == 0012);
    /* Answers that are lost keep nobody waiting until time is over. */
    const lc_clock *clock = &lc_system_clock;
    uint64_t begin = lc_clock_now(clock);
    for (int i = 0; i < 10 && lc_clock_now(clock) - begin < 15 * SECOND; i++)
        CHECK(meet(-1, -1, 0.1, 20 * SECOND) == 0356);
    CHECK(lc_clock_now(clock) - begin < 15 * SECOND);
}

int main(int argc, char **argv) {
    const char *slash = strrchr(argv[0], '/');
    (void)argc;
    snprintf(library, sizeof library, "%.*s/fake_verbs.so", slash ? (int)(slash - argv[0]) : 1,
             slash ? argv[0] : ".");
    void *loaded = dlopen(library, RTLD_NOW);
    if (!CHECK(loaded != NULL))
        return check_result("link_verbs");
    fake = dlsym(loaded, "fake_verbs");
    void *found = dlsym(loaded, "fake_verbs_event");
    memcpy(&raise_event, &found, sizeof found);
    test_packets();
    test_large_heads();
    test_payloads_of_several();
    test_payloads_that_are_read();
    test_credits();
    test_strangers();
    test_nonsense();
    test_failed_receive();
    test_too_large();
    test_peers();
    test_sleeping();
    test_refused_requests();
    test_failed_request();
    test_refused_buffers();
    test_events();
    test_opening();
    test_infiniband();
    test_greetings();
    return check_result("link_verbs");
}
