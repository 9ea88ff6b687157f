/* What small operations cost in datagrams, in virtual time: each rank makes one call after the
 * other. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "link_memory.h"
#include "net.h"
#include "step.h"
#include "wire.h"

enum { RANKS = 4, CALLS = 50, SEGMENT = 64, ELEMENTS = RANKS * SEGMENT, PAYLOAD = 8 * ELEMENTS };

static const uint64_t NEVER = UINT64_MAX;

typedef struct {
    uint16_t ranks;
    int sums, lossy; /* an all-reduce; or a broadcast of rank 0's */
    double loss;
} kind;

typedef struct {
    kind how;
    memory_net *net;
    lc_host *host[RANKS];
    lc_group *group[RANKS];
    int64_t ticket[RANKS];
    int ended[RANKS]; /* calls */
    uint64_t missing;
    float data[RANKS][ELEMENTS];
} job;

static void open_job(job *j) {
    lc_address nowhere[RANKS] = {{.host = ""}};
    lc_failure failure;
    uint16_t size = j->how.ranks;
    j->net = memory_net_new(size, LC_HEADER_BYTES + PAYLOAD, 4096, 7);
    memory_set_same_host(j->net, 1);
    for (uint16_t i = 0; i < size; i++) {
        for (uint16_t k = 0; k < size; k++) {
            memory_path_of(j->net, i, k)->delay_ns = 20000;
            memory_path_of(j->net, i, k)->loss = j->how.loss;
        }
        lc_host_config c = {.address = "memory",
                            .process = i,
                            .processes = size,
                            .payload_bytes = PAYLOAD,
                            .eager_bytes = 1 << 20};
        lc_link *link = memory_link_open(j->net, i);
        lc_setting setting = {memory_clock(j->net), &link, 1};
        j->host[i] = lc_host_open_in(&c, &setting, &failure);
        if (!j->host[i] || lc_host_start(j->host[i], 9, nowhere) != LC_OK)
            abort();
        lc_group_config g = {
            .number = 1, .rank = i, .size = size, .deadline_max_ns = 10 * SECOND, .met = 1};
        j->group[i] = lc_group_open(j->host[i], &g, &failure);
        if (!j->group[i])
            abort();
    }
}

static void close_job(job *j) {
    for (int i = 0; i < j->how.ranks; i++)
        lc_group_close(j->group[i]);
    for (int i = 0; i < j->how.ranks; i++)
        lc_host_close(j->host[i]);
    memory_net_free(j->net);
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
    j->ticket[rank] = lc_group_submit(j->group[rank], &call);
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
    uint64_t now = memory_now(j->net);
    lc_report report;
    lc_failure failure;
    for (int again = 1; again;) {
        again = lc_host_turn(j->host[rank]);
        if (j->ended[rank] == CALLS ||
            (j->ticket[rank] &&
             lc_group_result(j->group[rank], j->ticket[rank], &report, &failure) == LC_PENDING))
            continue;
        if (j->ticket[rank]) {
            CHECK(failure.code == LC_OK);
            check_value(j, rank, &report);
            lc_group_release(j->group[rank], j->ticket[rank]);
            j->ended[rank]++;
        }
        if (j->ended[rank] < CALLS)
            submit(j, rank);
        again = 1;
    }
    uint64_t idle = lc_host_idle_ns(j->host[rank]), arrives = memory_next(j->net, rank);
    uint64_t wakes = idle < NEVER - now ? now + idle : NEVER;
    return wakes < arrives ? wakes : arrives;
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
    uint64_t begin = memory_now(j.net), end = NEVER;
    while (memory_now(j.net) < end && memory_now(j.net) < begin + 100 * SECOND) {
        uint64_t next = NEVER;
        for (uint16_t i = 0; i < how.ranks; i++) {
            uint64_t mine = take_turns(&j, i);
            next = mine < next ? mine : next;
        }
        if (end == NEVER && all_ended(&j))
            end = memory_now(j.net) + 20 * MS; /* what is still said counts as well */
        memory_set_now(j.net, next > memory_now(j.net) ? next : memory_now(j.net));
    }
    CHECK(all_ended(&j));
    CHECK((j.missing > 0) == (how.lossy && how.loss > 0));
    double each = (double)memory_counts_of(j.net).sent / CALLS;
    close_job(&j);
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
