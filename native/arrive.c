/* What arrives: a data packet is checked against its stream, combined into its slot, and when the
 * last source of that packet has settled, the packet is finished and handed on. */
#include "engine.h"

#include <string.h>

static const uint64_t LATE_MAX_NS = 100000000;

/* ---- one packet of one slot ---- */

typedef struct {
    uint8_t *value, *acc;
    const uint8_t *own;
    uint32_t n;
} piece;

static piece piece_of(const lc_op_slot *s, uint32_t k) {
    const lc_op *op = s->op;
    size_t at = (size_t)k * op->call.elements_per_packet;
    size_t acc_bytes = s->acc == s->value ? op->element_bytes : op->acc_bytes;
    return (piece){s->value + at * op->element_bytes, s->acc + at * acc_bytes,
                   s->own ? s->own + at * op->element_bytes : NULL, lc_slot_elements(s, k)};
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
        op->kernels->finish(p.value, p.acc, p.n, 1.0);
    }
    s->count[k] = (uint16_t)(s->count[k] + (p.own != NULL));
}

/* What the sum of so many contributions is multiplied by. */
static double factor_of(const lc_op_slot *s, uint32_t contributions) {
    const lc_call *call = &s->op->call;
    return call->scale / (s->desc.finish == LC_FINISH_WEIGHTED ? call->divisor : contributions);
}

static void finish_mean(lc_op_slot *s, uint32_t k, piece p) {
    lc_op *op = s->op;
    uint32_t arrived = s->count[k];
    uint32_t total = arrived + (p.own != NULL);
    s->count[k] = (uint16_t)total;
    if (total == 0)
        return;
    double factor = factor_of(s, total);
    if (arrived == 0)
        op->kernels->blend(p.value, p.own, factor, NULL, 0, p.n);
    else if (factor != 1.0 || s->acc != s->value)
        op->kernels->finish(p.value, p.acc, p.n, factor);
    count_contributions(op, total);
}

static void finish_stratified(lc_op_slot *s, uint32_t k, piece p) {
    lc_op *op = s->op;
    double others = s->count[k];
    double world = s->desc.n_sources + 1.0;
    double scale = op->call.scale;
    if (others > 0) {
        op->kernels->blend(p.value, p.own, scale / world, p.acc,
                           scale * (world - 1) / (world * others), p.n);
    } else {
        op->kernels->blend(p.value, p.own, scale, NULL, 0, p.n);
        op->report.alone++;
    }
    s->count[k] = (uint16_t)(s->count[k] + 1);
    count_contributions(op, s->count[k]);
}

void lc_finish_alone(lc_op_slot *s) {
    lc_op *op = s->op;
    op->kernels->blend(s->value, s->own, factor_of(s, 1), NULL, 0, s->desc.length);
    for (uint32_t k = 0; k < s->n_packets; k++)
        count_contributions(op, 1);
    if (s->desc.finish == LC_FINISH_STRATIFIED)
        op->report.alone += s->n_packets;
}

static void fill_missing(lc_op_slot *s, piece p) {
    lc_op *op = s->op;
    if (s->desc.missing == LC_MISSING_OWN) {
        op->kernels->blend(p.value, p.value, op->call.scale, NULL, 0, p.n);
        op->report.own_filled++;
        count_contributions(op, 1);
    } else if (s->desc.missing == LC_MISSING_ZERO) {
        memset(p.value, 0, (size_t)p.n * op->element_bytes);
        op->report.zero_filled++;
    } else {
        op->report.kept++;
    }
}

static void packet_ready(lc_engine *e, lc_op_slot *s, uint32_t k) {
    piece p = piece_of(s, k);
    if (s->desc.combine == LC_COPY) {
        if (s->count[k] == 0)
            fill_missing(s, p);
        else
            count_contributions(s->op, s->count[k]);
    } else if (s->desc.finish == LC_FINISH_NONE) {
        finish_partial(s, k, p);
    } else if (s->desc.finish == LC_FINISH_STRATIFIED) {
        finish_stratified(s, k, p);
    } else {
        finish_mean(s, k, p);
    }
    if (s->count[k])
        s->ready[s->n_ready++] = k;
    else
        s->n_void++;
    int last = s->n_ready + s->n_void == s->n_packets;
    for (uint32_t i = 0; i < s->desc.n_dests; i++) {
        lc_out_wake(e, &s->outs[i]);
        if (last)
            lc_out_check(e, &s->outs[i]);
    }
    if (last)
        s->op->slots_unsettled--;
}

/* One more source of packet k has settled. */
static void source_settled(lc_engine *e, lc_op_slot *s, uint32_t k) {
    if (!s->pending || --s->pending[k] == 0)
        packet_ready(e, s, k);
}

static void combine(lc_op_slot *s, uint32_t k, const lc_header *h, const uint8_t *payload) {
    const lc_op *op = s->op;
    piece p = piece_of(s, k);
    const uint8_t *own = s->desc.finish == LC_FINISH_STRATIFIED ? NULL : p.own;
    if (s->desc.combine == LC_COPY)
        memcpy(p.value, payload, h->length);
    else if (op->weights && s->count[k])
        op->kernels->add_weighted(p.acc, payload, op->weights[h->sender], p.n);
    else if (op->weights)
        op->kernels->first_weighted(p.acc, own, payload, op->weights[h->sender], p.n);
    else if (s->count[k])
        op->kernels->add(p.acc, payload, p.n);
    else
        op->kernels->first(p.acc, own, payload, p.n);
    s->count[k] = (uint16_t)(s->count[k] + h->count);
}

/* ---- streams ---- */

static void settle(lc_engine *e, lc_in *in, int cause) {
    lc_op_slot *s = in->slot;
    lc_op *op = s->op;
    uint32_t missing = s->n_packets - in->n_arrived;
    in->state = LC_IN_SETTLED;
    in->settled_ns = e->now;
    in->cause = (uint8_t)cause;
    op->report.packets_missing += missing;
    e->peers[in->peer].packets_missing += missing;
    /* Copies may have been repaired by other rules than the sums that rates are for. */
    if (!op->call.reliable && s->desc.combine == LC_ADD && cause != LC_CAUSE_PEER) {
        e->peers[in->peer].offered += s->n_packets;
        e->peers[in->peer].delivered += in->n_arrived;
    }
    if (missing && op->report.cause < cause)
        op->report.cause = cause;
    lc_peer *peer = &e->peers[in->peer];
    peer->late_ns -= peer->late_ns / 64;
    peer->settled++;
    peer->last_op = op->number;
    peer->last_slot = s->desc.number;
    peer->last_fin_ns = missing ? in->fin_ns : 0;
    /* A pause of either rank says nothing of the path. */
    int paused = peer->back_ns > in->started_ns || e->awake_ns > in->started_ns;
    if (in->n_arrived > 1 && !paused)
        lc_deadline_add(&peer->deadline, in->last_ns - in->started_ns, in->gap_ns, in->n_arrived);
}

static void tell_done(lc_engine *e, const lc_in *in) {
    const lc_op_slot *s = in->slot;
    lc_record done = {.kind = LC_R_DONE,
                      .op = s->op->number,
                      .slot = s->desc.number,
                      .round = in->round,
                      .a = s->n_packets - in->n_arrived};
    lc_tell(e, in->peer, &done);
}

/* Settles what has not arrived as missing. */
void lc_give_up(lc_engine *e, lc_in *in, int cause) {
    lc_op_slot *s = in->slot;
    if (cause == LC_CAUSE_DEADLINE)
        s->op->report.deadline_hits++;
    settle(e, in, cause);
    int tells = s->op->call.feedback && !s->op->call.reliable && cause != LC_CAUSE_PEER;
    if (tells) {
        in->telling = 1;
        s->op->telling++;
    }
    for (uint32_t k = 0; k < s->n_packets; k++)
        if (!lc_bit(in->arrived, k))
            source_settled(e, s, k);
    if (tells) {
        in->round = lc_next_round(in->round);
        in->nack_ns = e->now + lc_pace_rto(&e->peers[in->peer].pace);
        lc_tell_missing(e, in);
        return;
    }
    tell_done(e, in);
}

void lc_told(lc_engine *e, lc_in *in) {
    if (!in->telling)
        return;
    in->telling = 0;
    in->slot->op->telling--;
    lc_op_check(e, in->slot->op);
}

void lc_inject_round(lc_engine *e, lc_in *in) {
    if (!in->lost)
        return;
    const lc_op_slot *s = in->slot;
    lc_inject link = lc_inject_link(&e->config.inject, e->peers[in->peer].inject_loss);
    in->inject_key = lc_inject_key(&link, e->config.group, s->op->number, s->desc.number, in->peer,
                                   e->config.rank, in->round);
    /* What is lost of the others doesn't depend on how much parity there is. */
    uint32_t parity = in->parity && !in->round ? in->parity->most : 0;
    (void)lc_inject_losses(&link, in->inject_key, s->n_packets + parity, in->lost);
}

/* What the peer has sent in the round that ends, if nothing of it came. */
static void note_barren(lc_engine *e, lc_in *in) {
    lc_peer *peer = &e->peers[in->peer];
    if (in->n_told && !in->came) {
        if (!peer->barren_rounds++)
            peer->barren_ns = e->now;
        peer->barren_packets += in->n_told;
    }
    in->n_told = 0;
    in->came = 0;
}

/* The reorder allowance is over: ask for what is missing, or give it up. */
void lc_round_ended(lc_engine *e, lc_in *in) {
    const lc_op *op = in->slot->op;
    note_barren(e, in);
    if (!op->call.reliable && in->round >= op->call.repair) {
        int lacks = lc_in_lacks(in);
        if (!lacks || lc_overdue(e, in)) {
            lc_give_up(e, in, lacks ? LC_CAUSE_DEADLINE : LC_CAUSE_LOSS);
            return;
        }
    }
    in->round = lc_next_round(in->round);
    in->state = LC_IN_OPEN;
    in->nack_ns = e->now + lc_pace_rto(&e->peers[in->peer].pace);
    lc_inject_round(e, in);
    lc_tell_missing(e, in);
}

/* A packet that came after the end of its stream was said. One that a link held for longer than
 * reordering takes would make every stream with a loss wait for its like. */
static void note_late(lc_engine *e, lc_peer *peer, uint64_t fin_ns) {
    uint64_t late = e->now - fin_ns;
    if (fin_ns && late > peer->late_ns && late <= LATE_MAX_NS + peer->pace.path.rtt_ns)
        peer->late_ns = late;
}

static void note_arrival(lc_engine *e, lc_in *in) {
    if (!in->started_ns)
        in->started_ns = e->now;
    else if (e->now - in->last_ns > in->gap_ns)
        in->gap_ns = e->now - in->last_ns;
    in->last_ns = e->now;
    in->ask_ns = 0;
    if (in->state == LC_IN_CLOSING)
        note_late(e, &e->peers[in->peer], in->fin_ns);
}

/* The peer has sent what comes before `next`. Returns whether that is news. */
int lc_link_seen(lc_peer *peer, uint32_t next) {
    if ((int32_t)(next - peer->rx_next) <= 0)
        return 0;
    peer->rx_next = next;
    return 1;
}

static void note_link(lc_engine *e, lc_peer *peer, const lc_header *h) {
    peer->rx_taken++;
    peer->barren_rounds = 0;
    peer->barren_packets = 0;
    if (lc_link_seen(peer, h->link_seq + 1)) {
        peer->rx_echo_us = h->time_us; /* of an old packet it would tell how old that is */
        peer->rx_echo_ns = e->came_ns;
    }
    uint32_t untold = peer->rx_next - peer->rx_reported;
    uint32_t most = (e->window + 3) / 4;
    if (untold >= (most < LC_ACK_PACKETS ? most : LC_ACK_PACKETS) ||
        (untold >= LC_ACK_PACKETS / 8 && e->now - peer->rx_ack_ns >= LC_ACK_NS))
        peer->ack_due = 1;
}

/* Whether the packet says of its stream's parity what it may. Later rounds say nothing. */
static int agrees(const lc_in *in, const lc_header *h) {
    const lc_call *call = &in->slot->op->call;
    if (!in->parity)
        return !h->fec;
    if (h->round)
        return 1;
    return (call->fec_auto || h->fec == call->fec) &&
           lc_parity_fits(in->parity, h->fec, in->slot->n_packets);
}

/* Whether the packet can be of this stream. */
static int belongs(const lc_in *in, const lc_header *h) {
    const lc_op_slot *s = in->slot;
    uint32_t k = h->packet;
    if (h->format != s->op->call.dtype || !agrees(in, h))
        return 0;
    if (h->type == LC_PARITY) {
        if (k < s->n_packets || k - s->n_packets >= lc_fec_parity(h->fec, s->n_packets))
            return 0;
        k -= s->n_packets;
    }
    return k < s->n_packets && h->length == (size_t)lc_slot_elements(s, k) * s->op->element_bytes;
}

/* The sender of a reliable stream waits for this word, and needn't say FIN to get it. */
static void tell_whole(lc_engine *e, const lc_in *in) {
    lc_peer *peer = &e->peers[in->peer];
    tell_done(e, in);
    if (in->state == LC_IN_OPEN) {
        peer->done_op = in->slot->op->number;
        peer->done_slot = in->slot->desc.number;
        peer->done_told = 1;
    }
}

/* A packet of the stream is here, from the wire or out of its set's parity. */
static void take(lc_engine *e, lc_in *in, const lc_header *h, const uint8_t *payload) {
    lc_op_slot *s = in->slot;
    lc_bit_set(in->arrived, h->packet);
    in->n_arrived++;
    e->peers[in->peer].packets_received++;
    s->op->report.packets_received++;
    combine(s, h->packet, h, payload);
    if (in->n_arrived == s->n_packets) {
        if (s->op->call.reliable)
            tell_whole(e, in);
        settle(e, in, LC_CAUSE_COMPLETE);
    }
    source_settled(e, s, h->packet);
}

/* If a single packet of the set is missing, it is what the sums hold. Nobody may have
 * contributed to it, and it was never sent: then its count is 0. */
static void recover(lc_engine *e, lc_in *in, uint32_t set) {
    lc_parity *p = in->parity;
    lc_op *op = in->slot->op;
    uint16_t count = p->counts[set];
    uint32_t k = set;
    if (p->left[set] != 1 || !lc_bit(p->came, set) || !count || count > e->config.size)
        return;
    while (k < in->slot->n_packets && lc_bit(in->arrived, k))
        k += p->sets;
    if (k >= in->slot->n_packets)
        return; /* it came before the parity was known of */
    lc_header h = {.packet = k,
                   .sender = in->peer,
                   .count = count,
                   .length = (uint16_t)(lc_slot_elements(in->slot, k) * op->element_bytes)};
    p->left[set] = 0;
    op->report.packets_recovered++;
    take(e, in, &h, p->sums + (size_t)set * op->packet_bytes);
}

static void parity_arrived(lc_engine *e, lc_in *in, const lc_header *h, const uint8_t *payload) {
    lc_op *op = in->slot->op;
    lc_parity *p = in->parity;
    uint32_t set = h->packet - in->slot->n_packets;
    if (lc_bit(p->came, set)) {
        e->live.repeated++;
        return;
    }
    lc_bit_set(p->came, set);
    op->report.parity_received++;
    op->report.bytes_received += LC_HEADER_BYTES + h->length;
    if (in->state == LC_IN_SETTLED)
        return; /* that it wasn't needed is as it should be */
    note_arrival(e, in);
    lc_parity_add(p, set, payload, h->length, op->packet_bytes, h->count);
    recover(e, in, set);
    if (in->state == LC_IN_SETTLED)
        lc_op_check(e, op);
}

/* kept: it has waited in a cell, and the link took note of it when it came. */
static void pass_on(lc_engine *e, const lc_header *h, const uint8_t *payload, int kept) {
    lc_peer *peer = &e->peers[h->sender];
    lc_op *op = lc_find_op(e, h->op);
    if (!op) {
        if (!kept)
            note_link(e, peer, h);
        e->live.stale += h->type == LC_DATA;
        if (h->op == peer->last_op && h->slot == peer->last_slot)
            note_late(e, peer, peer->last_fin_ns);
        return;
    }
    lc_in *in = lc_op_in(op, h->slot, h->sender);
    if (!in || !belongs(in, h)) {
        e->live.malformed++;
        return;
    }
    if (in->lost && in->state != LC_IN_SETTLED) {
        if (h->round != in->round) { /* its fate belongs to a round that is over */
            e->live.stale++;
            return;
        }
        if (lc_bit(in->lost, h->packet)) {
            e->live.packets_injected++;
            op->report.packets_injected++;
            peer->rx_taken -= (uint32_t)kept;
            return;
        }
    }
    if (!kept)
        note_link(e, peer, h);
    in->came = 1;
    if (in->parity && !in->parity->known && !h->round)
        lc_parity_begin(in->parity, h->fec, in->slot->n_packets, op->packet_bytes);
    if (h->type == LC_PARITY) {
        parity_arrived(e, in, h, payload);
        return;
    }
    if (lc_bit(in->arrived, h->packet)) {
        e->live.repeated++;
        return;
    }
    if (in->state == LC_IN_SETTLED) {
        e->live.stale++;
        note_late(e, peer, in->fin_ns);
        return;
    }
    note_arrival(e, in);
    op->report.bytes_received += LC_HEADER_BYTES + h->length;
    take(e, in, h, payload);
    if (in->parity && in->parity->sets && in->state != LC_IN_SETTLED) {
        uint32_t set = h->packet % in->parity->sets;
        lc_parity_add(in->parity, set, payload, h->length, op->packet_bytes, h->count);
        in->parity->left[set]--;
        recover(e, in, set);
    }
    if (in->state == LC_IN_SETTLED)
        lc_op_check(e, op);
}

/* ---- eager packets ---- */

/* Whether an eager packet has come too early. Until both are known to mean the same by the
 * operation, a packet of the peer's may be of another one. */
static int must_wait(lc_engine *e, const lc_header *h) {
    const lc_op *op = lc_find_op(e, h->op);
    if (op)
        return !op->peers[h->sender].agreed;
    return !lc_op_posted(e, h->op) && h->op - e->next_op < LC_OPS;
}

void lc_data_arrived(lc_engine *e, const lc_header *h, const uint8_t *payload) {
    lc_peer *peer = &e->peers[h->sender];
    if (!h->eager) {
        lc_agree(e, h->op, h->sender); /* who sends it has seen that both do */
    } else if (must_wait(e, h)) {
        note_link(e, peer, h);
        if (lc_waiting_has(&peer->waiting, h)) {
            e->live.repeated++;
        } else if (peer->waiting.n < e->eager &&
                   lc_cells_keep(&e->cells, &peer->waiting, h, payload)) {
            e->live.eager_kept++;
        } else {
            peer->rx_taken--; /* it has come, but to nothing */
            e->live.eager_dropped++;
        }
        return;
    }
    pass_on(e, h, payload, 0);
}

void lc_agree(lc_engine *e, uint32_t number, uint16_t peer) {
    lc_op *op = lc_find_op(e, number);
    if (!op || op->peers[peer].agreed)
        return;
    op->peers[peer].agreed = 1;
    lc_take_waiting(e, peer);
}

void lc_take_waiting(lc_engine *e, uint16_t peer) {
    lc_cell *cell = e->peers[peer].waiting.first;
    e->peers[peer].waiting = (lc_waiting){0};
    while (cell) {
        lc_cell *next = cell->next;
        if (must_wait(e, &cell->header)) {
            lc_waiting_add(&e->peers[peer].waiting, cell);
        } else {
            pass_on(e, &cell->header, cell->payload, 1);
            lc_cells_free(&e->cells, cell);
        }
        cell = next;
    }
}

void lc_drop_waiting(lc_engine *e, uint16_t peer) {
    lc_waiting *waiting = &e->peers[peer].waiting;
    while (waiting->first) {
        lc_cell *next = waiting->first->next;
        lc_cells_free(&e->cells, waiting->first);
        waiting->first = next;
    }
    *waiting = (lc_waiting){0};
}
