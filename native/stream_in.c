/* Streams that arrive: packets are checked against their stream and combined into its slot; what
 * doesn't come is asked for again or given up. */
#include "stream_in.h"

#include <string.h>

#include "payload.h"

static const uint64_t LATE_MAX_NS = 100000000;

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
            lc_source_settled(e, s, k);
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
    lc_touch(e, in->slot->op);
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

/* ---- deadlines ---- */

int lc_path_silent(const lc_engine *e, const lc_op *op, uint16_t peer) {
    uint64_t since = lc_later(lc_later(e->peers[peer].heard_ns, op->started_ns), e->awake_ns);
    return e->now - since > e->config.deadline_max_ns;
}

int lc_overdue(const lc_engine *e, const lc_in *in) {
    const lc_op *op = in->slot->op;
    if (op->call.reliable)
        return 0;
    if (lc_in_lacks(in)) {
        /* Only a link on which nothing arrives any more is a reason to do without. */
        uint64_t came = lc_later(in->last_ns, op->started_ns);
        return e->now - lc_later(came, lc_later(in->excused_ns, e->awake_ns)) >
               e->config.deadline_max_ns;
    }
    if (!in->started_ns)
        return lc_path_silent(e, op, in->peer);
    uint64_t excused = lc_later(in->excused_ns, e->awake_ns);
    if (e->now - lc_later(in->last_ns, excused) > e->config.deadline_max_ns)
        return 1;
    lc_peer *peer = &e->peers[in->peer];
    if (lc_still(e, peer))
        return 0;
    excused = lc_later(excused, peer->back_ns);
    /* The ceiling is for silence: a slow link whose packets keep coming loses nothing by it. */
    if (e->now - lc_later(in->started_ns, excused) <=
        lc_deadline_of(&peer->deadline, in->slot->n_packets, e->config.deadline_min_ns, UINT64_MAX))
        return 0;
    /* What was learnt may be of another path than this one has become: packets that keep coming are
     * waited for, as far apart as they may be by now. */
    return e->now - lc_later(in->last_ns, excused) >
           lc_deadline_silence(&peer->deadline, lc_later(in->gap_ns, peer->pace.path.rtt_ns));
}

/* ---- rounds ---- */

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

void lc_note_link(lc_engine *e, lc_peer *peer, const lc_header *h) {
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
    if (h->format != s->op->call.dtype || h->encoding != s->op->call.encoding || !agrees(in, h))
        return 0;
    if (h->type == LC_PARITY) {
        if (k < s->n_packets || k - s->n_packets >= lc_fec_parity(h->fec, s->n_packets))
            return 0;
        k -= s->n_packets;
    }
    return k < s->n_packets && h->length == lc_payload_bytes(s, k);
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
    lc_combine(s, h, payload);
    if (in->n_arrived == s->n_packets) {
        if (s->op->call.reliable)
            tell_whole(e, in);
        settle(e, in, LC_CAUSE_COMPLETE);
    }
    lc_source_settled(e, s, h->packet);
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
                   .length = (uint16_t)lc_payload_bytes(in->slot, k)};
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
        lc_touch(e, op);
}

void lc_in_take(lc_engine *e, const lc_header *h, const uint8_t *payload, int kept) {
    lc_peer *peer = &e->peers[h->sender];
    lc_op *op = lc_find_op(e, h->op);
    if (!op) {
        if (!kept)
            lc_note_link(e, peer, h);
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
        lc_note_link(e, peer, h);
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
        lc_touch(e, op);
}
