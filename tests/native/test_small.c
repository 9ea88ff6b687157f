/* What small operations cost in datagrams, in virtual time: each rank makes one call after the
 * other. */
#include <string.h>

#include "check.h"
#include "net.h"
#include "virtual_net.h"

enum { RANKS = 4, CALLS = 50, SEGMENT = 64, ELEMENTS = RANKS * SEGMENT, PAYLOAD = 8 * ELEMENTS };

static const uint64_t NEVER = UINT64_MAX;

typedef struct {
    uint16_t ranks;
    int sums, lossy; /* an all-reduce; or a broadcast of rank 0's */
    double loss;
} kind;

typedef struct {
    kind how;
    virtual_net v;
    int64_t ticket[RANKS];
    int ended[RANKS]; /* calls */
    uint64_t missing;
    float data[RANKS][ELEMENTS];
} job;

static void open_job(job *j) {
    const virtual_setup how = {.size = j->how.ranks,
                               .payload = PAYLOAD,
                               .capacity = 4096,
                               .eager_bytes = 1 << 20,
                               .delay_ns = 20000,
                               .loss = j->how.loss,
                               .group = {.deadline_max_ns = 10 * SECOND, .met = 1}};
    virtual_open(&j->v, &how);
}

static void plan_broadcast(table *t, uint16_t size, uint16_t rank) {
    *t = (table){.n_slots = 0};
    lc_slot_desc *s = add_slot(t, 0, 0, (uint64_t)size * SEGMENT);
    s->missing = LC_MISSING_KEEP;
    if (rank)
        add_source(t, s, 0);
    else
        own_at(s, 0, LC_TARGET_NONE);
    for (uint16_t i = 1; i < size && !rank; i++)
        add_dest(t, s, i, 0);
}

static void submit(job *j, uint16_t rank) {
    table t;
    uint16_t size = j->how.ranks;
    if (j->how.sums)
        plan_transpose(&t, size, rank, SEGMENT);
    else
        plan_broadcast(&t, size, rank);
    fill(j->data[rank], (size_t)size * SEGMENT, rank);
    lc_call call = {.slots = t.slots,
                    .edges = t.edges,
                    .n_slots = t.n_slots,
                    .n_edges = t.n_edges,
                    .in = j->data[rank],
                    .out = j->data[rank],
                    .in_elements = (uint64_t)size * SEGMENT,
                    .out_elements = (uint64_t)size * SEGMENT,
                    .levels = {{.elements_per_packet = PAYLOAD / 4, .reliable = !j->how.lossy}},
                    .dtype = LC_F32,
                    .lingers = 1,
                    .scale = 1,
                    .signature = 1};
    j->ticket[rank] = lc_group_submit(j->v.group[rank], &call);
    CHECK(j->ticket[rank] > 0);
}

static void check_value(job *j, uint16_t rank, const lc_report *report) {
    float want = j->how.sums ? mean_of_all(j->how.ranks) : 1;
    j->missing += report->packets_missing;
    if (j->how.lossy && j->how.loss > 0)
        return;
    CHECK(report->packets_missing == 0);
    int good = 1;
    for (int i = 0; i < j->how.ranks * SEGMENT && (rank || j->how.sums); i++)
        good &= j->data[rank][i] - want < NET_NEAR && want - j->data[rank][i] < NET_NEAR;
    CHECK_AT(good, "rank %d", rank);
}

/* A rank's turns at one moment; it makes its next call as soon as the one before has ended. */
static uint64_t take_turns(job *j, uint16_t rank) {
    lc_report report;
    lc_failure failure;
    for (int again = 1; again;) {
        again = lc_host_turn(j->v.host[rank]);
        if (j->ended[rank] == CALLS ||
            (j->ticket[rank] &&
             lc_group_result(j->v.group[rank], j->ticket[rank], &report, &failure) == LC_PENDING))
            continue;
        if (j->ticket[rank]) {
            CHECK(failure.code == LC_OK);
            check_value(j, rank, &report);
            lc_group_release(j->v.group[rank], j->ticket[rank]);
            j->ended[rank]++;
        }
        if (j->ended[rank] < CALLS)
            submit(j, rank);
        again = 1;
    }
    return virtual_wakes(&j->v, rank);
}

static int all_ended(const job *j) {
    for (int i = 0; i < j->how.ranks; i++)
        if (j->ended[i] < CALLS)
            return 0;
    return 1;
}

/* Datagrams for each call. */
static double run(kind how) {
    static job j;
    memset(&j, 0, sizeof j);
    j.how = how;
    open_job(&j);
    uint64_t begin = memory_now(j.v.net), end = NEVER;
    while (memory_now(j.v.net) < end && memory_now(j.v.net) < begin + 100 * SECOND) {
        uint64_t next = NEVER;
        for (uint16_t i = 0; i < how.ranks; i++) {
            uint64_t mine = take_turns(&j, i);
            next = mine < next ? mine : next;
        }
        if (end == NEVER && all_ended(&j))
            end = memory_now(j.v.net) + 20 * MS; /* what is still said counts as well */
        virtual_set_now(&j.v, next);
    }
    CHECK(all_ended(&j));
    CHECK((j.missing > 0) == (how.lossy && how.loss > 0));
    double each = (double)memory_counts_of(j.v.net).sent / CALLS;
    virtual_close(&j.v);
    return each;
}

/* The most datagrams that a call takes where nothing is lost, between each pair of ranks that have
 * something for each other. An all-reduce has two streams each way, in one packet each, and control
 * rides in them; a lossy one says each end as well. A broadcast has one, READY and DONE come back.
 */
static void test_cost(kind how) {
    double each = run(how);
    int pairs = how.sums ? how.ranks * (how.ranks - 1) / 2 : how.ranks - 1;
    double most = !how.sums ? 3.25 : how.lossy ? 8.1 : 4.1;
    CHECK_AT(how.loss > 0 || each <= most * pairs, "%d ranks, sums %d, lossy %d: %.2f datagrams",
             how.ranks, how.sums, how.lossy, each);
}

int main(void) {
    for (uint16_t ranks = 2; ranks <= RANKS; ranks += 2)
        for (int what = 0; what < 8; what++)
            test_cost((kind){ranks, what & 1, what >> 1 & 1, what >> 2 ? 0.02 : 0});
    return check_result("test_small");
}
