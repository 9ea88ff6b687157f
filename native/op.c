#include "op.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

/* Hands out pieces of a block; with base NULL it only measures. */
typedef struct {
    uint8_t *base;
    size_t used;
} bump;

static void *take(bump *b, size_t bytes) {
    void *at = b->base ? b->base + b->used : NULL;
    b->used += (bytes + 63) & ~(size_t)63;
    return at;
}

/* ---- checks ---- */

static int range_ok(uint64_t offset, uint64_t length, uint64_t limit) {
    return offset <= limit && length <= limit - offset;
}

static int edges_ok(const lc_call *call, const lc_slot_desc *d, uint16_t rank, uint16_t size) {
    uint64_t n = (uint64_t)d->n_sources + d->n_dests;
    if (!range_ok(d->first_edge, n, call->n_edges))
        return 0;
    for (uint64_t i = 0; i < n; i++) {
        const lc_edge *e = &call->edges[d->first_edge + i];
        if (e->peer >= size || e->peer == rank)
            return 0;
    }
    return 1;
}

/* The slot before d whose result is d's own contribution, or NULL. */
static const lc_slot_desc *feeder_of(const lc_call *call, const lc_slot_desc *d) {
    for (const lc_slot_desc *f = call->slots; f < d && d->own == LC_OWN_SLOT; f++)
        if (f->number == d->feed)
            return f;
    return NULL;
}

static int feeds(const lc_call *call, const lc_slot_desc *d) {
    for (const lc_slot_desc *f = d + 1; f < call->slots + call->n_slots; f++)
        if (f->own == LC_OWN_SLOT && f->feed == d->number)
            return 1;
    return 0;
}

/* What is fed has one weight in a packet: so each packet lies in one of the feeder's. One that only
 * sends on what it is fed sends it from where that lies. */
static int fed_ok(const lc_call *call, const lc_slot_desc *d) {
    const lc_slot_desc *f = feeder_of(call, d);
    if (!f || (!f->n_sources && f->own != LC_OWN_SLOT) ||
        !range_ok(d->own_offset, d->length, f->length))
        return 0;
    uint32_t each = call->levels[d->level].elements_per_packet;
    if (call->levels[f->level].elements_per_packet % each || d->own_offset % each)
        return 0;
    if (d->combine == LC_COPY)
        return !d->n_sources && d->target == LC_TARGET_NONE && d->finish == LC_FINISH_NONE &&
               d->missing == LC_MISSING_KEEP;
    return d->target != LC_TARGET_NONE;
}

static int slot_ok(const lc_call *call, const lc_slot_desc *d) {
    uint64_t room = d->target == LC_TARGET_OUT ? call->out_elements : call->scratch_elements;
    if (d->target != LC_TARGET_NONE && !range_ok(d->offset, d->length, room))
        return 0;
    if (d->own == LC_OWN_INPUT && !range_ok(d->own_offset, d->length, call->in_elements))
        return 0;
    if (d->target > LC_TARGET_SCRATCH || d->combine > LC_ADD || d->missing > LC_MISSING_ZERO ||
        d->finish > LC_FINISH_WEIGHTED || d->own > LC_OWN_SLOT || d->number >= LC_SLOT_MESSAGE)
        return 0;
    if (d->own == LC_OWN_SLOT)
        return fed_ok(call, d);
    if (d->n_sources == 0)
        return d->own != 0;
    if (d->target == LC_TARGET_NONE)
        return 0;
    if (d->combine == LC_COPY)
        return d->n_sources == 1 && !d->own && d->finish == LC_FINISH_NONE;
    return d->finish != LC_FINISH_STRATIFIED || d->own;
}

static int needs_sums(const lc_slot_desc *d) {
    return (d->combine == LC_ADD && (d->n_sources || d->finish)) || d->missing == LC_MISSING_OWN;
}

static uint64_t packets_of(const lc_call *call, const lc_slot_desc *d) {
    uint32_t each = call->levels[d->level].elements_per_packet;
    return (d->length + each - 1) / each;
}

/* A copy that comes from a peer, on a level where single packets can be needed. */
static int can_be_needed(const lc_call *call, const lc_slot_desc *d) {
    return d->combine == LC_COPY && d->n_sources == 1 && call->levels[d->level].selective;
}

/* Whether a sum can be divided by the weights that went in: who they are of has to be known. */
static int weights_known(const lc_call *call, const lc_slot_desc *d, uint16_t rank) {
    if (!call->weights || (d->combine == LC_ADD && d->finish != LC_FINISH_WEIGHTED) ||
        d->own == LC_OWN_SLOT)
        return 0;
    int good = d->own == LC_OWN_NONE || call->weights[rank] > 0;
    for (uint32_t i = 0; i < d->n_sources && d->combine == LC_ADD; i++)
        good &= call->weights[call->edges[d->first_edge + i].peer] > 0;
    return good;
}

static int weights_ok(const lc_call *call, uint16_t rank, uint16_t size) {
    for (uint16_t i = 0; call->weights && i < size; i++)
        if (!(call->weights[i] >= 0 && call->weights[i] <= DBL_MAX))
            return 0;
    int weighted = 0, known = 1;
    for (uint32_t i = 0; i < call->n_slots; i++) {
        weighted |= call->slots[i].finish == LC_FINISH_WEIGHTED;
        known &= weights_known(call, &call->slots[i], rank);
    }
    return !weighted || call->divisor >= 1 || (call->divisor == 0 && known);
}

static int needed_ok(const lc_call *call) {
    uint64_t packets = 0;
    for (uint32_t i = 0; i < call->n_slots; i++)
        packets += can_be_needed(call, &call->slots[i]) ? packets_of(call, &call->slots[i]) : 0;
    return !call->needed || call->n_needed == packets;
}

static int level_ok(const lc_level *level) {
    int rounds = level->choose & LC_CHOOSE_ROUNDS;
    if (!level->elements_per_packet || level->choose & ~(LC_CHOOSE_PARITY | LC_CHOOSE_ROUNDS) ||
        !(level->max_missing <= 1) || (rounds && (level->reliable || level->repair)))
        return 0;
    if (level->choose & LC_CHOOSE_PARITY)
        return !level->code && level->most >= 1 && level->most <= LC_PARITY_SHARE;
    return lc_code_valid(level->code) && lc_code_m(level->code) <= lc_code_k(level->code);
}

/* Elements that go through packets of several sizes are encoded again for each: it has to be by the
 * same groups. */
static int groups_ok(const lc_codec *codec, const lc_call *call) {
    unsigned levels = 0, cut = 0;
    for (uint32_t i = 0; i < call->n_slots && codec->low.group; i++) {
        uint8_t level = call->slots[i].level;
        if (call->levels[level].plain)
            continue;
        levels |= 1u << level;
        cut |= call->levels[level].elements_per_packet % codec->low.group;
    }
    return !cut || !(levels & (levels - 1));
}

/* Whether the phases have encodings of their own. */
static int encodes_apart(const lc_call *call) {
    return call->gather_encoding && call->gather_encoding != call->encoding;
}

int lc_codecs_make(const lc_call *call, int simd, lc_codec *codec, lc_codec *gather) {
    if (!lc_codec_make(codec, call->encoding, call->dtype, simd))
        return 0;
    if (!encodes_apart(call)) {
        *gather = *codec;
        return 1;
    }
    return lc_codec_make(gather, call->gather_encoding, call->dtype, simd) &&
           codec->same == gather->same;
}

static int call_ok(const lc_call *call, uint16_t rank, uint16_t size) {
    lc_codec codec, gather;
    if (!lc_codecs_make(call, 0, &codec, &gather) || !level_ok(&call->levels[0]) ||
        call->n_slots >= 0xFFFF)
        return 0;
    for (uint32_t i = 0; i < call->n_slots; i++) {
        const lc_slot_desc *d = &call->slots[i];
        if (d->level >= LC_LEVELS || !level_ok(&call->levels[d->level]))
            return 0;
        if (!edges_ok(call, d, rank, size) || !slot_ok(call, d))
            return 0;
        if (needs_sums(d) && !codec.sums)
            return 0;
        if (packets_of(call, d) > 0x3FFFFFFF) /* parity packets are numbered beyond them */
            return 0;
    }
    return groups_ok(&codec, call) && groups_ok(&gather, call) && weights_ok(call, rank, size) &&
           needed_ok(call);
}

/* ---- layout ---- */

static int overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    const uint8_t *x = a, *y = b;
    return x < y + b_bytes && y < x + a_bytes;
}

/* Whether the order of a sum could be that of arrival. Two addends are told apart by NaNs alone. */
static int is_ordered(const lc_call *call, const lc_slot_desc *d) {
    int fed = d->own == LC_OWN_SLOT && d->finish != LC_FINISH_STRATIFIED;
    return call->deterministic && d->combine == LC_ADD && d->n_sources + (uint32_t)fed > 1;
}

/* How many sources stand before the own contribution. One that is a stratum of its own is not among
 * the addends. */
static uint32_t own_place(const lc_call *call, const lc_slot_desc *d, uint16_t rank) {
    if (d->own == LC_OWN_NONE || d->finish == LC_FINISH_STRATIFIED)
        return LC_NO_TURN;
    uint32_t before = 0;
    for (uint32_t i = 0; i < d->n_sources; i++)
        before += call->edges[d->first_edge + i].peer < rank;
    return before;
}

/* A sum can run in the result itself unless the accumulator's type is wider; or, where the input
 * may lie in the same memory, the own addend is kept apart, or the slot that feeds has yet to read
 * its own when packets of other sources come, or the own addend's turn is behind two of them. */
static int needs_acc(const lc_op *op, const lc_call *call, const lc_slot_desc *d) {
    if (d->combine != LC_ADD || d->n_sources == 0)
        return 0;
    if (op->acc_bytes != op->element_bytes)
        return 1;
    if (is_ordered(call, d) && op->in_place && own_place(call, d, op->rank) > 1)
        return 1;
    return (d->finish == LC_FINISH_STRATIFIED || d->own == LC_OWN_SLOT) && op->in_place;
}

/* What each packet waits for: its sources, and the slot that feeds it. */
static uint32_t waits_for(const lc_slot_desc *d) {
    return d->n_sources + (d->own == LC_OWN_SLOT);
}

/* Whether what the slot sends is finished: a mean, or what has come of one. */
static int sends_results(const lc_call *call, const lc_slot_desc *d) {
    while (d->combine == LC_COPY && d->own == LC_OWN_SLOT)
        d = feeder_of(call, d);
    return d->combine == LC_ADD ? d->finish != LC_FINISH_NONE : d->n_sources > 0;
}

static void describe(lc_op *op, lc_op_slot *s, const lc_slot_desc *d) {
    const lc_call *call = &op->call;
    int apart = encodes_apart(call);
    s->op = op;
    s->desc = *d;
    s->level = &call->levels[d->level];
    s->n_packets = (uint32_t)packets_of(call, d);
    s->in_codec = s->level->plain                  ? &op->plain
                  : apart && d->combine == LC_COPY ? &op->gather
                                                   : &op->codec;
    s->out_codec = s->level->plain                   ? &op->plain
                   : apart && sends_results(call, d) ? &op->gather
                                                     : &op->codec;
    uint32_t n = s->level->elements_per_packet;
    s->in_bytes = (uint32_t)s->in_codec->wire_bytes(s->in_codec, n);
    s->packet_bytes = (uint32_t)s->out_codec->wire_bytes(s->out_codec, n);
}

/* All but the rows, which need not be zero: of what is laid out for the worst loss, memory that
 * isn't used shall not be touched. */
static lc_decoder *place_decoder(bump *b, const lc_op_slot *s) {
    uint32_t room = lc_parity_room(s->level, s->n_packets);
    if (!room)
        return NULL;
    lc_decoder *d = take(b, sizeof *d);
    uint16_t *counts = take(b, room * sizeof *counts);
    uint16_t *left = take(b, room * sizeof *left);
    uint8_t *n_rows = take(b, room * sizeof *n_rows);
    uint64_t *came = take(b, lc_words(room) * sizeof *came);
    uint64_t *begun = take(b, lc_words(lc_parity_windows(s->n_packets)) * sizeof *begun);
    if (b->base)
        *d = (lc_decoder){
            .counts = counts, .left = left, .n_rows = n_rows, .came = came, .begun = begun};
    return d;
}

static lc_encoder *place_encoder(bump *b, const lc_op_slot *s) {
    uint32_t room = lc_parity_room(s->level, s->n_packets);
    if (!room || !s->desc.n_dests)
        return NULL;
    uint32_t windows = lc_parity_windows(s->n_packets);
    uint32_t in_order = waits_for(&s->desc) ? windows : 0;
    lc_encoder *e = take(b, sizeof *e);
    uint16_t *counts = take(b, room * sizeof *counts);
    uint64_t *begun = take(b, lc_words(windows) * sizeof *begun);
    uint64_t *sends = take(b, lc_words(windows) * sizeof *sends);
    uint32_t *open = take(b, 3 * in_order * sizeof *open);
    if (!b->base)
        return e;
    *e = (lc_encoder){.counts = counts, .begun = begun, .sends = sends};
    if (in_order) {
        e->open = open;
        e->due = open + windows;
        e->due_at = e->due + windows;
    }
    lc_encoder_prepare(e, s->n_packets);
    return e;
}

/* All but the cells and what names them, which need not be zero. */
static lc_rank_order *place_order(bump *b, const lc_op_slot *s, const lc_call *call,
                                  uint16_t rank) {
    if (!is_ordered(call, &s->desc))
        return NULL;
    lc_rank_order *o = take(b, sizeof *o);
    lc_addends *addends = take(b, s->n_packets * sizeof *addends);
    int fed = s->desc.own == LC_OWN_SLOT && s->desc.finish != LC_FINISH_STRATIFIED;
    uint64_t *bits = take(b, fed ? lc_words(s->n_packets) * 8 : 0);
    if (b->base)
        *o = (lc_rank_order){.addends = addends,
                             .fed = fed ? bits : NULL,
                             .own_at = own_place(call, &s->desc, rank),
                             .n_packets = s->n_packets};
    return o;
}

/* Cells for all packets but one that may come before their turn: what waits for the slot that feeds
 * is all of them. Memory that isn't used is never touched. */
static void place_cells(bump *b, const lc_op_slot *s, const lc_call *call) {
    if (!is_ordered(call, &s->desc))
        return;
    int fed = s->desc.own == LC_OWN_SLOT && s->desc.finish != LC_FINISH_STRATIFIED;
    size_t most = (size_t)s->n_packets * (s->desc.n_sources - !fed);
    lc_cell **kept = take(b, (size_t)s->n_packets * s->desc.n_sources * sizeof *kept);
    uint32_t bytes = (uint32_t)s->in_codec->wire_bytes(s->in_codec, lc_slot_elements(s, 0));
    uint8_t *cells = take(b, most * lc_cell_bytes(bytes));
    if (!b->base)
        return;
    s->rank_order->kept = kept;
    s->rank_order->cells = lc_cells_of(cells, (uint32_t)most, bytes);
}

/* Last in the block, and so beyond what an operation without loss ever reads or writes. */
static void place_rows(lc_op *op, const lc_call *call, bump *b) {
    lc_op_slot measured;
    for (uint32_t i = 0; i < call->n_slots; i++) {
        lc_op_slot *s = b->base ? &op->slots[i] : &measured;
        describe(op, s, &call->slots[i]);
        place_cells(b, s, call);
        size_t room = lc_parity_room(s->level, s->n_packets);
        for (uint32_t j = 0; j < s->desc.n_sources && room; j++) {
            uint8_t *rows = take(b, room * s->in_bytes);
            if (!b->base)
                continue;
            s->ins[j].decoder->rows = rows;
            s->ins[j].decoder->keeps =
                s->desc.combine == LC_COPY && (s->in_codec->same || s->encoded != NULL);
        }
        if (!s->desc.n_dests || !room)
            continue;
        uint8_t *rows = take(b, room * s->packet_bytes);
        if (b->base)
            s->encoder->rows = rows;
    }
}

static void place_streams(lc_op *op, lc_op_slot *s, bump *b, int inject) {
    uint32_t words = lc_words(s->n_packets);
    uint32_t parity = lc_parity_room(s->level, s->n_packets);
    int repairs = lc_resends(s->level, s->level->repair || s->level->choose & LC_CHOOSE_ROUNDS);
    int needs = op->call.needed && can_be_needed(&op->call, &s->desc);
    s->fed = take(b, s->desc.own == LC_OWN_SLOT ? words * 8 : 0);
    if (s->desc.own != LC_OWN_SLOT)
        s->fed = NULL;
    for (uint32_t i = 0; i < s->desc.n_sources; i++) {
        uint64_t *arrived = take(b, words * 8);
        uint64_t *lost = inject ? take(b, lc_words(s->n_packets + parity) * 8) : NULL;
        uint64_t *needed = needs ? take(b, words * 8) : NULL;
        lc_decoder *decoder = place_decoder(b, s);
        if (b->base) {
            s->ins[i].decoder = decoder;
            s->ins[i].arrived = arrived;
            s->ins[i].lost = lost;
            s->ins[i].needed = needed;
        }
    }
    for (uint32_t i = 0; i < s->desc.n_dests; i++) {
        uint64_t *again = repairs ? take(b, words * 8) : NULL;
        uint64_t *told = repairs ? take(b, words * 8) : NULL;
        if (b->base) {
            s->outs[i].again = again;
            s->outs[i].told = told;
        }
    }
    s->encoder = place_encoder(b, s);
}

/* What is sent, and what is kept and fed to others: replicas have to get the same of both. */
static int is_encoded(const lc_op_slot *s, const lc_call *call, const lc_slot_desc *d) {
    return !s->out_codec->same && (d->n_dests || (d->target == LC_TARGET_OUT && feeds(call, d)));
}

/* Where the own contribution lies. The slot that feeds has been placed before. */
static const uint8_t *own_of(lc_op_slot *s, const lc_call *call) {
    size_t at = s->desc.own_offset * s->op->element_bytes;
    const lc_slot_desc *feeder = feeder_of(call, call->slots + (s - s->op->slots));
    if (s->desc.own == LC_OWN_INPUT)
        return (const uint8_t *)call->in + at;
    if (!feeder)
        return NULL;
    s->feeder = &s->op->slots[feeder - call->slots];
    s->next_fed = s->feeder->first_fed;
    s->feeder->first_fed = s;
    return s->feeder->value + at;
}

/* What a rank would have to copy of what it sends; 0: it doesn't, since it sends nothing, or is to
 * hear what its peers give up, or it is too much. */
static uint32_t copy_bytes_of(const lc_call *call, uint32_t element_bytes) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; call->lingers && i < call->n_slots; i++) {
        const lc_slot_desc *d = &call->slots[i];
        if (call->levels[d->level].feedback)
            return 0;
        if (d->n_dests && d->length <= LC_LINGER_BYTES)
            bytes += lc_copy_bytes(d->length * element_bytes);
        else if (d->n_dests)
            return 0;
    }
    return bytes <= LC_LINGER_BYTES ? (uint32_t)bytes : 0;
}

/* Runs twice: to measure, and to place. Zeroed memory first, then what is written before it is
 * read; returns where the second part begins. */
static size_t place(lc_op *op, const lc_call *call, uint16_t size, int inject, bump *b) {
    op->slots = take(b, call->n_slots * sizeof(lc_op_slot));
    op->peers = take(b, size * sizeof(lc_op_peer));
    lc_op_slot measured;
    for (uint32_t i = 0; i < call->n_slots; i++) {
        lc_op_slot *s = b->base ? &op->slots[i] : &measured;
        describe(op, s, &call->slots[i]);
        s->ins = take(b, s->desc.n_sources * sizeof(lc_in));
        s->outs = take(b, s->desc.n_dests * sizeof(lc_out));
        s->count = take(b, s->n_packets * sizeof(uint16_t));
        place_streams(op, s, b, inject);
        s->rank_order = place_order(b, s, call, op->rank);
    }
    size_t zeroed = b->used;
    op->slot_of_number = take(b, op->n_numbers * sizeof(uint16_t));
    op->weights = call->weights ? take(b, size * sizeof(double)) : NULL;
    uint8_t *scratch = take(b, call->scratch_elements * op->element_bytes);
    op->copy = take(b, op->copy_bytes);
    for (uint32_t i = 0; i < call->n_slots; i++) {
        lc_op_slot *s = b->base ? &op->slots[i] : &measured;
        describe(op, s, &call->slots[i]);
        uint32_t sources = s->desc.n_sources, waits = waits_for(&s->desc);
        s->in_of_peer = take(b, sources > 1 ? size * sizeof(uint16_t) : 0);
        s->pending = take(b, waits > 1 ? s->n_packets * sizeof(uint16_t) : 0);
        s->ready = take(b, waits ? s->n_packets * sizeof(uint32_t) : 0);
        size_t acc = needs_acc(op, call, &s->desc) ? s->desc.length * op->acc_bytes : 0;
        s->acc = take(b, acc);
        size_t encoded = is_encoded(s, call, &call->slots[i]) ? s->n_packets : 0;
        s->encoded = take(b, encoded * s->packet_bytes);
        if (!b->base)
            continue;
        if (sources < 2)
            s->in_of_peer = NULL;
        if (waits < 2)
            s->pending = NULL;
        if (!waits)
            s->ready = NULL;
        size_t e = op->element_bytes;
        s->own = own_of(s, call);
        s->value = s->desc.target == LC_TARGET_OUT       ? (uint8_t *)call->out + s->desc.offset * e
                   : s->desc.target == LC_TARGET_SCRATCH ? scratch + s->desc.offset * e
                                                         : (uint8_t *)(uintptr_t)s->own;
        int from_input = !waits && s->desc.finish == LC_FINISH_NONE && !op->in_place;
        s->sent = from_input ? s->own : s->value;
        if (!acc)
            s->acc = s->value;
        if (!encoded)
            s->encoded = NULL;
    }
    place_rows(op, call, b);
    return zeroed;
}

/* By rank; one that is there twice leaves the others out of their places. */
static void sort_sources(lc_op_slot *s, uint16_t size) {
    uint16_t n = 0;
    for (uint16_t peer = 0; s->in_of_peer && peer < size; peer++)
        if (s->in_of_peer[peer] != 0xFFFF) {
            s->in_of_peer[peer] = n;
            s->ins[n++].peer = peer;
        }
}

static void init_slot(lc_op *op, lc_op_slot *s, uint16_t size) {
    const lc_edge *edge = op->call.edges + s->desc.first_edge;
    if (s->in_of_peer)
        memset(s->in_of_peer, 0xFF, size * sizeof(uint16_t));
    for (uint32_t i = 0; i < s->desc.n_sources; i++, edge++) {
        s->ins[i].slot = s;
        s->ins[i].peer = edge->peer;
        s->ins[i].rounds = s->level->repair;
        op->peers[edge->peer].source = 1;
        if (s->in_of_peer)
            s->in_of_peer[edge->peer] = (uint16_t)i;
    }
    if (s->rank_order)
        sort_sources(s, size);
    for (uint32_t i = 0; i < s->desc.n_dests; i++, edge++) {
        s->outs[i].slot = s;
        s->outs[i].peer = edge->peer;
        s->outs[i].number = edge->slot;
        s->outs[i].rounds = s->level->repair;
        op->peers[edge->peer].dest = 1;
        op->peers[edge->peer].at_once |= !waits_for(&s->desc);
    }
    if (s->pending)
        for (uint32_t k = 0; k < s->n_packets; k++)
            s->pending[k] = (uint16_t)waits_for(&s->desc);
    s->at_once = !waits_for(&s->desc);
    if (s->at_once)
        s->n_ready = s->n_packets;
    else if (s->n_packets)
        op->slots_unsettled++;
    op->outs_open += s->desc.n_dests;
}

static void copy_needed(lc_op *op) {
    const uint8_t *needed = op->call.needed;
    for (uint32_t i = 0; i < op->n_slots && needed; i++) {
        lc_op_slot *s = &op->slots[i];
        if (!can_be_needed(&op->call, &s->desc))
            continue;
        for (uint32_t k = 0; k < s->n_packets; k++)
            if (*needed++)
                lc_bit_set(s->ins[0].needed, k);
    }
}

static int number_slots(lc_op *op) {
    memset(op->slot_of_number, 0xFF, op->n_numbers * sizeof(uint16_t));
    for (uint32_t i = 0; i < op->n_slots; i++) {
        uint16_t number = op->slots[i].desc.number;
        if (op->slot_of_number[number] != 0xFFFF)
            return 0;
        op->slot_of_number[number] = (uint16_t)i;
    }
    return 1;
}

/* A plan whose slots have the same peer twice as a source would let one stream settle twice. */
static int sources_distinct(const lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; s->in_of_peer && j < s->desc.n_sources; j++)
            if (s->in_of_peer[s->ins[j].peer] != j)
                return 0;
    }
    return 1;
}

lc_op *lc_op_build(const lc_call *call, uint16_t rank, uint16_t size, int simd, int inject,
                   lc_pool *pool, pthread_mutex_t *pool_lock, int *code) {
    *code = LC_E_ARGUMENT;
    if (!call_ok(call, rank, size))
        return NULL;
    lc_op *op = calloc(1, sizeof *op);
    *code = LC_E_MEMORY;
    if (!op)
        return NULL;
    op->call = *call;
    op->rank = rank;
    (void)lc_codecs_make(call, simd, &op->codec, &op->gather);
    (void)lc_codec_make(&op->plain, LC_ENCODING_SAME, call->dtype, simd);
    op->gf = lc_gf_of(simd);
    op->element_bytes = op->codec.element_bytes;
    op->acc_bytes = op->codec.acc_bytes;
    op->n_slots = call->n_slots;
    op->in_place = overlap(call->in, call->in_elements * op->element_bytes, call->out,
                           call->out_elements * op->element_bytes);
    op->is_large = call->out_elements * op->element_bytes >= LC_LARGE_BYTES;
    for (int i = 0; i < LC_LEVELS; i++)
        op->may_lose |= call->levels[i].elements_per_packet && !call->levels[i].reliable;
    for (uint32_t i = 0; i < call->n_slots; i++)
        if (call->slots[i].number >= op->n_numbers)
            op->n_numbers = call->slots[i].number + 1u;
    op->copy_bytes = copy_bytes_of(call, op->element_bytes);
    bump measure = {NULL, 0};
    size_t zeroed = place(op, call, size, inject, &measure);
    op->block = lc_pool_take(pool, pool_lock, measure.used + 64, &op->block_bytes);
    if (!op->block) {
        free(op);
        return NULL;
    }
    bump put = {(uint8_t *)op->block, 0};
    memset(op->block, 0, zeroed);
    place(op, call, size, inject, &put);
    int good = number_slots(op);
    for (uint32_t i = 0; i < op->n_slots && good; i++)
        init_slot(op, &op->slots[i], size);
    if (!good || !sources_distinct(op)) {
        *code = LC_E_ARGUMENT;
        lc_op_free(op, pool, pool_lock);
        return NULL;
    }
    copy_needed(op);
    if (op->weights)
        memcpy(op->weights, call->weights, size * sizeof(double));
    op->call.slots = NULL;
    op->call.edges = NULL;
    op->call.needed = NULL;
    op->call.weights = NULL;
    *code = LC_OK;
    return op;
}

void lc_op_free(lc_op *op, lc_pool *pool, pthread_mutex_t *pool_lock) {
    lc_pool_give(pool, pool_lock, op->block, op->block_bytes);
    free(op->letter);
    free(op);
}

/* ---- look-up ---- */

static lc_op_slot *slot_of(lc_op *op, uint16_t number) {
    if (op->letter)
        return op->n_slots && number == LC_SLOT_MESSAGE ? &op->slots[0] : NULL;
    if (number >= op->n_numbers || op->slot_of_number[number] == 0xFFFF)
        return NULL;
    return &op->slots[op->slot_of_number[number]];
}

lc_in *lc_op_in(lc_op *op, uint16_t number, uint16_t peer) {
    lc_op_slot *s = slot_of(op, number);
    if (!s || !s->desc.n_sources)
        return NULL;
    if (!s->in_of_peer)
        return s->ins[0].peer == peer ? &s->ins[0] : NULL;
    uint16_t i = s->in_of_peer[peer];
    return i == 0xFFFF ? NULL : &s->ins[i];
}

lc_out *lc_op_out(lc_op *op, uint16_t number, uint16_t peer) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].peer == peer && s->outs[j].number == number)
                return &s->outs[j];
    }
    return NULL;
}
