/* Control records in. None is ever acknowledged for its own sake: each is repeated by a timer until
 * what it asks for has happened, so any of them may be lost. */
#include "control_in.h"

#include <string.h>

static void answer_done(lc_engine *e, uint16_t peer, const lc_record *r, uint32_t missing) {
    lc_record done = {
        .kind = LC_R_DONE, .op = r->op, .slot = r->slot, .round = r->round, .a = missing};
    lc_tell(e, peer, &done);
}

static void mismatch(lc_engine *e, lc_op *op, uint16_t peer, uint64_t signature, uint64_t elements,
                     uint32_t dtype) {
    lc_failure why = {.code = LC_E_MISMATCH,
                      .peer = peer,
                      .op = op->number,
                      .mine = {op->call.signature, op->call.in_elements, op->call.dtype},
                      .theirs = {signature, elements, dtype}};
    lc_tell_call(e, op, peer, LC_R_MISMATCH); /* the loop sends it before it fails */
    lc_fail(e, &why);
}

/* The answer to whoever goes on with an operation that has failed here: that it is another one, if
 * that is why. Else none, since FIN or DONE would pass the failure for loss. */
static void tell_failed(lc_engine *e, uint16_t peer, uint32_t op) {
    const lc_failure *why = &e->broken;
    if (why->code != LC_E_MISMATCH || why->op != op)
        return;
    lc_record r = {.kind = LC_R_MISMATCH,
                   .op = op,
                   .a = (uint32_t)why->mine[2],
                   .c = why->mine[0],
                   .d = why->mine[1]};
    lc_tell(e, peer, &r);
}

/* The signature covers the sizes; a rank's own number of elements may differ (gather). */
static int same_call(const lc_op *op, const lc_record *r) {
    return r->c == op->call.signature && r->a == op->call.dtype;
}

static void peer_ready(lc_engine *e, lc_op *op, uint16_t peer) {
    if (op->peers[peer].ready)
        return;
    op->peers[peer].ready = op->peers[peer].agreed = 1;
    lc_eager_over(e, op, peer);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++) {
            if (s->outs[j].peer != peer)
                continue;
            lc_out_wake(e, &s->outs[j]);
            lc_out_check(e, &s->outs[j]);
        }
    }
}

void lc_check_early(lc_engine *e, lc_op *op) {
    for (uint16_t i = 0; i < e->config.size; i++) {
        if (!e->peers[i].early)
            continue;
        lc_early *early = &e->peers[i].early[op->number % LC_OPS];
        if (!early->known || early->op != op->number)
            continue;
        early->known = 0;
        if (early->signature != op->call.signature || early->dtype != op->call.dtype) {
            mismatch(e, op, i, early->signature, early->elements, early->dtype);
            return;
        }
        peer_ready(e, op, i);
    }
}

/* READY and WANT: the peer has posted the operation. */
static void on_call(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(e, r->op);
    if (op) {
        if (!same_call(op, r)) {
            mismatch(e, op, peer, r->c, r->d, r->a);
            return;
        }
        if (r->kind == LC_R_WANT)
            lc_tell_call(e, op, peer, LC_R_READY);
        peer_ready(e, op, peer);
        lc_touch(e, op);
        lc_take_waiting(e, peer);
    } else if (!lc_op_posted(e, r->op)) {
        if (r->op - e->next_op < LC_OPS)
            e->peers[peer].early[r->op % LC_OPS] = (lc_early){r->c, r->d, r->op, r->a, 1};
        if (r->kind == LC_R_WANT)
            e->peers[peer].ack_due = 1; /* not yet, but alive: any answer says so */
    } else if (lc_op_failed(e, r->op)) {
        tell_failed(e, peer, r->op);
    } else if (r->kind == LC_R_WANT) {
        lc_record all = *r;
        all.slot = 0xFFFF;
        answer_done(e, peer, &all, 0);
    }
}

/* How long packets may still come after the end of their stream: what this peer's did before, a
 * quarter of a round trip, and never less than the floor. Before packets are given up for good,
 * four times as long as they were late before; asking for them too early costs no more than a
 * resend. The part of the round trip is for a path that isn't known: it fades with every four
 * streams of which nothing came late. */
static uint64_t reorder_allowance(const lc_engine *e, const lc_in *in) {
    const lc_peer *p = &e->peers[in->peer];
    const lc_call *call = &in->slot->op->call;
    uint64_t floor = e->config.reorder_ns ? e->config.reorder_ns : LC_REORDER_NS;
    uint64_t late = !call->reliable && in->round >= call->repair ? 4 * p->late_ns : p->late_ns;
    uint64_t unknown = p->settled < 64 ? p->pace.path.rtt_ns / 4 >> p->settled / 4 : 0;
    uint64_t learnt = late > unknown ? late : unknown;
    return learnt > floor ? learnt : floor;
}

/* Whether DONE is on its way. Should it be lost, FIN comes again, and that one is answered. */
static int was_answered(lc_peer *peer, const lc_record *r) {
    int answered = peer->done_told && r->op == peer->done_op && r->slot == peer->done_slot;
    if (answered)
        peer->done_told = 0;
    return answered;
}

static void on_fin(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_link_seen(&e->peers[peer], r->b);
    lc_agree(e, r->op, peer); /* it is told to none but those who do */
    if (was_answered(&e->peers[peer], r))
        return;
    lc_op *op = lc_find_op(e, r->op);
    if (!op) {
        if (lc_op_failed(e, r->op))
            tell_failed(e, peer, r->op);
        else if (lc_op_posted(e, r->op))
            answer_done(e, peer, r, 0);
        return;
    }
    lc_in *in = lc_op_in(op, r->slot, peer);
    if (!in) {
        e->live.malformed++;
        return;
    }
    in->ask_ns = 0;
    if (e->n_dead && op->call.reliable && in->round && r->round == in->round && !r->a &&
        in->state == LC_IN_OPEN) {
        /* Nothing came of asking: what is missing died with the rank that had it. */
        lc_give_up(e, in, LC_CAUSE_PEER);
        lc_touch(e, op);
        return;
    }
    if (in->telling && r->round != in->round) {
        in->nack_ns = e->now; /* it has not heard all of what was given up */
        return;
    }
    if (in->state == LC_IN_SETTLED) {
        answer_done(e, peer, r, in->slot->n_packets - in->n_arrived);
        lc_told(e, in);
        return;
    }
    if (r->round != in->round) {
        if (in->nack_ns && lc_next_round(r->round) == in->round)
            in->nack_ns = e->now; /* it has not heard what is missing */
        return;
    }
    if (in->state == LC_IN_OPEN) {
        in->state = LC_IN_CLOSING;
        in->n_told = r->a;
        in->nack_ns = 0;
        in->fin_ns = e->now;
        in->close_ns = e->now + reorder_allowance(e, in);
        if (in->close_ns < e->tick_ns)
            e->tick_ns = in->close_ns;
    }
}

/* Takes a NACK's word on the packets [a, b): those in its bits are missing, the rest is not. */
static void take_told(lc_out *out, const lc_record *r) {
    const lc_op_slot *s = out->slot;
    for (uint32_t k = r->a; k < r->b; k++) {
        if (lc_bit(out->told, k))
            continue;
        lc_bit_set(out->told, k);
        out->n_told++;
        uint32_t at = k - r->a;
        int missing = at < 64 ? r->c >> at & 1 : at < 128 && (r->d >> (at - 64) & 1);
        if (missing && (s->desc.n_sources == 0 || s->count[k])) {
            lc_bit_set(out->again, k);
            out->again_left += r->kind == LC_R_NACK;
        }
    }
}

/* A NACK of the next round ends the one before. LOST ends them all, and needs no end of any: no
 * word of a round that the receiver asked for and then gave up may have come here. */
static int begins_round(const lc_out *out, const lc_record *r) {
    if (r->kind == LC_R_LOST)
        return out->slot->op->call.feedback && !out->given_up && out->state != LC_OUT_DONE;
    return out->state == LC_OUT_SENT && !out->given_up && lc_next_round(out->round) == r->round;
}

static void on_nack(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(e, r->op);
    lc_out *out = op ? lc_op_out(op, r->slot, peer) : NULL;
    if (!out || !out->again || r->a % 128 || r->a >= r->b || r->b > out->slot->n_packets) {
        e->live.stale++;
        return;
    }
    if (begins_round(out, r)) {
        lc_out_drop(e, out);
        out->given_up = r->kind == LC_R_LOST;
        size_t bytes = lc_words(out->slot->n_packets) * 8;
        memset(out->again, 0, bytes);
        memset(out->told, 0, bytes);
        out->round = r->round;
        out->state = LC_OUT_OPEN;
        out->cursor = out->sent = out->again_left = out->n_told = 0;
        out->fin_tries = 0;
        out->fin_ns = e->now + lc_pace_rto(&e->peers[peer].pace);
    } else if (out->round != r->round || out->given_up != (r->kind == LC_R_LOST)) {
        e->live.stale++;
        return;
    } else if (out->state == LC_OUT_SENT) {
        lc_tell_fin(e, out);
        return;
    }
    if (out->state != LC_OUT_OPEN)
        return;
    take_told(out, r);
    lc_out_wake(e, out);
    lc_out_check(e, out);
}

static void tail_done(lc_engine *e, uint16_t peer, const lc_record *r) {
    for (uint32_t i = 0; i < e->n_tail; i++) {
        lc_tail *t = &e->tail[i];
        if (t->op == r->op && t->peer == peer && t->number == r->slot) {
            *t = e->tail[--e->n_tail];
            return;
        }
    }
}

/* The peer has settled a stream; for an operation that it has ended altogether, every stream. */
static void on_done(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(e, r->op);
    if (!op) {
        tail_done(e, peer, r);
        return;
    }
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].peer == peer && (s->outs[j].number == r->slot || r->slot == 0xFFFF))
                lc_out_done(e, &s->outs[j]);
    }
    if (r->slot == 0xFFFF)
        peer_ready(e, op, peer); /* it must have been; its word was lost */
    lc_touch(e, op);
}

static void on_ack(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_peer *p = &e->peers[peer];
    uint32_t moved = r->a - p->tx_acked;
    p->tx_window = r->b;
    if ((int32_t)(r->a - p->tx_next) > 0) {
        /* More than was sent: a damaged number got through, here or there. Numbers only have to
         * grow, so going on from where the peer is makes both agree again. */
        p->tx_next = p->tx_acked = p->tx_seen = r->a;
        p->tx_received = (uint32_t)r->d;
        p->probe_ns = 0;
        return;
    }
    if (moved > p->tx_next - p->tx_acked)
        return; /* older than what we know */
    uint32_t taken = (uint32_t)r->d - p->tx_received;
    lc_fec_told(&p->fec, r->a - p->tx_seen, taken);
    uint32_t lost = taken < r->a - p->tx_seen ? r->a - p->tx_seen - taken : 0;
    p->tx_received = (uint32_t)r->d;
    p->tx_seen = r->a;
    if (moved)
        p->probe_ns = 0;
    p->tx_acked = r->a;
    lc_path_ack ack = {.now = e->now, .moved = moved, .taken = moved > lost ? moved - lost : 0};
    if (moved && r->c >> 32) { /* an answer that comes again tells how old it is */
        uint32_t kept_us = (uint32_t)(r->c >> 32) - 1;
        uint32_t back_us = (uint32_t)(e->came_ns / 1000) - (uint32_t)r->c;
        if (kept_us <= back_us && back_us < 60000000) { /* else a clock that makes no sense */
            ack.rtt_ns = (uint64_t)(back_us - kept_us) * 1000 + 1;
            ack.elapsed_ns = (uint64_t)((uint32_t)(e->now / 1000) - (uint32_t)r->c) * 1000;
            ack.sent_us = (uint32_t)r->c;
            ack.arrived_us = r->op;
        }
    }
    lc_pace_acked(&p->pace, &ack);
}

static void on_ask(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(e, r->op);
    lc_record answer = {.kind = LC_R_WAIT, .op = r->op, .slot = r->slot, .round = r->round};
    if (op) {
        lc_out *out = lc_op_out(op, r->slot, peer);
        if (!out)
            return;
        if (out->state != LC_OUT_OPEN) {
            lc_tell_fin(e, out);
            return;
        }
        if (out->listed)
            return; /* it has packets to send and cannot: that is the network's doing */
    } else if (lc_op_failed(e, r->op)) {
        tell_failed(e, peer, r->op);
        return;
    } else if (lc_op_posted(e, r->op)) {
        answer.kind = LC_R_FIN;
        answer.b = e->peers[peer].tx_next;
    }
    lc_tell(e, peer, &answer);
}

static void on_wait(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(e, r->op);
    lc_in *in = op ? lc_op_in(op, r->slot, peer) : NULL;
    if (in)
        in->excused_ns = e->now;
}

static void on_mismatch(lc_engine *e, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(e, r->op);
    if (!op || same_call(op, r))
        return;
    lc_failure why = {.code = LC_E_MISMATCH,
                      .peer = peer,
                      .op = op->number,
                      .mine = {op->call.signature, op->call.in_elements, op->call.dtype},
                      .theirs = {r->c, r->d, r->a}};
    lc_fail(e, &why);
}

void lc_control_arrived(lc_engine *e, const lc_header *h, const uint8_t *payload) {
    lc_peer *p = &e->peers[h->sender];
    e->live.control_received++;
    for (uint16_t i = 0; i < h->count && !lc_failing(e); i++) {
        lc_record r;
        if (lc_record_get(payload + (size_t)i * LC_RECORD_BYTES, &r) != LC_GOOD) {
            e->live.malformed++;
            continue;
        }
        switch (r.kind) {
        case LC_R_READY:
        case LC_R_WANT:
            on_call(e, h->sender, &r);
            break;
        case LC_R_FIN:
            on_fin(e, h->sender, &r);
            break;
        case LC_R_NACK:
        case LC_R_LOST:
            on_nack(e, h->sender, &r);
            break;
        case LC_R_DONE:
            on_done(e, h->sender, &r);
            break;
        case LC_R_ACK:
            on_ack(e, h->sender, &r);
            break;
        case LC_R_PROBE:
            lc_link_seen(p, r.a);
            p->ack_due = 1;
            break;
        case LC_R_MISMATCH:
            on_mismatch(e, h->sender, &r);
            break;
        case LC_R_ASK:
            on_ask(e, h->sender, &r);
            break;
        case LC_R_WAIT:
            on_wait(e, h->sender, &r);
            break;
        default:
            e->live.malformed++;
            break;
        }
    }
}
