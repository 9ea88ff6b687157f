/* What an operation must give: from the trees of its segments and from what arrived where, without
 * the engines' tables, states and order of arrival. Sums are of small integers, and so exact, or in
 * the order of ranks. */
#include "sim.h"

#include <stdio.h>
#include <string.h>

#include "small_floats.h"

enum { MOST = 1024 }; /* elements of a packet */

/* A packet of a segment at one rank: the sum of so many contributions. */
typedef struct {
    uint32_t count;
    double v[MOST];
} sum;

typedef struct {
    uint64_t packets, contributions, own_filled, kept, zero_filled, alone, received, missing;
    uint64_t deadlines;
    uint32_t least;
    int cause;
} totals;

static char wrong[300];

static double times(int dtype, double x, double factor) {
    return dtype == LC_F64 ? x * factor : (double)((float)x * (float)factor);
}

static double plus(int dtype, double x, double y) {
    return dtype == LC_F64 ? x + y : (double)((float)x + (float)y);
}

static uint32_t elements_of(const sim_op *op, const sim_segment *g, uint32_t k) {
    uint64_t left = g->length - (uint64_t)k * op->per_packet;
    return (uint32_t)(left < op->per_packet ? left : op->per_packet);
}

static uint64_t at_of(const sim_op *op, const sim_segment *g, uint32_t k) {
    return g->offset + (uint64_t)k * op->per_packet;
}

static void count(totals *t, uint32_t contributions) {
    if (!t->packets || contributions < t->least)
        t->least = contributions;
    t->packets++;
    t->contributions += contributions;
}

/* The root's result, from the sum of what came and, unless that is a stratum, its own. */
static void finish(const sim_op *op, const sim_segment *g, sum *s, uint64_t at, uint32_t n,
                   totals *t) {
    uint16_t root = g->up[0];
    if (g->finish == LC_FINISH_STRATIFIED) {
        double world = g->n_up;
        for (uint32_t i = 0; i < n; i++) {
            double mine = sim_input(op, root, at + i);
            s->v[i] =
                s->count
                    ? plus(op->dtype, times(op->dtype, mine, op->scale / world),
                           times(op->dtype, s->v[i], op->scale * (world - 1) / (world * s->count)))
                    : times(op->dtype, mine, op->scale);
        }
        if (t && !s->count)
            t->alone++;
        s->count += g->own[root];
    } else if (s->count) {
        double parts = g->finish == LC_FINISH_WEIGHTED ? op->divisor : s->count;
        for (uint32_t i = 0; i < n; i++)
            s->v[i] = times(op->dtype, s->v[i], op->scale / parts);
    }
    for (uint32_t i = 0; i < n && g->n_down > 1; i++) /* who sends it keeps what it sends */
        s->v[i] = sim_travelled(op, s->v[i]);
    if (t && s->count)
        count(t, s->count);
}

static void go_up(const sim_op *op, const sim_part *parts, uint32_t number, uint16_t rank,
                  uint32_t k, sum *s, totals *root_totals);

/* What came from a rank's children on one level, and what it has itself, by rank. */
static void add_level(const sim_op *op, const sim_part *parts, uint32_t number, uint16_t rank,
                      uint32_t k, int level, const sum *own, sum *s) {
    const sim_segment *g = &op->segments[number];
    uint32_t n = elements_of(op, g, k), at = level == SIM_LEVEL_UP ? k / op->times : k;
    *s = (sum){.count = 0};
    for (uint16_t p = 0; p < op->ranks; p++) {
        int came = g->up_parent[p] == rank && g->up_level[p] == level &&
                   parts[rank].arrived[number][0][p][at];
        if (p != rank && !came)
            continue;
        sum from = *own;
        if (came)
            go_up(op, parts, number, p, k, &from, NULL);
        double weight = came && op->weighted ? op->weights[rank][p] : 1;
        for (uint32_t i = 0; i < n && from.count; i++)
            s->v[i] = plus(op->dtype, s->v[i], times(op->dtype, from.v[i], weight));
        s->count += from.count;
    }
}

/* What a rank sends up, or the root down: the sum of its own and of what came from its children,
 * those of the lower level first. */
static void go_up(const sim_op *op, const sim_part *parts, uint32_t number, uint16_t rank,
                  uint32_t k, sum *s, totals *root_totals) {
    const sim_segment *g = &op->segments[number];
    uint64_t at = at_of(op, g, k);
    uint32_t n = elements_of(op, g, k);
    sum own = {.count = g->finish == LC_FINISH_STRATIFIED && rank == g->up[0] ? 0 : g->own[rank]};
    sum lower;
    for (uint32_t i = 0; i < n; i++)
        own.v[i] = sim_input(op, rank, at + i);
    add_level(op, parts, number, rank, k, SIM_LEVEL_UP, &own, &lower);
    add_level(op, parts, number, rank, k, SIM_LEVEL, &lower, s);
    if (rank == g->up[0] && g->reduced)
        finish(op, g, s, at, n, root_totals);
}

/* What a rank has in the end of a packet that comes down to it: from the next rank above that lacks
 * it. Returns 0 if it lacks it itself. */
static int go_down(const sim_op *op, const sim_part *parts, uint32_t number, uint16_t rank,
                   uint32_t k, sum *s) {
    const sim_segment *g = &op->segments[number];
    for (uint16_t at = rank; at != g->up[0]; at = (uint16_t)g->down_parent[at])
        if (!parts[at].arrived[number][1][g->down_parent[at]][k])
            return 0;
    go_up(op, parts, number, g->up[0], k, s, NULL);
    return s->count > 0;
}

static double before(const sim_op *op, uint16_t rank, uint64_t i) {
    return op->in_place ? sim_input(op, rank, i) : sim_before(op, i);
}

static double load(int dtype, const uint8_t *at) {
    float f;
    double d;
    uint16_t h;
    memcpy(&h, at, sizeof h);
    memcpy(&f, at, sizeof f);
    memcpy(&d, at, sizeof d);
    return dtype == LC_F32    ? f
           : dtype == LC_F64  ? d
           : dtype == LC_F16  ? decode(half, h)
           : dtype == LC_BF16 ? decode(brain, h)
                              : at[0];
}

static int same(const sim_op *op, const sim_part *p, uint64_t i, double want) {
    uint32_t bytes = sim_element_bytes(op->dtype);
    uint8_t stored[8];
    sim_store(op->dtype, stored, 0, want);
    return memcmp(p->result + i * bytes, stored, bytes) == 0;
}

static void stream(const sim_part *p, uint32_t number, int tree, int from, uint32_t n, totals *t) {
    uint32_t came = 0;
    for (uint32_t k = 0; k < n; k++)
        came += p->arrived[number][tree][from][k];
    t->received += came;
    t->missing += n - came;
    t->deadlines += n && p->cause[number][tree][from] == LC_CAUSE_DEADLINE;
    if (came < n && p->cause[number][tree][from] > t->cause)
        t->cause = p->cause[number][tree][from];
}

static int check_packet(const sim_op *op, const sim_part *parts, uint32_t number, uint16_t rank,
                        uint32_t k, totals *t) {
    const sim_segment *g = &op->segments[number];
    uint64_t at = at_of(op, g, k);
    uint32_t n = elements_of(op, g, k);
    int root = rank == g->up[0];
    int down = !root && g->down_parent[rank] >= 0;
    sum s = {.count = 0};
    int has = 0;
    if (root) {
        go_up(op, parts, number, rank, k, &s, g->reduced ? t : NULL);
        has = s.count > 0;
        for (uint32_t i = 0; !g->reduced && i < n; i++)
            s.v[i] = sim_input(op, rank, at + i);
    } else if (down) {
        has = go_down(op, parts, number, rank, k, &s);
        if (!has && parts[rank].arrived[number][1][g->down_parent[rank]][k]) {
            snprintf(wrong, sizeof wrong, "segment %u packet %u came from who never had it", number,
                     k);
            return 0;
        }
        if (has)
            count(t, s.count);
        else if (g->missing == LC_MISSING_OWN) {
            t->own_filled++;
            count(t, 1);
        } else if (g->missing == LC_MISSING_ZERO)
            t->zero_filled++;
        else
            t->kept++;
    }
    for (uint32_t i = 0; i < n; i++) {
        double kept = before(op, rank, at + i);
        double want = has                             ? s.v[i]
                      : !down                         ? kept
                      : g->missing == LC_MISSING_OWN  ? times(op->dtype, kept, op->scale)
                      : g->missing == LC_MISSING_ZERO ? 0
                                                      : kept;
        if (!same(op, &parts[rank], at + i, want)) {
            snprintf(
                wrong, sizeof wrong, "segment %u packet %u element %u of %u is %.9g, not %.9g (%s)",
                number, k, i, n,
                load(op->dtype, parts[rank].result + (at + i) * sim_element_bytes(op->dtype)), want,
                root   ? "root"
                : down ? has ? "came" : "missing"
                       : "none");
            return 0;
        }
    }
    return 1;
}

#define AGREE(name, mine)                                                                          \
    if (r->name != (mine)) {                                                                       \
        snprintf(wrong, sizeof wrong, "report: " #name " is %llu, not %llu",                       \
                 (unsigned long long)r->name, (unsigned long long)(mine));                         \
        return wrong;                                                                              \
    }

const char *sim_compare(const sim_op *op, const sim_part *parts, uint16_t rank) {
    totals t = {.packets = 0};
    for (uint32_t number = 0; number < op->n_segments; number++) {
        const sim_segment *g = &op->segments[number];
        for (uint32_t k = 0; k < g->n_packets; k++)
            if (!check_packet(op, parts, number, rank, k, &t))
                return wrong;
        for (uint16_t p = 0; p < op->ranks; p++)
            if (g->up_parent[p] == rank)
                stream(&parts[rank], number, 0, p, sim_packets(op, g, g->up_level[p]), &t);
        if (rank != g->up[0] && g->down_parent[rank] >= 0)
            stream(&parts[rank], number, 1, g->down_parent[rank], g->n_packets, &t);
    }
    const lc_report *r = &parts[rank].report;
    AGREE(packets_received, t.received);
    AGREE(packets_missing, t.missing);
    AGREE(contribution_packets, t.packets);
    AGREE(contributions, t.contributions);
    if (t.packets)
        AGREE(contributions_min, t.least);
    AGREE(own_filled, t.own_filled);
    AGREE(kept, t.kept);
    AGREE(zero_filled, t.zero_filled);
    AGREE(alone, t.alone);
    AGREE(deadline_hits, t.deadlines);
    AGREE(cause, t.cause);
    return NULL;
}
