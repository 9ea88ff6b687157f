/* What must be true when all has ended. */
#include "sim_run.h"

#include "wire.h"

enum { ASK_US = 120000 }; /* with what it takes until a timer looks */

/* Whether who sends a packet down has something to send, and has not ended before it was asked. */
static int has_packet(const run *r, uint32_t number, uint32_t segment, uint16_t rank, uint16_t to,
                      uint32_t k) {
    const sim_segment *g = &r->ops[number].segments[segment];
    const sim_part *p = part_of(r, number, 0);
    if (p[rank].finished && p[rank].finished_ns < p[to].finished_ns)
        return 0; /* nothing had come from there for deadline_max */
    if (rank == g->up[0])
        return g->own[rank];
    return p[rank].arrived[segment][1][g->down_parent[rank]][k];
}

static void check_needed(run *r, uint32_t number, uint16_t rank) {
    const sim_op *op = &r->ops[number];
    const sim_part *p = part_of(r, number, rank);
    const uint8_t *needed = op->needed[rank];
    for (uint32_t i = 0; i < op->n_segments; i++) {
        int from = op->segments[i].down_parent[rank];
        for (uint32_t k = 0; sim_may_need(&op->segments[i], rank) && k < op->segments[i].n_packets;
             k++, needed++)
            if (*needed && !p->arrived[i][1][from][k] && p->cause[i][1][from] == LC_CAUSE_LOSS &&
                has_packet(r, number, i, (uint16_t)from, rank, k))
                sim_fail(r, "operation %u, rank %u: packet %u of segment %u was needed", number,
                         rank, k, i);
    }
}

/* A stream that stands in its sender's queue is asked about after 100 ms, and the answer has to be
 * here before deadline_max is over, whatever lies in the network's queues before it. */
static int answers_in_time(const sim_scenario *s) {
    uint64_t bits = 8 * s->capacity * (s->payload + LC_HEADER_BYTES);
    uint64_t queued = s->mbit ? bits / s->mbit : 0;
    return ASK_US + 2 * (s->delay + s->reads) + queued < s->deadline;
}

static void check_missing(run *r, uint32_t number, uint16_t rank) {
    const sim_op *op = &r->ops[number];
    const lc_report *report = &part_of(r, number, rank)->report;
    if (sim_is_clean(r->s) && answers_in_time(r->s) && report->packets_missing && !r->out->overflow)
        sim_fail(r, "operation %u, rank %u: lacks %llu packets of a network that loses none",
                 number, rank, (unsigned long long)report->packets_missing);
    int reliable = 1;
    for (int i = 0; i < LC_LEVELS; i++)
        reliable &= op->levels[i].reliable || !op->levels[i].elements_per_packet;
    if (reliable && report->packets_missing && !r->s->dead)
        sim_fail(r, "operation %u, rank %u: reliable, and lacks %llu packets", number, rank,
                 (unsigned long long)report->packets_missing);
    if (op->selective)
        check_needed(r, number, rank);
}

/* A sender has heard of just those of its packets that its receiver gave up. */
static void check_feedback(run *r, uint32_t number, uint16_t from, uint16_t to) {
    const sim_op *op = &r->ops[number];
    for (uint32_t i = 0; i < op->n_segments; i++) {
        const sim_segment *g = &op->segments[i];
        for (int tree = 0; tree < 2; tree++) {
            if ((tree ? g->down_parent[to] : g->up_parent[from]) != (tree ? from : to))
                continue;
            uint32_t n = tree ? g->n_packets : sim_packets(op, g, g->up_level[from]);
            for (uint32_t k = 0; k < n; k++) {
                int lacks = !part_of(r, number, to)->arrived[i][tree][from][k];
                int told = part_of(r, number, from)->given_up[i][tree][to][k];
                if (told && !lacks)
                    sim_fail(r,
                             "operation %u: rank %u takes packet %u of segment %u for lost at %u",
                             number, from, k, i, to);
            }
        }
    }
}

static void check_part(run *r, uint32_t number, uint16_t rank) {
    const sim_op *op = &r->ops[number];
    const sim_part *p = part_of(r, number, rank);
    if (!p->finished || p->code != LC_OK || !sim_spares_op(r, r->group_of[number], p->report.op))
        return;
    const char *wrong = sim_compare(op, part_of(r, number, 0), rank);
    if (wrong)
        sim_fail(r, "operation %u, rank %u: %s", number, rank, wrong);
    if (!sim_has_trouble(r->s))
        check_missing(r, number, rank);
    for (uint16_t j = 0; op->feedback && j < op->ranks; j++)
        if (part_of(r, number, j)->finished && part_of(r, number, j)->code == LC_OK)
            check_feedback(r, number, rank, j);
}

/* Windows keep data out of a buffer that is full; control has a share of its own in it. What is
 * under way on a long path comes on top, and may come all at once. */
static void count_overflow(run *r) {
    for (uint64_t n = 0; n < r->s->links; n++)
        for (uint16_t i = 0; i < r->s->ranks; i++)
            r->out->overflow += memory_overflow(r->nets[n], i);
    if (sim_is_clean(r->s) && r->s->delay + r->s->reads <= 200 && r->out->overflow)
        sim_fail(r, "%llu packets found no room in receive buffers",
                 (unsigned long long)r->out->overflow);
}

/* Nobody who exchanges something with the process that means another call has a result of it: as
 * long as nothing is lost, so that they hear of each other, and nobody is done before that. */
static void check_odd(run *r) {
    uint32_t k = r->odd_op;
    if (k == SIM_OPS || !sim_loses_nothing(r->s) || r->s->lingers)
        return;
    int odd = group_of(r, k)->rank_of[r->odd_process];
    for (uint16_t i = 0; i < r->ops[k].ranks; i++) {
        int meets = 0;
        for (uint32_t n = 0; n < r->ops[k].n_segments; n++) {
            const sim_segment *g = &r->ops[k].segments[n];
            meets |= g->length && (g->up_parent[i] == odd || g->down_parent[i] == odd ||
                                   g->up_parent[odd] == i || g->down_parent[odd] == i);
        }
        const sim_part *p = part_of(r, k, i);
        if (meets && p->finished && p->code == LC_OK)
            sim_fail(r, "operation %u, rank %u: done, though rank %d means another", k, i, odd);
    }
}

void sim_check(run *r) {
    count_overflow(r);
    for (uint32_t k = 0; k < r->s->ops; k++)
        for (uint16_t i = 0; i < r->ops[k].ranks; i++)
            check_part(r, k, i);
    check_odd(r);
}
