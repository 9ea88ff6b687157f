/* Throws changed copies of real datagrams, with the right session, address and checksum, at engines
 * that work. A relay stands between them: it passes on all that they send, and changed copies
 * besides.
 *
 * What names an operation is only ever changed to odd operations, so those of even ones must end
 * as means over some of the ranks, whatever else happens; odd ones must end. A changed READY may
 * end the engine with a mismatch: then the next pair begins. Nothing may crash, hang or touch
 * memory that is not its own; the sanitizers see to that. */
#define _DEFAULT_SOURCE
#include "net.h"
#include "wire.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 2, SEGMENT = 1500, DEEP = 6, MOST = 2048, KEPT = 256, OPERATIONS = 60 };

static uint64_t state;

static uint32_t below(uint32_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 32) * limit >> 32);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* ---- the relay ---- */

typedef struct {
    uint8_t bytes[MOST];
    size_t size;
    int to;
} datagram;

typedef struct {
    int fd[RANKS];
    struct sockaddr_in real[RANKS];
    uint16_t real_port[RANKS];
    int stop;
    pthread_t thread;
} relay;

static datagram kept[KEPT];
static unsigned long thrown, passed;

static uint32_t any(void) {
    static const uint32_t likely[] = {
        0, 1, 2, 3, 63, 64, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    return below(3) ? likely[below(sizeof likely / sizeof likely[0])] : below(0xFFFFFFFF);
}

static uint32_t near(uint32_t v) {
    switch (below(4)) {
    case 0:
        return any();
    case 1:
        return v + below(5) - 2;
    case 2:
        return v ^ 1u << below(32);
    default:
        return v;
    }
}

static void change_record(uint8_t *at) {
    lc_record r;
    if (lc_record_get(at, &r) != LC_GOOD)
        return;
    if (below(3) == 0)
        r.kind = (uint8_t)(1 + below(LC_R_LAST));
    r.op = near(r.op) | 1;
    r.slot = (uint16_t)near(r.slot);
    r.round = (uint8_t)near(r.round);
    if (r.kind == LC_R_READY || r.kind == LC_R_WANT || r.kind == LC_R_MISMATCH) {
        /* A wrong call ends the engine, rightly, and the test of it; now and then will do. */
        if (below(600))
            return;
    }
    r.a = near(r.a);
    r.b = near(r.b);
    r.c = (uint64_t)near((uint32_t)r.c) | (uint64_t)near((uint32_t)(r.c >> 32)) << 32;
    r.d = (uint64_t)near((uint32_t)r.d) | (uint64_t)near((uint32_t)(r.d >> 32)) << 32;
    lc_record_put(at, &r);
}

static void change(datagram *d) {
    lc_expect expect = {NET_SESSION, (uint16_t)d->to, RANKS, NET_PAYLOAD};
    lc_header h;
    if (lc_wire_get(d->bytes, d->size, &expect, &h) != LC_GOOD)
        return;
    uint8_t *payload = d->bytes + LC_HEADER_BYTES;
    h.op = near(h.op) | 1;
    h.link_seq = near(h.link_seq);
    h.time_us = near(h.time_us);
    if (below(20) == 0)
        h.group = near(h.group);
    if (h.type != LC_CONTROL) {
        if (below(8) == 0)
            h.type = below(2) ? LC_DATA : LC_PARITY;
        if (below(8) == 0)
            h.eager = !h.eager;
        h.packet = near(h.packet);
        h.slot = (uint16_t)near(h.slot);
        h.round = (uint8_t)near(h.round);
        h.count = (uint16_t)near(h.count);
        h.format = (uint8_t)near(h.format) & 7;
        h.fec = (uint8_t)near(h.fec) & 31;
        h.encoding = (uint8_t)near(h.encoding) & 15;
        if (below(3) == 0)
            h.length = (uint16_t)below(NET_PAYLOAD + 1);
    } else {
        for (uint16_t i = 0; i < h.count; i++)
            change_record(payload + (size_t)i * LC_RECORD_BYTES);
        if (below(8) == 0) {
            h.count = (uint16_t)(1 + below(NET_PAYLOAD / LC_RECORD_BYTES));
            h.length = (uint16_t)(h.count * LC_RECORD_BYTES);
            for (size_t i = d->size; i < LC_HEADER_BYTES + (size_t)h.length; i++)
                d->bytes[i] = (uint8_t)any();
            for (uint16_t i = 0; i < h.count; i++)
                change_record(payload + (size_t)i * LC_RECORD_BYTES);
        }
    }
    if (below(10) == 0)
        h.length = (uint16_t)any();
    lc_wire_put(d->bytes, &h);
    d->size = LC_HEADER_BYTES + (size_t)h.length;
    if (d->size > MOST)
        d->size = MOST;
}

/* One of its packets. */
static datagram part_of(const datagram *d) {
    datagram part = *d;
    size_t first = lc_wire_first(d->bytes, d->size);
    if (first == d->size || below(2)) {
        part.size = first;
    } else {
        part.size = d->size - first;
        memcpy(part.bytes, d->bytes + first, part.size);
    }
    return part;
}

/* Puts a packet that was kept, and changed, before it. */
static void put_before(datagram *d) {
    datagram first = kept[below(KEPT)];
    if (!first.size || first.size + d->size > MOST)
        return;
    change(&first);
    if (first.size + d->size > MOST)
        return;
    memcpy(first.bytes + first.size, d->bytes, d->size);
    first.size += d->size;
    first.to = d->to;
    *d = first;
}

static void give(const relay *r, const datagram *d) {
    (void)!sendto(r->fd[1 - d->to], d->bytes, d->size, 0, (const struct sockaddr *)&r->real[d->to],
                  sizeof r->real[d->to]);
}

static void *pass_on(void *argument) {
    relay *r = argument;
    struct pollfd fds[RANKS];
    for (int i = 0; i < RANKS; i++)
        fds[i] = (struct pollfd){r->fd[i], POLLIN, 0};
    while (!__atomic_load_n(&r->stop, __ATOMIC_RELAXED)) {
        if (poll(fds, RANKS, 20) <= 0)
            continue;
        for (int i = 0; i < RANKS; i++) {
            datagram d;
            ssize_t got;
            while ((got = recv(r->fd[i], d.bytes, sizeof d.bytes, 0)) >= 0) {
                d.size = (size_t)got;
                d.to = i;
                give(r, &d);
                passed++;
                kept[below(KEPT)] = part_of(&d);
                for (uint32_t k = below(3); k; k--) {
                    datagram other = kept[below(KEPT)];
                    if (!other.size)
                        continue;
                    change(&other);
                    if (below(4) == 0)
                        put_before(&other);
                    give(r, &other);
                    thrown++;
                }
            }
        }
    }
    return NULL;
}

static void relay_open(relay *r) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < RANKS; i++) {
        struct sockaddr_in here = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof here;
        r->fd[i] = socket(AF_INET, SOCK_DGRAM, 0);
        if (r->fd[i] < 0 || bind(r->fd[i], (struct sockaddr *)&here, sizeof here) != 0 ||
            getsockname(r->fd[i], (struct sockaddr *)&here, &n) != 0)
            abort();
        (void)fcntl(r->fd[i], F_SETFL, O_NONBLOCK);
        r->real_port[i] = ntohs(here.sin_port);
    }
}

static void relay_close(relay *r) {
    __atomic_store_n(&r->stop, 1, __ATOMIC_RELAXED);
    pthread_join(r->thread, NULL);
    for (int i = 0; i < RANKS; i++)
        close(r->fd[i]);
}

/* ---- what the engines do meanwhile ---- */

typedef struct {
    net *n;
    uint16_t rank;
    int ended, failed;
} user;

/* Which kind an operation is, is decided by its number, so that the ranks agree. */
static int64_t submit(user *u, int number, float *data) {
    fill(data, RANKS * SEGMENT, u->rank);
    return net_submit(u->n, u->rank, number / 2 % 2, SEGMENT, data, number % 8 == 6, number % 3, 0);
}

/* Failures that spoiled packets may bring about: calls that seem to differ, the others' end after
 * that, and what is asked for in vain. */
static int is_forgeable(int code) {
    return code == LC_E_MISMATCH || code == LC_E_ABORTED || code == LC_E_TIMEOUT;
}

static int end(user *u, int number, int64_t ticket, const float *data) {
    lc_report report;
    lc_failure failure;
    int code = lc_group_wait(u->n->group[u->rank], ticket, 40 * SECOND);
    CHECK_AT(code != LC_PENDING, "operation %d hangs at rank %d", number, u->rank);
    CHECK(lc_group_result(u->n->group[u->rank], ticket, &report, &failure) == code);
    lc_group_release(u->n->group[u->rank], ticket);
    if (code != LC_OK) {
        CHECK_AT(is_forgeable(code), "operation %d at rank %d: code %d", number, u->rank, code);
        u->failed++;
        return 0;
    }
    u->ended++;
    int good = 1;
    for (size_t i = 0; number % 2 == 0 && i < RANKS * SEGMENT; i++)
        good &= is_mean_of_some(data[i], RANKS);
    CHECK_AT(good, "operation %d at rank %d", number, u->rank);
    return 1;
}

static void *use(void *argument) {
    user *u = argument;
    size_t elements = (size_t)RANKS * SEGMENT;
    float *data = malloc(DEEP * elements * sizeof *data);
    int64_t tickets[DEEP] = {0};
    for (int i = 0; i < OPERATIONS + DEEP; i++) {
        int at = i % DEEP;
        if (tickets[at] > 0)
            end(u, i - DEEP, tickets[at], data + (size_t)at * elements);
        tickets[at] = i < OPERATIONS ? submit(u, i, data + (size_t)at * elements) : 0;
        CHECK_AT(tickets[at] >= 0 || is_forgeable((int)tickets[at]),
                 "operation %d at rank %d: code %d", i, u->rank, (int)tickets[at]);
    }
    free(data);
    return NULL;
}

/* The pair's number decides whether operations are encoded, and whether they have parity or leave
 * that to the loss; nothing is lost here but by what is thrown. */
static int session(int number, int *ended) {
    net n;
    relay r;
    user users[RANKS];
    pthread_t threads[RANKS];
    int failed = 0;
    relay_open(&r);
    memset(kept, 0, sizeof kept);
    net_open_at(&n, RANKS, (lc_inject){.loss = 0}, SECOND / 5, r.real_port, 6 * SECOND);
    n.fec = (uint8_t)(number % 3 ? 3 : 0);
    n.fec_auto = number % 3 == 2;
    n.encoding = (uint8_t)(number % 2 ? LC_ENCODING_BF16 : LC_ENCODING_SAME);
    for (int i = 0; i < RANKS; i++)
        r.real[i] = (struct sockaddr_in){.sin_family = AF_INET,
                                         .sin_port = htons(n.port[i]),
                                         .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    pthread_create(&r.thread, NULL, pass_on, &r);
    for (uint16_t i = 0; i < RANKS; i++) {
        users[i] = (user){&n, i, 0, 0};
        pthread_create(&threads[i], NULL, use, &users[i]);
    }
    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
        failed += users[i].failed > 0;
        *ended += users[i].ended;
    }
    net_close(&n);
    relay_close(&r);
    return failed;
}

static long long option(int argc, char **argv, const char *name, long long otherwise) {
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], name, strlen(name)) == 0)
            return strtoll(argv[i] + strlen(name), NULL, 10);
    return otherwise;
}

int main(int argc, char **argv) {
    uint64_t until = now_ns() + (uint64_t)option(argc, argv, "-max_total_time=", 10) * SECOND;
    state = (uint64_t)option(argc, argv, "-seed=", 1);
    int sessions = 0, failed = 0, ended = 0;
    uint64_t longest = 0;
    do {
        uint64_t begin = now_ns();
        failed += session(sessions++, &ended) > 0;
        if (now_ns() - begin > longest)
            longest = now_ns() - begin;
    } while (now_ns() < until);
    printf("fuzz_engine: %lu datagrams passed, %lu thrown; %d pairs, %d of them failed, longest "
           "%.1f s; %d operations ended well\n",
           passed, thrown, sessions, failed, (double)longest * 1e-9, ended);
    CHECK(thrown > 100 && ended > 10);
    return check_result("fuzz_engine");
}
