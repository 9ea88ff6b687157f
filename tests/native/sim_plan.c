/* Operations: trees that are drawn, and the tables that the engines are given for them. A chain is
 * a ring's way, a star is a transpose's. */
#include "sim.h"

#include <string.h>

#include "sets.h"
#include "small_floats.h"

static const int WITH_SUMS[] = {LC_F32, LC_F64, LC_F16, LC_BF16};

/* ---- values ---- */

uint32_t sim_element_bytes(int dtype) {
    static const uint32_t bytes[] = {4, 8, 2, 2, 1};
    return bytes[dtype];
}

double sim_input(const sim_op *op, uint16_t rank, uint64_t i) {
    uint64_t drawn = sim_mix(op->seed ^ (uint64_t)(rank + 1) << 48 ^ i);
    if (!op->rough)
        return (double)(drawn % 8);
    double value = (double)(1 + drawn % 999) / 7 * (double)(1 << (drawn >> 32) % 12);
    return op->dtype == LC_F64 ? value : (double)(float)value;
}

double sim_before(const sim_op *op, uint64_t i) {
    return 20 + (double)(sim_mix(op->seed ^ i) % 100);
}

void sim_store(int dtype, void *at, uint64_t i, double value) {
    float f = (float)value;
    switch (dtype) {
    case LC_F32:
        ((float *)at)[i] = f;
        break;
    case LC_F64:
        ((double *)at)[i] = value;
        break;
    case LC_F16:
        ((uint16_t *)at)[i] = encode(half, f);
        break;
    case LC_BF16:
        ((uint16_t *)at)[i] = encode(brain, f);
        break;
    default:
        ((uint8_t *)at)[i] = (uint8_t)value;
        break;
    }
}

double sim_travelled(const sim_op *op, double value) {
    if (op->encoding == LC_ENCODING_SAME)
        return value;
    format f = op->encoding == LC_ENCODING_F16 ? half : brain;
    return decode(f, encode(f, (float)value));
}

/* ---- trees ---- */

/* A random tree of n members, the root first: everyone's parent is one that stands before. */
static void draw_tree(uint64_t *r, uint16_t *members, uint16_t n, int *parent) {
    int chain = sim_happens(r, 300), star = sim_happens(r, 300);
    for (int i = 0; i < SIM_RANKS; i++)
        parent[i] = -1;
    for (uint16_t i = 1; i < n; i++)
        parent[members[i]] = members[chain ? i - 1u : star ? 0u : sim_below(r, i)];
}

static void shuffle(uint64_t *r, uint16_t *members, uint16_t n) {
    for (uint16_t i = n; i > 1; i--) {
        uint16_t j = (uint16_t)sim_below(r, i);
        uint16_t kept = members[i - 1];
        members[i - 1] = members[j];
        members[j] = kept;
    }
}

/* Below a hop on the lower level, all are. */
static void draw_levels(const sim_op *op, uint64_t *r, sim_segment *g) {
    for (uint16_t i = 0; i < SIM_RANKS; i++)
        g->up_level[i] = g->down_level[i] = SIM_LEVEL;
    if (!op->levels[SIM_LEVEL_UP].elements_per_packet)
        return;
    for (uint16_t i = 1; i < g->n_up && g->finish != LC_FINISH_STRATIFIED; i++) {
        uint16_t parent = (uint16_t)g->up_parent[g->up[i]];
        int lower = parent != g->up[0] && g->up_level[parent] == SIM_LEVEL_UP;
        g->up_level[g->up[i]] = lower || sim_happens(r, 500) ? SIM_LEVEL_UP : SIM_LEVEL;
    }
    /* A root that reduces alone waits for nothing, and so can't feed. */
    for (uint16_t i = 1; i < g->n_down; i++)
        if (!g->reduced || g->n_up > 1 || g->down_parent[g->down[i]] != g->up[0])
            g->down_level[g->down[i]] = sim_happens(r, 500) ? SIM_LEVEL_DOWN : SIM_LEVEL;
}

static void draw_segment(sim_op *op, const sim_scenario *s, uint64_t *r, sim_segment *g) {
    uint16_t ranks = op->ranks;
    uint64_t most = s->packets * op->per_packet;
    g->offset = op->elements;
    g->length = sim_happens(r, 50) ? 0 : 1 + sim_below(r, most);
    g->n_packets = (uint32_t)((g->length + op->per_packet - 1) / op->per_packet);
    op->elements += g->length;
    g->reduced = op->dtype != LC_BYTES && s->sums && sim_happens(r, 700);
    for (uint16_t i = 0; i < ranks; i++)
        g->up[i] = g->down[i] = i;
    shuffle(r, g->up, ranks);
    g->n_up = g->reduced ? (uint16_t)(1 + sim_below(r, ranks)) : 1;
    if (sim_happens(r, 600) && g->reduced)
        g->n_up = ranks;
    draw_tree(r, g->up, g->n_up, g->up_parent);
    g->finish = LC_FINISH_NONE;
    if (g->reduced) {
        g->finish = op->weighted ? LC_FINISH_WEIGHTED : LC_FINISH_MEAN;
        if (!op->weighted && sim_happens(r, 250)) {
            g->finish = LC_FINISH_STRATIFIED;
            for (uint16_t i = 1; i < g->n_up; i++)
                g->up_parent[g->up[i]] = g->up[0];
        }
    }
    for (uint16_t i = 0; i < ranks; i++)
        g->own[i] = 1;
    for (uint16_t i = 0; i < g->n_up && g->reduced; i++) { /* who only passes on */
        int has_child = 0;
        for (uint16_t j = 0; j < g->n_up; j++)
            has_child |= g->up_parent[g->up[j]] == g->up[i];
        if (has_child && g->finish != LC_FINISH_STRATIFIED && sim_happens(r, 100))
            g->own[g->up[i]] = 0;
    }
    shuffle(r, g->down, ranks);
    for (uint16_t i = 0; i < ranks; i++) /* the root first */
        if (g->down[i] == g->up[0]) {
            g->down[i] = g->down[0];
            g->down[0] = g->up[0];
        }
    g->n_down = sim_happens(r, 600) ? ranks : (uint16_t)(1 + sim_below(r, ranks));
    draw_tree(r, g->down, g->n_down, g->down_parent);
    const uint8_t in_place[] = {LC_MISSING_OWN, LC_MISSING_KEEP, LC_MISSING_ZERO};
    int any = op->in_place && op->dtype != LC_BYTES;
    g->missing = in_place[any ? sim_below(r, 3) : 1 + sim_below(r, 2)];
    draw_levels(op, r, g);
}

/* ---- tables ---- */

static void add_edge(sim_op *op, uint16_t rank, uint16_t peer, uint16_t slot) {
    op->edges[rank][op->n_edges[rank]++] = (lc_edge){peer, slot};
}

/* The children on the slot's level. */
static uint32_t add_sources(sim_op *op, uint16_t rank, lc_slot_desc *d, const sim_segment *g) {
    for (uint16_t i = 1; i < g->n_up; i++)
        if (g->up_parent[g->up[i]] == rank && g->up_level[g->up[i]] == d->level) {
            add_edge(op, rank, g->up[i], 0);
            d->n_sources++;
        }
    return d->n_sources;
}

static uint32_t add_dests(sim_op *op, uint16_t rank, lc_slot_desc *d, const sim_segment *g,
                          uint32_t segment) {
    for (uint16_t i = 1; i < g->n_down; i++)
        if (g->down_parent[g->down[i]] == rank && g->down_level[g->down[i]] == d->level) {
            add_edge(op, rank, g->down[i], sim_slot(segment, 1, d->level));
            d->n_dests++;
        }
    return d->n_dests;
}

static lc_slot_desc *add_slot(sim_op *op, uint16_t rank, const sim_segment *g, uint16_t number,
                              int level) {
    lc_slot_desc *d = &op->slots[rank][op->n_slots[rank]++];
    *d = (lc_slot_desc){.number = number,
                        .offset = g->offset,
                        .length = g->length,
                        .own_offset = g->offset,
                        .first_edge = op->n_edges[rank],
                        .target = LC_TARGET_OUT,
                        .level = (uint8_t)level};
    return d;
}

static void be_fed(lc_slot_desc *d, uint16_t feeder) {
    d->own = LC_OWN_SLOT;
    d->own_offset = 0;
    d->feed = feeder;
}

/* A sum that is not finished here. */
static void keep_in_scratch(sim_op *op, uint16_t rank, lc_slot_desc *d) {
    d->combine = LC_ADD;
    d->target = LC_TARGET_SCRATCH;
    d->offset = op->scratch[rank];
    op->scratch[rank] += d->length;
}

static int is_in(const uint16_t *members, uint16_t n, uint16_t rank) {
    for (uint16_t i = 0; i < n; i++)
        if (members[i] == rank)
            return 1;
    return 0;
}

/* What is added up on the lower level, if anything is; it feeds what is on the upper one. Returns
 * whether there is such a slot. */
static int add_lower(sim_op *op, uint16_t rank, const sim_segment *g, uint32_t segment) {
    uint16_t number = sim_slot(segment, 0, SIM_LEVEL_UP);
    int goes_on = rank != g->up[0] && g->up_level[rank] == SIM_LEVEL_UP;
    lc_slot_desc *d = add_slot(op, rank, g, number, SIM_LEVEL_UP);
    d->own = g->own[rank];
    d->target = LC_TARGET_NONE;
    if (add_sources(op, rank, d, g))
        keep_in_scratch(op, rank, d);
    else if (!goes_on)
        op->n_slots[rank]--;
    if (goes_on) {
        add_edge(op, rank, (uint16_t)g->up_parent[rank], number);
        d->n_dests = 1;
    }
    return goes_on || d->n_sources;
}

static void add_upper(sim_op *op, uint16_t rank, const sim_segment *g, uint32_t segment, int fed) {
    int root = rank == g->up[0];
    uint16_t number = sim_slot(segment, 0, SIM_LEVEL);
    lc_slot_desc *d = add_slot(op, rank, g, number, SIM_LEVEL);
    d->own = g->own[rank];
    if (fed)
        be_fed(d, sim_slot(segment, 0, SIM_LEVEL_UP));
    add_sources(op, rank, d, g);
    if (root) {
        d->combine = g->reduced ? LC_ADD : LC_COPY;
        d->finish = g->finish;
        if (!g->reduced && op->in_place)
            d->target = LC_TARGET_NONE;
        add_dests(op, rank, d, g, segment);
        return;
    }
    d->target = LC_TARGET_NONE;
    if (d->n_sources)
        keep_in_scratch(op, rank, d);
    add_edge(op, rank, (uint16_t)g->up_parent[rank], number);
    d->n_dests = 1;
}

static void add_up(sim_op *op, uint16_t rank, const sim_segment *g, uint32_t segment) {
    int fed = add_lower(op, rank, g, segment);
    if (rank == g->up[0] || g->up_level[rank] == SIM_LEVEL)
        add_upper(op, rank, g, segment, fed);
}

static void add_down(sim_op *op, uint16_t rank, const sim_segment *g, uint32_t segment) {
    int level = g->down_level[rank];
    lc_slot_desc *d = add_slot(op, rank, g, sim_slot(segment, 1, level), level);
    d->missing = g->missing;
    add_edge(op, rank, (uint16_t)g->down_parent[rank], 0);
    d->n_sources = 1;
    add_dests(op, rank, d, g, segment);
}

/* Children in the tree down that are not on the level of what this rank has. */
static void add_across(sim_op *op, uint16_t rank, const sim_segment *g, uint32_t segment) {
    int root = rank == g->up[0];
    int from = root ? SIM_LEVEL : g->down_level[rank];
    int to = from == SIM_LEVEL ? SIM_LEVEL_DOWN : SIM_LEVEL;
    lc_slot_desc *d = add_slot(op, rank, g, sim_slot(segment, 1, to), to);
    d->target = LC_TARGET_NONE;
    d->own = LC_OWN_INPUT;
    if (g->reduced || !root)
        be_fed(d, root ? sim_slot(segment, 0, SIM_LEVEL) : sim_slot(segment, 1, from));
    if (!add_dests(op, rank, d, g, segment))
        op->n_slots[rank]--;
}

static void make_tables(sim_op *op, uint16_t ranks, uint64_t *r) {
    for (uint16_t rank = 0; rank < ranks; rank++) {
        op->n_slots[rank] = op->n_edges[rank] = op->n_needed[rank] = 0;
        op->scratch[rank] = 0;
        for (uint32_t i = 0; i < op->n_segments; i++) {
            const sim_segment *g = &op->segments[i];
            if (is_in(g->up, g->n_up, rank))
                add_up(op, rank, g, i);
            if (!is_in(g->down, g->n_down, rank))
                continue;
            if (rank != g->up[0])
                add_down(op, rank, g, i);
            add_across(op, rank, g, i);
            for (uint32_t k = 0; k < g->n_packets && sim_may_need(g, rank); k++)
                op->needed[rank][op->n_needed[rank]++] = (uint8_t)sim_happens(r, 300);
        }
    }
}

/* Where the loss decides on parity, and on rounds that nobody has fixed. */
static uint8_t some_choice(uint8_t most, int fixed) {
    if (!most)
        return 0;
    return (uint8_t)(LC_CHOOSE_PARITY | (most % 2 && !fixed ? LC_CHOOSE_ROUNDS : 0));
}

/* What may be missing, where the loss decides on parity. */
static float some_dial(uint8_t most) {
    static const float dials[] = {-1, 0, 0.003f, 0.01f, 0.1f, 1};
    return most ? dials[most % (sizeof dials / sizeof *dials)] : 0;
}

/* One of 31 for an operation; 0: none. No more parity than other packets. */
static uint16_t some_code(const sim_op *op, uint64_t number) {
    if (!number)
        return 0;
    uint64_t state = op->seed + number;
    uint32_t k = lc_code_size((uint32_t)sim_below(&state, LC_SIZES));
    uint32_t most = sim_happens(&state, 500) ? k : k < 4 ? k : 4;
    uint16_t code = lc_code(k, lc_code_rows_down(1 + (uint32_t)sim_below(&state, most)));
    return code ? code : lc_code(k, 1);
}

static void make_levels(sim_op *op, const sim_scenario *s, uint64_t *r) {
    memset(op->levels, 0, sizeof op->levels);
    op->times = 1;
    op->levels[SIM_LEVEL] = (lc_level){.elements_per_packet = op->per_packet,
                                       .reliable = op->reliable,
                                       .repair = op->repair,
                                       .selective = op->selective,
                                       .feedback = op->feedback,
                                       .choose = some_choice(op->most, op->reliable || op->repair),
                                       .most = op->most,
                                       .max_missing = some_dial(op->most),
                                       .code = op->code};
    if (!s->levels || !sim_happens(r, 700))
        return;
    op->times = (uint32_t)(1 + sim_below(r, op->per_packet < 3 ? op->per_packet : 3));
    op->per_packet /= op->times;
    op->levels[SIM_LEVEL].elements_per_packet = op->per_packet;
    for (int i = SIM_LEVEL_UP; i <= SIM_LEVEL_DOWN; i++) {
        lc_level *l = &op->levels[i];
        l->elements_per_packet = op->per_packet * (i == SIM_LEVEL_UP ? op->times : 1);
        l->reliable = (uint8_t)sim_happens(r, 600);
        l->repair = (uint8_t)(l->reliable ? 0 : sim_below(r, s->repair + 1));
        l->feedback = op->feedback;
        l->code = some_code(op, !l->reliable && s->fec ? sim_below(r, 32) : 0);
        /* Limits differ from level to level. */
        if (l->code && s->fec == 2 && sim_mix(op->seed + (uint64_t)i) % 2) {
            l->most = (uint8_t)(1 + l->code % 64);
            l->choose = some_choice(l->most, l->reliable || l->repair);
            l->max_missing = some_dial(l->most);
            l->code = 0;
        }
    }
}

void sim_make_op(sim_op *op, const sim_scenario *s, uint16_t ranks, uint64_t seed) {
    uint64_t state = seed;
    uint64_t *r = &state;
    op->ranks = ranks;
    op->seed = sim_next(r);
    op->dtype = LC_F32;
    if (s->dtypes == 1)
        op->dtype = (uint8_t)(sim_happens(r, 150) ? LC_BYTES : WITH_SUMS[sim_below(r, 4)]);
    op->encoding = LC_ENCODING_SAME;
    if (s->dtypes == 2 && op->dtype == LC_F32 && sim_happens(r, 600))
        op->encoding = sim_happens(r, 500) ? LC_ENCODING_BF16 : LC_ENCODING_F16;
    uint64_t most = s->payload / (op->encoding ? 2 : sim_element_bytes(op->dtype));
    op->per_packet = (uint32_t)(sim_happens(r, 700) ? most : 1 + sim_below(r, most));
    op->in_place = s->in_place && sim_happens(r, 700);
    int wide = (op->dtype == LC_F32 || op->dtype == LC_F64) && !op->encoding; /* exact above 256 */
    op->weighted = s->weights && wide && sim_happens(r, 500);
    op->ordered = sim_mix(op->seed ^ 1u << 20) % 1000 < s->ordered;
    op->rough = op->ordered && wide;
    op->reliable = (uint8_t)sim_happens(r, s->reliable);
    op->repair = (uint8_t)(op->reliable ? 0 : sim_below(r, s->repair + 1));
    int has_parity = s->fec && !op->reliable && sim_happens(r, 600);
    op->code = some_code(op, has_parity ? 1 + sim_below(r, 31) : 0);
    op->most = (uint8_t)(op->code && s->fec == 2 && sim_happens(r, 500) ? 1 + op->code % 64 : 0);
    op->code = op->most ? 0 : op->code;
    op->feedback = s->feedback && !op->reliable && sim_happens(r, 500);
    op->selective = s->selective && !op->reliable && sim_happens(r, 500);
    op->scale = sim_happens(r, 500) ? 1 : (double)ranks;
    op->divisor = (double)ranks;
    for (uint64_t i = 0; i < (uint64_t)ranks * ranks; i++)
        op->weights[i / ranks][i % ranks] = (double)(1 + sim_below(r, 3));
    make_levels(op, s, r);
    op->n_segments = (uint32_t)(1 + sim_below(r, s->segments));
    op->elements = 0;
    for (uint32_t i = 0; i < op->n_segments; i++)
        draw_segment(op, s, r, &op->segments[i]);
    make_tables(op, ranks, r);
}
