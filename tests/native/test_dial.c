/* What max_missing costs, in virtual time: streams over a path of 1 Gbit/s and 20 ms that loses
 * packets take hardly longer than where nothing is lost, and no more is missing than was asked. */
#include "check.h"
#include "virtual_net.h"

#include <stdlib.h>
#include <string.h>

enum { PAYLOAD = 1448, EACH = PAYLOAD / 4, PACKETS = 2897, WARM = 5, TIMES = 4 };

static const uint64_t MS = 1000000;
static const double RATE = 125e6;

typedef struct {
    double loss, burst, max_missing;
} way;

typedef struct {
    double seconds;         /* the mean of an operation */
    double missing, parity; /* shares of the data packets */
    uint64_t resent;
} found;

typedef struct {
    virtual_net v;
    float *data[2];
} pair;

static void open_pair(pair *p, const way *w) {
    const virtual_setup how = {.size = 2,
                               .payload = PAYLOAD,
                               .capacity = 8192,
                               .delay_ns = 10 * MS,
                               .paced = 1,
                               .group = {.deadline_min_ns = 1000 * MS,
                                         .deadline_max_ns = 10000 * MS,
                                         .inject = {.loss = w->loss, .burst = w->burst, .seed = 3},
                                         .met = 1}};
    virtual_open(&p->v, &how);
    for (uint16_t i = 0; i < 2; i++) {
        memory_path *path = memory_path_of(p->v.net, i, 1 - i);
        path->bytes_per_s = RATE;
        path->queue_ns = 25 * MS;
        p->data[i] = calloc((size_t)PACKETS * EACH, sizeof(float));
        if (!p->data[i])
            abort();
    }
}

static int64_t submit(pair *p, uint16_t rank, const way *w) {
    const lc_edge edge = {1, 0}, source = {0, 0};
    lc_slot_desc slot = {.length = (uint64_t)PACKETS * EACH,
                         .own = rank == 0 ? LC_OWN_INPUT : LC_OWN_NONE,
                         .target = rank == 0 ? LC_TARGET_NONE : LC_TARGET_OUT,
                         .missing = LC_MISSING_KEEP,
                         .n_dests = rank == 0,
                         .n_sources = rank == 1};
    lc_level level = {.elements_per_packet = EACH,
                      .choose = LC_CHOOSE_PARITY,
                      .most = 64,
                      .max_missing = (float)w->max_missing};
    lc_call call = {.slots = &slot,
                    .edges = rank == 0 ? &edge : &source,
                    .n_slots = 1,
                    .n_edges = 1,
                    .in = p->data[rank],
                    .out = p->data[rank],
                    .in_elements = (uint64_t)PACKETS * EACH,
                    .out_elements = (uint64_t)PACKETS * EACH,
                    .levels = {level},
                    .scale = 1,
                    .signature = 5};
    return lc_group_submit(p->v.group[rank], &call);
}

/* Returns the time of one stream, until its receiver has it. */
static double run_one(pair *p, const way *w, lc_report report[2]) {
    lc_failure failure;
    int64_t ticket[2];
    for (uint16_t i = 0; i < 2; i++) {
        ticket[i] = submit(p, i, w);
        CHECK(ticket[i] > 0);
    }
    uint64_t begin = memory_now(p->v.net), end = 0;
    for (int pending = 1; pending && memory_now(p->v.net) < begin + 20000 * MS;) {
        uint64_t next = UINT64_MAX;
        pending = 0;
        for (uint16_t i = 0; i < 2; i++) {
            while (lc_host_turn(p->v.host[i])) {
            }
            int is = lc_group_result(p->v.group[i], ticket[i], &report[i], &failure) == LC_PENDING;
            pending |= is;
            if (i == 1 && !is && !end)
                end = memory_now(p->v.net);
            uint64_t wakes = virtual_wakes(&p->v, i);
            next = wakes < next ? wakes : next;
        }
        virtual_set_now(&p->v, next);
    }
    CHECK(end > 0);
    for (uint16_t i = 0; i < 2; i++)
        lc_group_release(p->v.group[i], ticket[i]);
    return 1e-9 * (double)(end - begin);
}

/* The first streams find the path's rate and what it loses. */
static found run(const way *w) {
    pair p;
    found f = {0};
    open_pair(&p, w);
    for (int i = 0; i < WARM + TIMES; i++) {
        lc_report report[2];
        double took = run_one(&p, w, report);
        if (i < WARM)
            continue;
        f.seconds += took / TIMES;
        f.missing += (double)report[1].packets_missing / (PACKETS * TIMES);
        f.parity += (double)report[0].parity_sent / (PACKETS * TIMES);
        f.resent += report[0].packets_resent;
    }
    virtual_close(&p.v);
    for (int i = 0; i < 2; i++)
        free(p.data[i]);
    return f;
}

/* Nothing is lost: nothing is sent beside the data. A loss below what may be missing is left. */
static void test_nothing_to_do(const found *without) {
    const way little = {.loss = 0.008, .burst = 1, .max_missing = 0.01};
    found f = run(&little);
    CHECK(without->missing == 0 && without->parity == 0);
    CHECK(f.parity == 0 && f.missing > 0.004);
    CHECK_AT(f.seconds < 1.05 * without->seconds, "%f and %f s", f.seconds, without->seconds);
}

/* Parity brings back what may not be missing, at a price that theory knows: no packet is sent
 * again, and the stream takes longer by its parity alone. Of so few streams more may be missing
 * than is wanted on average. */
static void test_parity(const found *without, double loss, double burst, double slower,
                        double parity) {
    const way w = {.loss = loss, .burst = burst, .max_missing = 0.01};
    found f = run(&w);
    CHECK(f.resent == 0 && f.parity > 0);
    CHECK_AT(f.seconds < slower * without->seconds, "%g: %f and %f s", loss, f.seconds,
             without->seconds);
    CHECK_AT(f.missing < 0.03, "%g in %g: %f are missing", loss, burst, f.missing);
    CHECK_AT(f.parity < parity, "%g in %g: parity is %f", loss, burst, f.parity);
}

/* Runs about as long as a window has sets take several packets of a set at once. */
static void test_runs(void) {
    const way single = {.loss = 0.1, .burst = 1, .max_missing = 0.01};
    const way runs = {.loss = 0.1, .burst = 8, .max_missing = 0.01};
    found a = run(&single), b = run(&runs);
    CHECK_AT(b.parity > 1.1 * a.parity, "parity is %f, and %f for runs", a.parity, b.parity);
    CHECK_AT(b.missing < 0.04, "%f are missing", b.missing);
}

/* -sample: some of it. */
int main(int argc, char **argv) {
    const way none = {.burst = 1, .max_missing = 0.01};
    found without = run(&none);
    test_parity(&without, 0.05, 1, 1.15, 0.1);
    if (check_samples(argc, argv))
        return check_result("dial");
    test_nothing_to_do(&without);
    test_parity(&without, 0.2, 1, 1.4, 0.42);
    test_parity(&without, 0.2, 4, 1.5, 0.5);
    test_runs();
    return check_result("dial");
}
