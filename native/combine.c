/* The sum of one packet of a slot: contributions are added as they come, and when the last source
 * of the packet has settled, it is finished and handed on. */
#include "combine.h"

#include <string.h>

#include "payload.h"

/* own: NULL where there is none, or where the slot that feeds has not given it yet. What it has
 * been divided by is own_factor. */
typedef struct {
    uint8_t *value, *acc;
    const uint8_t *own;
    uint32_t own_weight;
    uint32_t n;
    double own_factor;
} piece;

static uint32_t own_weight(const lc_op_slot *s, uint32_t k) {
    if (!s->feeder)
        return s->own != NULL;
    return lc_bit(s->fed, k) ? s->feeder->count[lc_feeding_packet(s, k)] : 0;
}

/* The sum's divisor is the weights of what went in, and the own contribution has one. */
static int divides_by_weights(const lc_op_slot *s) {
    return s->desc.finish == LC_FINISH_WEIGHTED && s->op->call.divisor == 0;
}

static piece piece_of(const lc_op_slot *s, uint32_t k) {
    const lc_op *op = s->op;
    size_t at = (size_t)k * s->level->elements_per_packet;
    size_t acc_bytes = s->acc == s->value ? op->element_bytes : op->acc_bytes;
    uint32_t weight = own_weight(s, k);
    int partial = s->feeder && lc_is_partial(s->feeder);
    double held = divides_by_weights(s) ? op->weights[op->group->config.rank] : 1.0;
    return (piece){s->value + at * op->element_bytes,
                   s->acc + at * acc_bytes,
                   weight ? s->own + at * op->element_bytes : NULL,
                   weight,
                   lc_slot_elements(s, k),
                   partial ? lc_held_divisor(&op->codec, weight) : held};
}

/* The weight of packet k with the own contribution. Honest ones fit the group, as all contributions
 * are of different ranks. */
static uint32_t whole_weight(const lc_op_slot *s, uint32_t k, piece p) {
    uint32_t weight = s->count[k] + p.own_weight, most = s->op->group->config.size;
    return weight < most ? weight : most;
}

static void count_contributions(lc_op *op, uint32_t n) {
    lc_report *r = &op->report;
    if (r->contribution_packets == 0 || n < r->contributions_min)
        r->contributions_min = n;
    r->contribution_packets++;
    r->contributions += n;
}

static void finish_partial(lc_op_slot *s, uint32_t k, piece p) {
    const lc_op *op = s->op;
    if (s->count[k] == 0) {
        if (p.own && p.own != p.value)
            memcpy(p.value, p.own, (size_t)p.n * op->element_bytes);
    } else if (s->acc != s->value) {
        double divisor = lc_held_divisor(&op->codec, whole_weight(s, k, p));
        op->codec.sums->finish(p.value, p.acc, p.n, 1.0 / divisor);
    }
    s->count[k] = (uint16_t)whole_weight(s, k, p);
}

static double weights_of(const lc_op_slot *s, uint32_t k) {
    const double *weights = s->op->weights;
    double sum = own_weight(s, k) ? weights[s->op->group->config.rank] : 0;
    for (uint32_t i = 0; i < s->desc.n_sources; i++)
        sum += lc_bit(s->ins[i].arrived, k) ? weights[s->ins[i].peer] : 0;
    return sum;
}

/* What the sum of so many contributions is multiplied by. */
static double factor_of(const lc_op_slot *s, uint32_t k, uint32_t contributions) {
    const lc_call *call = &s->op->call;
    if (divides_by_weights(s))
        return call->scale / weights_of(s, k);
    return call->scale / (s->desc.finish == LC_FINISH_WEIGHTED ? call->divisor : contributions);
}

static void finish_mean(lc_op_slot *s, uint32_t k, piece p) {
    lc_op *op = s->op;
    uint32_t arrived = s->count[k];
    uint32_t total = whole_weight(s, k, p);
    s->count[k] = (uint16_t)total;
    if (total == 0)
        return;
    double factor = factor_of(s, k, total);
    if (arrived == 0)
        op->codec.sums->blend(p.value, p.own, p.own_factor * factor, NULL, 0, p.n);
    else if (factor != 1.0 || s->acc != s->value)
        op->codec.sums->finish(p.value, p.acc, p.n, factor);
    count_contributions(op, total);
}

static uint32_t sources_arrived(const lc_op_slot *s, uint32_t k) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->desc.n_sources; i++)
        n += (uint32_t)lc_bit(s->ins[i].arrived, k);
    return n;
}

/* Sources that arrive stand for those that don't, whatever they weigh: each is as likely to. */
static void finish_stratified(lc_op_slot *s, uint32_t k, piece p) {
    lc_op *op = s->op;
    double sources = s->desc.n_sources, others = sources_arrived(s, k);
    double full = s->desc.full_weight ? s->desc.full_weight : sources + 1;
    double scale = op->call.scale;
    if (others > 0 && p.own) {
        op->codec.sums->blend(p.value, p.own, p.own_factor * scale / full, p.acc,
                              scale * sources / (full * others), p.n);
    } else if (others > 0) {
        op->codec.sums->finish(p.value, p.acc, p.n, scale * sources / (full * others));
    } else if (p.own) {
        op->codec.sums->blend(p.value, p.own, p.own_factor * scale / p.own_weight, NULL, 0, p.n);
    }
    s->count[k] = (uint16_t)whole_weight(s, k, p);
    if (s->count[k] == 0)
        return;
    op->report.alone += others == 0;
    count_contributions(op, s->count[k]);
}

void lc_finish_alone(lc_op_slot *s) {
    lc_op *op = s->op;
    double factor = divides_by_weights(s) ? op->call.scale : factor_of(s, 0, 1);
    op->codec.sums->blend(s->value, s->own, factor, NULL, 0, s->desc.length);
    for (uint32_t k = 0; k < s->n_packets; k++)
        count_contributions(op, 1);
    if (s->desc.finish == LC_FINISH_STRATIFIED)
        op->report.alone += s->n_packets;
}

/* Only counts it: what is put in its place waits until all that comes has settled, or in place for
 * the operation's end (lc_fill_missing). */
static void note_missing(lc_op_slot *s) {
    lc_op *op = s->op;
    if (s->desc.missing == LC_MISSING_OWN) {
        op->report.own_filled++;
        count_contributions(op, 1);
    } else if (s->desc.missing == LC_MISSING_ZERO) {
        op->report.zero_filled++;
    } else {
        op->report.kept++;
    }
}

static void fill_packet(const lc_op_slot *s, piece p) {
    const lc_op *op = s->op;
    if (s->desc.missing == LC_MISSING_OWN)
        op->codec.sums->blend(p.value, p.value, op->call.scale, NULL, 0, p.n);
    else
        memset(p.value, 0, (size_t)p.n * op->element_bytes);
}

static int is_filled(const lc_op_slot *s) {
    return s->desc.combine == LC_COPY && s->desc.missing != LC_MISSING_KEEP && s->desc.n_sources &&
           s->n_void;
}

int lc_lacks_fill(const lc_op *op) {
    int lacks = 0;
    for (uint32_t i = 0; i < op->n_slots; i++)
        lacks |= is_filled(&op->slots[i]);
    return lacks;
}

void lc_fill_missing(lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        if (!is_filled(s))
            continue;
        for (uint32_t k = 0; k < s->n_packets; k++)
            if (s->count[k] == 0)
                fill_packet(s, piece_of(s, k));
    }
}

static void add_own(const lc_op_slot *s, piece p) {
    s->op->codec.sums->add_weighted(p.acc, p.own, p.own_factor, p.n);
}

/* Gives its part of the feeder's result to packet k, unless the feeder has none. What comes first
 * adds it in passing (lc_combine); in the order of ranks it has a turn. */
static void feed(lc_op_slot *s, uint32_t k) {
    int has = s->feeder->count[lc_feeding_packet(s, k)] > 0;
    int turns = s->rank_order && s->rank_order->fed;
    if (has)
        lc_bit_set(s->fed, k);
    if (turns)
        lc_bit_set(s->rank_order->fed, k);
    else if (has && s->count[k] && s->desc.finish != LC_FINISH_STRATIFIED)
        add_own(s, piece_of(s, k));
    lc_source_settled(s, k);
}

/* Packet k is final: the packets of the same elements, of the slots that this one feeds, have their
 * own contribution. The recursion ends with the plan's levels. */
static void feed_others(const lc_op_slot *s, uint32_t k) {
    uint64_t begin = (uint64_t)k * s->level->elements_per_packet;
    uint64_t end = begin + lc_slot_elements(s, k);
    for (lc_op_slot *f = s->first_fed; f; f = f->next_fed) {
        uint64_t offset = f->desc.own_offset;
        uint32_t each = f->level->elements_per_packet;
        uint64_t j = begin > offset ? (begin - offset) / each : 0;
        for (; j < f->n_packets && offset + j * each < end; j++)
            feed(f, (uint32_t)j);
    }
}

static void packet_ready(lc_op_slot *s, uint32_t k) {
    piece p = piece_of(s, k);
    if (s->desc.combine == LC_COPY && s->feeder) {
        s->count[k] = (uint16_t)p.own_weight;
    } else if (s->desc.combine == LC_COPY) {
        if (s->count[k] == 0)
            note_missing(s);
        else
            count_contributions(s->op, s->count[k]);
    } else if (s->desc.finish == LC_FINISH_NONE) {
        finish_partial(s, k, p);
    } else if (s->desc.finish == LC_FINISH_STRATIFIED) {
        finish_stratified(s, k, p);
    } else {
        finish_mean(s, k, p);
    }
    if (s->count[k] && (s->desc.combine == LC_ADD || s->feeder))
        lc_payload_finish(s, k);
    if (s->count[k])
        s->ready[s->n_ready++] = k;
    else
        s->n_void++;
    if (s->encoder)
        lc_encoder_settled(s->encoder, k, s->n_ready, !s->count[k]);
    int last = s->n_ready + s->n_void == s->n_packets;
    for (uint32_t i = 0; i < s->desc.n_dests; i++) {
        lc_out_wake(&s->outs[i]);
        if (last)
            lc_out_check(&s->outs[i]);
    }
    if (last)
        s->op->slots_unsettled--;
    feed_others(s, k);
}

static void add_payload(const lc_op_slot *s, piece p, int first, const uint8_t *own,
                        const uint8_t *payload, double factor) {
    const lc_codec *c = s->in_codec;
    if (first && own && p.own_factor != 1.0) {
        c->sums->first_weighted(p.acc, NULL, own, p.own_factor, p.n);
        first = 0;
    }
    if (first && factor != 1.0)
        c->first_weighted(c, p.acc, own, payload, factor, p.n);
    else if (first)
        c->first(c, p.acc, own, payload, p.n);
    else if (factor != 1.0)
        c->add_weighted(c, p.acc, payload, factor, p.n);
    else
        c->add(c, p.acc, payload, p.n);
}

static double factor_in(const lc_op_slot *s, uint16_t peer, uint16_t count) {
    const double *weights = s->op->weights;
    return (weights ? weights[peer] : 1.0) * lc_partial_divisor(s->in_codec, count);
}

/* ---- in the order of ranks ---- */

/* The packet of the source that is next. Of two addends either may be the first, so the own one is
 * added with the one before it where it is there for certain: in place, it lies where sums run. */
static void add_next(lc_op_slot *s, const lc_header *h, const uint8_t *payload) {
    const lc_rank_order *o = s->rank_order;
    lc_addends *a = &o->addends[h->packet];
    uint16_t peer = s->ins[a->next].peer;
    piece p = piece_of(s, h->packet);
    int passing = o->own_at == a->next || (o->own_at == a->next + 1u && !o->fed);
    int with_own = !a->begun && (a->own || passing);
    add_payload(s, p, !a->begun, with_own ? p.own : NULL, payload, factor_in(s, peer, h->count));
    a->own |= (uint8_t)with_own;
    a->begun = 1;
    a->next++;
}

/* Adds what has come of packet k as far as nothing that is still to come stands before it. */
static void add_kept(lc_op_slot *s, uint32_t k) {
    lc_rank_order *o = s->rank_order;
    lc_addends *a = &o->addends[k];
    for (;;) {
        if (a->next == o->own_at && !a->own) {
            if (o->fed && !lc_bit(o->fed, k))
                return;
            piece p = piece_of(s, k);
            if (a->begun && p.own)
                add_own(s, p);
            a->own = 1;
        }
        if (a->next == s->desc.n_sources)
            return;
        const lc_in *in = &s->ins[a->next];
        if (lc_bit(in->arrived, k)) {
            lc_cell *cell = lc_order_kept(o, a->next, k);
            add_next(s, &cell->header, cell->payload);
            lc_cells_free(&o->cells, cell);
        } else if (in->state == LC_IN_SETTLED) {
            a->next++;
        } else {
            return;
        }
    }
}

static void combine_in_order(lc_op_slot *s, uint16_t peer, const lc_header *h,
                             const uint8_t *payload) {
    uint32_t source = s->in_of_peer ? s->in_of_peer[peer] : 0;
    if (lc_order_is_next(s->rank_order, source, h->packet)) {
        add_next(s, h, payload);
        return;
    }
    s->op->report.order_bytes += lc_order_keep(s->rank_order, source, h, payload);
    s->op->report.order_kept++;
}

/* ---- as they come ---- */

void lc_source_settled(lc_op_slot *s, uint32_t k) {
    if (s->rank_order)
        add_kept(s, k);
    if (!s->pending || --s->pending[k] == 0)
        packet_ready(s, k);
}

void lc_combine(lc_op_slot *s, uint16_t peer, const lc_header *h, const uint8_t *payload) {
    uint32_t k = h->packet;
    if (s->desc.combine == LC_COPY) {
        lc_payload_store(s, k, payload);
    } else if (s->rank_order) {
        combine_in_order(s, peer, h, payload);
    } else {
        piece p = piece_of(s, k);
        const uint8_t *own = s->desc.finish == LC_FINISH_STRATIFIED ? NULL : p.own;
        add_payload(s, p, s->count[k] == 0, own, payload, factor_in(s, peer, h->count));
    }
    s->count[k] = (uint16_t)(s->count[k] + h->count);
}
