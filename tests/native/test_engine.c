/* Whole engines under the sanitizers: seeded faults, many operations in flight, and callers that
 * submit, wait, read figures, release, abort and close from several threads. */
#define _DEFAULT_SOURCE
#include "link.h"
#include "net.h"
#include "sets.h"
#include "state.h"

#include <pthread.h>
#include <unistd.h>

typedef struct {
    net *n;
    uint16_t rank;
    int ring, reliable, repair;
    uint32_t segment;
    int operations;
    int deep;      /* operations in flight */
    int whole;     /* nothing may be missing */
    uint16_t code; /* of the parity */
    uint8_t encoding, gather_encoding;
    uint8_t waits;
    uint64_t missing, injected, recovered;
} worker;

static void check_values(const worker *w, const float *data) {
    uint16_t size = w->n->size;
    int good = 1;
    for (size_t i = 0; i < (size_t)size * w->segment; i++) {
        float diff = data[i] - mean_of_all(size);
        good &= w->whole ? diff < NET_NEAR && diff > -NET_NEAR : is_mean_of_some(data[i], size);
    }
    CHECK_AT(good, "rank %d ring %d reliable %d repair %d", w->rank, w->ring, w->reliable,
             w->repair);
}

static void end(worker *w, int64_t ticket, const float *data) {
    lc_report report;
    lc_failure failure;
    int code = LC_PENDING;
    for (int i = 0; i < 400 && code == LC_PENDING; i++)
        code = lc_group_wait(w->n->group[w->rank], ticket, 100 * MS);
    CHECK_AT(code == LC_OK, "rank %d code %d", w->rank, code);
    CHECK(lc_group_result(w->n->group[w->rank], ticket, &report, &failure) == code);
    CHECK(report.elapsed_ns < 60 * SECOND);
    CHECK(!w->whole || report.packets_missing == 0);
    w->missing += report.packets_missing;
    w->injected += report.packets_injected;
    w->recovered += report.packets_recovered;
    CHECK(report.packets_recovered <= report.packets_received);
    CHECK((report.parity_sent > 0) == (w->code > 0));
    lc_group_release(w->n->group[w->rank], ticket);
    if (code == LC_OK)
        check_values(w, data);
}

static void *work(void *argument) {
    worker *w = argument;
    size_t elements = (size_t)w->n->size * w->segment;
    float *data = malloc((size_t)w->deep * elements * sizeof *data);
    int64_t *tickets = calloc((size_t)w->deep, sizeof *tickets);
    for (int i = 0; i < w->operations + w->deep; i++) {
        int at = i % w->deep;
        float *mine = data + (size_t)at * elements;
        if (tickets[at])
            end(w, tickets[at], mine);
        tickets[at] = 0;
        if (i >= w->operations)
            continue;
        fill(mine, elements, w->rank);
        tickets[at] =
            net_submit(w->n, w->rank, w->ring, w->segment, mine, w->reliable, w->repair, 0);
        CHECK(tickets[at] > 0);
    }
    free(tickets);
    free(data);
    return NULL;
}

/* Reads figures all the while, as a monitor does. */
static int watching;

static void *watch(void *argument) {
    net *n = argument;
    while (__atomic_load_n(&watching, __ATOMIC_RELAXED)) {
        for (uint16_t r = 0; r < n->size; r++) {
            lc_stats stats;
            lc_report report;
            lc_peer_stats peer;
            lc_link_info info;
            lc_group_stats(n->group[r], &stats);
            lc_group_last_report(n->group[r], &report);
            CHECK(lc_group_peer_stats(n->group[r], (r + 1) % n->size, &peer) == LC_OK);
            CHECK(peer.delivery_rate >= 0 && peer.delivery_rate <= 1);
            CHECK(lc_host_link(n->host[r], 0, &info) == LC_OK);
        }
        usleep(2000);
    }
    return NULL;
}

static int fewer = 1; /* times fewer operations than usual */

static void run(lc_inject inject, worker how) {
    net n;
    worker workers[NET_MAX];
    pthread_t threads[NET_MAX], watcher;
    uint64_t missing = 0, injected = 0, recovered = 0, moved = 0;
    net_open(&n, 3, inject, 20 * SECOND);
    how.operations /= fewer;
    n.code = how.code;
    n.encoding = how.encoding;
    n.gather_encoding = how.gather_encoding;
    n.waits = how.waits;
    watching = 1;
    pthread_create(&watcher, NULL, watch, &n);
    for (uint16_t r = 0; r < n.size; r++) {
        workers[r] = how;
        workers[r].n = &n;
        workers[r].rank = r;
        pthread_create(&threads[r], NULL, work, &workers[r]);
    }
    for (uint16_t r = 0; r < n.size; r++) {
        pthread_join(threads[r], NULL);
        missing += workers[r].missing;
        injected += workers[r].injected;
        recovered += workers[r].recovered;
    }
    __atomic_store_n(&watching, 0, __ATOMIC_RELAXED);
    pthread_join(watcher, NULL);
    usleep(150000); /* figures of an idle engine are this fresh */
    for (uint16_t r = 0; r < n.size; r++) {
        lc_stats stats;
        lc_group_stats(n.group[r], &stats);
        CHECK(stats.malformed == 0 && stats.foreign == 0 && stats.socket_overflow == 0);
        CHECK(stats.operations == (uint64_t)how.operations);
        moved += stats.packets_duplicated + stats.packets_reordered;
    }
    CHECK((injected > 0) == (inject.loss > 0));
    CHECK((moved > 0) == (inject.dup > 0));
    CHECK((missing > 0) == (inject.loss > 0 && !how.reliable));
    CHECK((recovered > 0) == (inject.loss > 0 && how.code));
    net_close(&n);
}

static void test_faults(void) {
    const lc_inject none = {.loss = 0};
    const lc_inject lossy = {.loss = 0.2, .burst = 3, .seed = 5};
    const lc_inject bad = {.loss = 0.1, .dup = 0.2, .reorder = 0.2, .seed = 6};
    for (int ring = 0; ring < 2; ring++) {
        worker w = {.ring = ring, .segment = 1000, .operations = 60, .deep = 8};
        run(lossy, w);
        run(bad, w);
        w.repair = 1;
        run(bad, w);
        w.repair = 0;
        w.whole = 1;
        run(none, w);
        w.reliable = 1;
        run(bad, w);
    }
}

/* What parity brings back is what was lost: in place, the results overwrite what it is made of. */
static void test_parity(void) {
    const lc_inject none = {.loss = 0};
    const lc_inject lossy = {.loss = 0.2, .burst = 3, .seed = 7};
    const lc_inject bad = {.loss = 0.1, .dup = 0.2, .reorder = 0.2, .seed = 8};
    for (int ring = 0; ring < 2; ring++) {
        worker w = {
            .ring = ring, .segment = 1000, .operations = 40, .deep = 8, .code = lc_code(3, 1)};
        run(lossy, w);
        w.repair = 1;
        w.code = lc_code(16, 1);
        run(bad, w);
        w.repair = 0;
        w.whole = 1;
        run(none, w);
        w.reliable = 1;
        w.code = lc_code(1, 1);
        run(bad, w);
    }
}

/* Encoded packets lie in the operation's own block until nobody can ask for them any more. */
static void test_encodings(void) {
    const lc_inject lossy = {.loss = 0.2, .burst = 3, .seed = 9};
    const lc_inject bad = {.loss = 0.1, .dup = 0.2, .reorder = 0.2, .seed = 10};
    for (int ring = 0; ring < 2; ring++) {
        worker w = {.ring = ring, .segment = 1000, .operations = 40, .deep = 8};
        w.encoding = LC_ENCODING_BF16;
        run(lossy, w);
        w.code = lc_code(8, 1);
        w.repair = 1;
        run(bad, w);
        w.encoding = LC_ENCODING_F16;
        w.whole = w.reliable = 1;
        w.code = 0;
        run(bad, w);
        w.encoding = LC_ENCODING_INT8 | LC_ENCODING_STOCHASTIC;
        w.gather_encoding = LC_ENCODING_INT2 | LC_ENCODING_SPIKES;
        w.whole = w.reliable = w.repair = 0;
        w.code = lc_code(8, 1);
        run(lossy, w);
    }
}

/* So many operations at once that submitting has to wait for room. Each has control packets of its
 * own, which have no window: where threads are starved for long they overflow a small buffer, so it
 * is far larger here; and TSan, which makes all of it ten times slower, has fewer in flight. */
#if defined(__SANITIZE_THREAD__)
enum { DEEP = 50 };
#else
enum { DEEP = 200 };
#endif

static void test_deep(void) {
    net_socket_buffer = 8 << 20;
    worker w = {.ring = 1, .segment = 70, .operations = 600, .deep = DEEP, .whole = 1};
    run((lc_inject){.loss = 0}, w);
    net_socket_buffer = 106496;
}

/* Callers that do the engine's work: one operation at a time, and with others that are under way,
 * so that they take turns with its thread. */
static void test_waits(void) {
    const lc_inject none = {.loss = 0};
    const lc_inject bad = {.loss = 0.1, .dup = 0.2, .reorder = 0.2, .seed = 9};
    for (int deep = 1; deep <= 4; deep += 3) {
        worker w = {.segment = 300, .operations = 60, .deep = deep, .waits = 1};
        run(bad, w);
        w.whole = 1;
        run(none, w);
        w.reliable = 1;
        run(bad, w);
    }
}

typedef struct {
    net *n;
    float *data;
    int64_t ticket;
} waiting;

static void *submit_and_wait(void *argument) {
    waiting *w = argument;
    w->ticket = net_submit(w->n, 0, 0, 10, w->data, 1, 0, 0);
    if (w->ticket > 0)
        w->ticket = lc_group_wait(w->n->group[0], w->ticket, 20 * SECOND);
    return NULL;
}

/* Nobody may close a group before others are inside, or done. */
static void until_inside(lc_group *g) {
    for (int inside = 0; !inside; usleep(1000)) {
        pthread_mutex_lock(&g->host->lock);
        inside = g->callers > 0;
        pthread_mutex_unlock(&g->host->lock);
    }
}

/* A caller whose peer is late hands the work back to the thread. One that works on what never ends
 * leaves when the engine is aborted, and when it is closed. */
static void test_waits_in_vain(void) {
    for (int end = 0; end < 3; end++) {
        float data[2][20];
        net n;
        pthread_t thread;
        net_open(&n, 2, (lc_inject){.loss = 0}, 20 * SECOND);
        n.waits = 1;
        fill(data[0], 20, 0);
        fill(data[1], 20, 1);
        waiting w = {&n, data[0], 0};
        pthread_create(&thread, NULL, submit_and_wait, &w);
        until_inside(n.group[0]);
        usleep(20000);
        if (end == 0) {
            int64_t ticket = net_submit(&n, 1, 0, 10, data[1], 1, 0, 0);
            CHECK(lc_group_wait(n.group[1], ticket, 20 * SECOND) == LC_OK);
        } else if (end == 1) {
            lc_group_abort(n.group[0], LC_E_ABORTED, 1);
        } else {
            lc_group_close(n.group[0]);
        }
        pthread_join(thread, NULL);
        CHECK_AT(w.ticket == (end == 0   ? LC_OK
                              : end == 1 ? LC_E_ABORTED
                                         : LC_E_CLOSED),
                 "end %d code %d", end, (int)w.ticket);
        net_close(&n);
    }
}

/* ---- tickets handed out by lc_completions_next ---- */

typedef struct {
    net *n;
    uint16_t rank;
} collector;

static void *collect(void *argument) {
    const collector *me = argument;
    lc_group *g = me->n->group[me->rank];
    intptr_t got = 0;
    for (;;) {
        uint64_t owner;
        int64_t ticket = lc_completions_next(me->n->completions[me->rank], 50 * MS, &owner);
        if (ticket < 0)
            return (void *)got;
        if (!ticket)
            continue;
        lc_report report;
        lc_failure failure;
        CHECK(owner == me->rank);
        CHECK(lc_group_result(g, ticket, &report, &failure) == LC_OK);
        lc_group_release(g, ticket);
        got++;
    }
}

static void test_notify(void) {
    enum { MANY = 100, SEGMENT = 100 };
    static float data[2][MANY][2 * SEGMENT];
    net n;
    pthread_t threads[4];
    net_open(&n, 2, (lc_inject){.loss = 0}, 20 * SECOND);
    collector collectors[2] = {{&n, 0}, {&n, 1}};
    for (int i = 0; i < 4; i++) /* two for each engine */
        pthread_create(&threads[i], NULL, collect, &collectors[i / 2]);
    for (int i = 0; i < MANY; i++)
        for (uint16_t r = 0; r < 2; r++)
            CHECK(net_submit(&n, r, i % 2, SEGMENT, data[r][i], 1, 0, 1) > 0);
    for (int i = 0; i < 200; i++) {
        lc_stats a, b;
        lc_group_stats(n.group[0], &a);
        lc_group_stats(n.group[1], &b);
        if (a.operations == MANY && b.operations == MANY)
            break;
        usleep(20000);
    }
    intptr_t got = 0;
    usleep(100000);
    for (int i = 0; i < 2; i++)
        lc_completions_stop(n.completions[i], 1);
    for (int i = 0; i < 4; i++) {
        void *some;
        pthread_join(threads[i], &some);
        got += (intptr_t)some;
    }
    CHECK(got == 2 * MANY);
    net_close(&n);
}

/* ---- endings ---- */

typedef struct {
    net *n;
    int64_t ticket;
    int code;
} waiter;

static void *wait_long(void *argument) {
    waiter *w = argument;
    w->code = lc_group_wait(w->n->group[0], w->ticket, 20 * SECOND);
    return NULL;
}

static void *abort_soon(void *argument) {
    net *n = argument;
    usleep(5000);
    lc_group_abort(n->group[0], LC_E_ABORTED, 1);
    lc_group_abort(n->group[0], LC_E_CLOSED, 2);
    return NULL;
}

/* Aborts from two sides while submits go on; who waits is woken; then close. */
static void test_abort(void) {
    enum { MANY = 400, SEGMENT = 100 };
    static float data[MANY][3 * SEGMENT];
    net n;
    pthread_t aborting, waiting;
    int64_t tickets[MANY];
    int taken = 0;
    net_open(&n, 3, (lc_inject){.loss = 0}, 20 * SECOND);
    waiter w = {&n, net_submit(&n, 0, 1, SEGMENT, data[0], 0, 0, 0), LC_OK};
    CHECK(w.ticket > 0);
    pthread_create(&waiting, NULL, wait_long, &w);
    pthread_create(&aborting, NULL, abort_soon, &n);
    for (int i = 1; i < MANY; i++) { /* more than are taken up at once, until after the abort */
        usleep(50);
        int64_t ticket = net_submit(&n, 0, 1, SEGMENT, data[i], 0, 0, 0);
        if (ticket > 0)
            tickets[taken++] = ticket;
        else
            CHECK(ticket == LC_E_ABORTED);
    }
    CHECK(taken < MANY - 1); /* the abort came in the middle */
    pthread_join(aborting, NULL);
    pthread_join(waiting, NULL);
    CHECK(w.code == LC_E_ABORTED || w.code == LC_E_CLOSED);
    for (int i = 0; i < taken; i++) {
        int code = lc_group_wait(n.group[0], tickets[i], 5 * SECOND);
        CHECK(code == LC_E_ABORTED || code == LC_E_CLOSED);
        if (i % 2)
            lc_group_release(n.group[0], tickets[i]); /* the rest is left to close */
    }
    net_close(&n);
}

/* Closing at any moment, with packets under way and operations that nobody released. */
static void test_close(void) {
    enum { SEGMENT = 20000 };
    static float data[4][3][3 * SEGMENT];
    for (int turn = 0; turn < 12; turn++) {
        net n;
        net_open(&n, 3, (lc_inject){.loss = 0.05, .dup = 0.1, .reorder = 0.1, .seed = 3}, SECOND);
        for (int i = 0; i < 4; i++)
            for (uint16_t r = 0; r < 3; r++)
                CHECK(net_submit(&n, r, i % 2, SEGMENT, data[i][r], turn % 2, 0, turn % 3 == 0) >
                      0);
        usleep((unsigned)(turn * 700));
        net_close(&n);
    }
}

static void test_bad_groups(net *n) {
    lc_failure failure;
    const lc_group_config good = {.number = 1, .size = 2, .inject = {.loss = 0}};
    const double losses[2] = {0.5, 1.5};
    const uint16_t strangers[2] = {0, 2}, twice[2] = {0, 0}, elsewhere[2] = {1, 0};
    lc_group_config bad[7];
    for (int i = 0; i < 7; i++)
        bad[i] = good;
    bad[0].number = 0;
    bad[1].number = NET_GROUP; /* taken */
    bad[2].rank = 2;
    bad[3].inject_loss = losses;
    bad[4].members = strangers;
    bad[5].members = twice;
    bad[6].members = elsewhere; /* this process is another rank */
    for (int i = 0; i < 7; i++) {
        lc_group *g = lc_group_open(n->host[0], &bad[i], &failure);
        CHECK_AT(g == NULL && failure.code == LC_E_ARGUMENT, "group %d", i);
    }
    lc_group *g = lc_group_open(n->host[0], &good, &failure);
    if (CHECK(g != NULL))
        lc_group_close(g);
}

static void test_bad_arguments(void) {
    net n;
    float data[64] = {0};
    lc_failure failure;
    lc_host_config c = {.address = "127.0.0.1", .processes = 2, .payload_bytes = 60};
    CHECK(lc_host_open(&c, &failure) == NULL && failure.code == LC_E_ARGUMENT);
    c.payload_bytes = 256;
    c.process = 2;
    CHECK(lc_host_open(&c, &failure) == NULL && failure.code == LC_E_ARGUMENT);
    c.process = 0;
    c.address = "not an address";
    CHECK(lc_host_open(&c, &failure) == NULL && failure.code == LC_E_ARGUMENT);
    c.address = "192.0.2.1"; /* nobody's */
    CHECK(lc_host_open(&c, &failure) == NULL && failure.code == LC_E_SYSTEM);
    net_open(&n, 2, (lc_inject){.loss = 0}, SECOND);
    test_bad_groups(&n);
    const lc_edge edges[3] = {{1, 0}, {1, 0}, {0, 0}};
    const lc_slot_desc good = {.length = 8, .n_dests = 1, .own = 1};
    lc_slot_desc bad[8];
    for (int i = 0; i < 8; i++)
        bad[i] = good;
    bad[0].own_offset = 57;         /* beyond the input */
    bad[1].own_offset = UINT64_MAX; /* wraps */
    bad[2].first_edge = 3;          /* beyond the edges */
    bad[3].first_edge = UINT32_MAX; /* wraps */
    bad[4].first_edge = 2;          /* to itself */
    bad[5].number = 0xFFFF;         /* means none */
    bad[6].own = 0;                 /* nothing to send */
    bad[7].length = UINT64_MAX;     /* beyond everything */
    for (int i = 0; i < 8; i++) {
        lc_call call = {.slots = &bad[i],
                        .edges = edges,
                        .n_slots = 1,
                        .n_edges = 3,
                        .in = data,
                        .out = data,
                        .in_elements = 64,
                        .out_elements = 64,
                        .levels = {{.elements_per_packet = 64}},
                        .scale = 1};
        CHECK_AT(lc_group_submit(n.group[0], &call) == LC_E_ARGUMENT, "bad slot %d", i);
        call.slots = &good;
        call.levels[0].elements_per_packet = 65; /* more than a packet holds */
        CHECK(lc_group_submit(n.group[0], &call) == LC_E_ARGUMENT);
        call.levels[0].elements_per_packet = 0;
        CHECK(lc_group_submit(n.group[0], &call) == LC_E_ARGUMENT);
        call.levels[0].elements_per_packet = 64;
        call.dtype = 9;
        CHECK(lc_group_submit(n.group[0], &call) == LC_E_ARGUMENT);
    }
    net_close(&n);
}

/* Which peers share this host: there the control law has nothing to do. */
static void test_is_here(void) {
    lc_host_config c = {.address = "127.0.0.1", .processes = 4, .payload_bytes = NET_PAYLOAD};
    const char *peers[] = {"127.0.0.1", "127.0.0.9", "192.0.2.1"};
    lc_failure failure;
    lc_link *link = lc_link_open(&c, &lc_system_clock, &failure);
    if (!CHECK(link != NULL))
        return;
    for (uint16_t i = 0; i < 3; i++)
        CHECK(lc_link_set_peer(link, i, &(lc_address){.host = peers[i], .port = 9}) == LC_OK);
    CHECK(lc_link_is_here(link, 0) && lc_link_is_here(link, 1) && !lc_link_is_here(link, 2));
    lc_link_close(link);
}

/* The same over shared memory: small packets, large ones, and several a stream. */
static void test_shared_memory(void) {
    const lc_inject none = {.loss = 0};
    const lc_inject bad = {.loss = 0.1, .dup = 0.2, .reorder = 0.2, .seed = 12};
    static const uint32_t segments[] = {100, 5000, 40000};
    net_shared = 1;
    for (int ring = 0; ring < 2; ring++)
        for (int i = 0; i < 3; i++) {
            worker w = {.ring = ring,
                        .segment = segments[i],
                        .operations = i == 2 ? 20 : 60,
                        .deep = 4,
                        .whole = 1,
                        .waits = (uint8_t)(i == 1)};
            run(none, w);
            w.reliable = 1;
            w.encoding = i == 2 ? LC_ENCODING_BF16 : LC_ENCODING_SAME;
            run(i == 2 ? bad : none, w);
        }
    net_shared = 0;
}

/* And by a device of RDMA: lossy and reliable, sealed by nobody, faults and none. */
static void test_verbs(const char *program) {
    static char library[4096];
    const lc_inject none = {.loss = 0};
    const lc_inject bad = {.loss = 0.1, .dup = 0.2, .reorder = 0.2, .seed = 12};
    const char *slash = strrchr(program, '/');
    snprintf(library, sizeof library, "%.*s/fake_verbs.so", slash ? (int)(slash - program) : 1,
             slash ? program : ".");
    net_verbs = library;
    for (int ring = 0; ring < 2; ring++)
        for (int reliable = 0; reliable < 2; reliable++) {
            worker w = {.ring = ring,
                        .reliable = reliable,
                        .segment = 3000,
                        .operations = 30,
                        .deep = 3,
                        .whole = 1,
                        .waits = (uint8_t)ring};
            run(none, w);
            w.whole = reliable;
            run(bad, w);
        }
    net_verbs = NULL;
}

/* -sample: half of the operations. */
int main(int argc, char **argv) {
    fewer = check_samples(argc, argv) ? 2 : 1;
    test_shared_memory();
    test_verbs(argv[0]);
    test_is_here();
    test_bad_arguments();
    test_faults();
    test_parity();
    test_deep();
    test_encodings();
    test_waits();
    test_waits_in_vain();
    test_notify();
    test_abort();
    test_close();
    return check_result("test_engine");
}
