/* Repairs of a bucket go on while the next ones are sent, in virtual time: two ranks exchange
 * several buckets over a path with a rate, a delay and loss. One round of resending may cost one
 * round trip and one reorder allowance for all of them, not for each. */
#include "check.h"
#include "virtual_net.h"

#include <stdlib.h>

enum { RANKS = 2, PAYLOAD = 1400, PACKETS = 200, PART = PAYLOAD * PACKETS, BUCKETS = 4, TURNS = 9 };

static const uint64_t US = 1000, MS = 1000000, SECOND = 1000000000;
static const uint64_t TRIP_NS = 20000000;
static const double RATE = 12.5e6; /* bytes/s: a bucket takes 23 ms */

typedef struct {
    virtual_net v;
    uint64_t resent, missing;
    uint8_t in[RANKS][BUCKETS][PART], out[RANKS][BUCKETS][PART];
} exchange;

static int64_t submit(exchange *e, uint16_t rank, int bucket, uint8_t rounds) {
    const lc_edge edges[] = {{(uint16_t)(1 - rank), 1}, {(uint16_t)(1 - rank), 0}};
    const lc_slot_desc slots[] = {
        {.length = PART, .own = LC_OWN_INPUT, .n_dests = 1},
        {.number = 1, .length = PART, .target = LC_TARGET_OUT, .first_edge = 1, .n_sources = 1}};
    lc_call call = {.slots = slots,
                    .edges = edges,
                    .n_slots = 2,
                    .n_edges = 2,
                    .in = e->in[rank][bucket],
                    .out = e->out[rank][bucket],
                    .in_elements = PART,
                    .out_elements = PART,
                    .levels = {{.elements_per_packet = PAYLOAD, .repair = rounds}},
                    .dtype = LC_BYTES,
                    .scale = 1,
                    .signature = 5,
                    .timeout_ns = 60 * SECOND};
    return lc_group_submit(e->v.group[rank], &call);
}

static int has_results(const exchange *e, int64_t tickets[RANKS][BUCKETS], int buckets) {
    for (uint16_t i = 0; i < RANKS; i++)
        for (int b = 0; b < buckets; b++)
            if (lc_group_wait_result(e->v.group[i], tickets[i][b], 0) != LC_OK)
                return 0;
    return 1;
}

/* Until all ranks have the results of so many buckets, which are handed over at once. */
static uint64_t pass(exchange *e, int buckets, uint8_t rounds) {
    int64_t tickets[RANKS][BUCKETS];
    uint64_t begin = memory_now(e->v.net);
    for (uint16_t i = 0; i < RANKS; i++)
        for (int b = 0; b < buckets; b++)
            tickets[i][b] = submit(e, i, b, rounds);
    while (!has_results(e, tickets, buckets) && memory_now(e->v.net) - begin < 10 * SECOND)
        virtual_go_on(&e->v, 100 * US);
    uint64_t took = memory_now(e->v.net) - begin;
    for (uint16_t i = 0; i < RANKS; i++) {
        for (int b = 0; b < buckets; b++) {
            lc_report report;
            lc_failure failure;
            while (lc_group_result(e->v.group[i], tickets[i][b], &report, &failure) == LC_PENDING)
                virtual_go_on(&e->v, MS);
            CHECK(failure.code == LC_OK);
            e->resent += report.packets_resent;
            e->missing += report.packets_missing;
            lc_group_release(e->v.group[i], tickets[i][b]);
        }
    }
    return took;
}

static int by_size(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double median_ms(exchange *e, int buckets, uint8_t rounds) {
    uint64_t took[TURNS];
    e->resent = e->missing = 0;
    for (int i = 0; i < TURNS; i++)
        took[i] = pass(e, buckets, rounds);
    qsort(took, TURNS, sizeof took[0], by_size);
    return 1e-6 * (double)took[TURNS / 2];
}

static void test_one_round_trip_for_all(void) {
    static exchange e;
    const virtual_setup how = {.size = RANKS,
                               .payload = PAYLOAD,
                               .capacity = 4096,
                               .delay_ns = TRIP_NS / 2,
                               .loss = 0.05,
                               .group = {.deadline_max_ns = 10 * SECOND, .met = 1}};
    virtual_open(&e.v, &how);
    memory_set_same_host(e.v.net, 0);
    for (uint16_t i = 0; i < RANKS; i++)
        memory_path_of(e.v.net, i, (uint16_t)(1 - i))->bytes_per_s = RATE;
    (void)median_ms(&e, BUCKETS, 0); /* finds the rate */
    double trip = 1e-6 * (double)TRIP_NS, allowance = 1;
    double none = median_ms(&e, BUCKETS, 0);
    CHECK(e.resent == 0 && e.missing > 100);
    double one = median_ms(&e, BUCKETS, 1);
    CHECK(e.resent > 100 && e.missing > 0);
    double wire = 1e3 * BUCKETS * PART / RATE, again = 0.05 * wire;
    printf("test_overlap %.1f ms for %d buckets of %.1f ms, %.1f with a round of resending\n", none,
           BUCKETS, wire / BUCKETS, one);
    CHECK_AT(one - none > 0.5 * trip, "%.1f ms, with a round %.1f", none, one);
    CHECK_AT(one - none < 1.5 * (trip + allowance) + again, "%.1f ms, with a round %.1f", none,
             one);
    virtual_close(&e.v);
}

int main(void) {
    test_one_round_trip_for_all();
    return check_result("test_overlap");
}
