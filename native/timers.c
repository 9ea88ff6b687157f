/* What happens when nothing arrives: questions are repeated, rounds and deadlines end. */
#include "timers.h"

static const uint64_t TICK_BUSY_NS = 500000, TICK_QUIET_NS = 5000000, TICK_IDLE_NS = 100000000;
static const uint64_t QUIET_AFTER_NS = 20000000;
/* So many rounds in a row of which nothing came: at 90% loss, of one packet each, that happens once
 * in 5e11 times. */
static const uint32_t BARREN_ROUNDS = 256;
static const uint64_t ASK_NS = 100000000, WANT_MAX_NS = 100000000;

/* When to ask for an answer once more that was asked for so many times again. */
static uint64_t backoff(const lc_engine *e, uint16_t peer, uint32_t tries) {
    return e->now + (lc_pace_rto(&e->peers[peer].pace) << (tries < 3 ? tries : 3));
}

static void ask(lc_engine *e, lc_in *in) {
    uint64_t silent_since = lc_later(in->last_ns, in->slot->op->started_ns);
    if (e->now - silent_since < ASK_NS || e->now < in->ask_ns)
        return;
    lc_record r = {.kind = LC_R_ASK,
                   .op = in->slot->op->number,
                   .slot = in->slot->desc.number,
                   .round = in->round};
    lc_tell(e, in->peer, &r);
    in->ask_ns = e->now + ASK_NS;
}

static void tick_in(lc_engine *e, lc_in *in, uint64_t *next) {
    if (in->state == LC_IN_CLOSING) {
        if (e->now >= in->close_ns)
            lc_round_ended(e, in);
        else if (in->close_ns < *next)
            *next = in->close_ns;
    } else if (in->telling) {
        if (lc_path_silent(e, in->slot->op, in->peer)) {
            in->slot->op->telling--; /* tick_op looks whether that was all */
            in->telling = 0;
        } else if (e->now >= in->nack_ns) {
            in->nack_ns = e->now + 2 * lc_pace_rto(&e->peers[in->peer].pace);
            lc_tell_missing(e, in);
        }
    } else if (in->state == LC_IN_OPEN) {
        if (lc_overdue(e, in)) {
            lc_give_up(e, in, LC_CAUSE_DEADLINE);
            return;
        }
        if (in->nack_ns && e->now >= in->nack_ns) {
            in->nack_ns = e->now + 2 * lc_pace_rto(&e->peers[in->peer].pace);
            lc_tell_missing(e, in);
        }
        ask(e, in);
    }
}

static void tick_out(lc_engine *e, lc_out *out) {
    lc_op *op = out->slot->op;
    if (out->state == LC_OUT_DONE)
        return;
    int wants_nack = out->state == LC_OUT_OPEN && out->round && out->n_told < out->slot->n_packets;
    if (!op->call.reliable && lc_path_silent(e, op, out->peer)) {
        lc_out_done(e, out);
    } else if ((out->state == LC_OUT_SENT || wants_nack) && e->now >= out->fin_ns) {
        lc_tell_fin(e, out);
        out->fin_ns = backoff(e, out->peer, out->fin_tries++);
    }
}

static void tick_wants(lc_engine *e, lc_op *op) {
    for (uint16_t i = 0; i < e->config.size; i++) {
        lc_op_peer *p = &op->peers[i];
        if (!p->dest || p->ready || e->now < p->want_ns)
            continue;
        lc_tell_call(e, op, i, LC_R_WANT);
        p->want_wait_ns = p->want_wait_ns * 2 < WANT_MAX_NS ? p->want_wait_ns * 2 : WANT_MAX_NS;
        p->want_ns = e->now + p->want_wait_ns;
    }
}

/* A peer that keeps the operation from ending, or -1. One that has not posted it comes first:
 * others may only pass its absence on. */
static int waited_for(const lc_engine *e, const lc_op *op) {
    for (uint16_t i = 0; i < e->config.size; i++)
        if (op->peers[i].dest && !op->peers[i].ready)
            return i;
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++)
            if (s->ins[j].state != LC_IN_SETTLED)
                return s->ins[j].peer;
    }
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].state != LC_OUT_DONE)
                return s->outs[j].peer;
    }
    return -1;
}

static int awaits_from(const lc_op *op, uint16_t peer) {
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_sources; j++)
            if (op->slots[i].ins[j].peer == peer && op->slots[i].ins[j].state != LC_IN_SETTLED)
                return 1;
    return 0;
}

static int owes_to(const lc_op *op, uint16_t peer) {
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_dests; j++)
            if (op->slots[i].outs[j].peer == peer && op->slots[i].outs[j].state != LC_OUT_DONE)
                return 1;
    return 0;
}

/* Whether the link from a peer that this operation needs is dead, and why. A peer that is late
 * answers whatever it is asked, and sends nothing before it is READY: so either silence, or rounds
 * that it has sent and of which nothing came, are the link's doing. */
static int is_dead_link(const lc_engine *e, const lc_op *op, uint16_t peer, lc_failure *why) {
    const lc_peer *p = &e->peers[peer];
    uint64_t begin = lc_later(op->started_ns, e->awake_ns);
    uint64_t silent = e->now - lc_later(p->heard_ns, begin);
    uint64_t barren = e->now - lc_later(p->barren_ns, begin);
    *why = (lc_failure){.code = LC_E_LINK, .peer = peer, .op = op->number};
    if (silent > e->config.link_ns && (awaits_from(op, peer) || owes_to(op, peer))) {
        why->mine[2] = silent;
        return 1;
    }
    if (p->barren_rounds >= BARREN_ROUNDS && barren > e->config.link_ns && awaits_from(op, peer)) {
        why->mine[0] = p->barren_packets;
        why->mine[1] = p->barren_rounds;
        why->mine[2] = barren;
        return 1;
    }
    return 0;
}

static int find_dead_link(const lc_engine *e, const lc_op *op, lc_failure *why) {
    uint64_t begin = lc_later(op->started_ns, e->awake_ns);
    if (!op->call.reliable || !e->config.link_ns || e->now - begin <= e->config.link_ns)
        return 0;
    for (uint16_t i = 0; i < e->config.size; i++)
        if ((op->peers[i].source || op->peers[i].dest) && is_dead_link(e, op, i, why))
            return 1;
    return 0;
}

/* Returns 0 if it records a failure. */
static int tick_op(lc_engine *e, lc_op *op, uint64_t *next) {
    if (op->call.timeout_ns && e->now - op->submitted_ns > op->call.timeout_ns) {
        lc_failure why = {.code = LC_E_TIMEOUT, .peer = waited_for(e, op), .op = op->number};
        lc_fail(e, &why);
        return 0;
    }
    lc_failure why;
    if (find_dead_link(e, op, &why)) {
        lc_fail(e, &why);
        return 0;
    }
    tick_wants(e, op);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++)
            tick_in(e, &s->ins[j], next);
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            tick_out(e, &s->outs[j]);
    }
    lc_touch(e, op);
    return 1;
}

static void tick_tail(lc_engine *e) {
    for (uint32_t i = 0; i < e->n_tail;) {
        lc_tail *t = &e->tail[i];
        if (t->tries >= LC_TAIL_TRIES) {
            *t = e->tail[--e->n_tail];
            continue;
        }
        if (e->now >= t->next_ns) {
            lc_record r = {.kind = LC_R_FIN,
                           .op = t->op,
                           .slot = t->number,
                           .round = t->round,
                           .a = t->sent,
                           .b = e->peers[t->peer].tx_next};
            lc_tell(e, t->peer, &r);
            t->next_ns = backoff(e, t->peer, t->tries++);
        }
        i++;
    }
}

static void tick_peer(lc_engine *e, uint16_t rank) {
    lc_peer *p = &e->peers[rank];
    lc_release_held(e, p);
    if (p->rx_next != p->rx_reported && e->now - p->rx_ack_ns >= LC_ACK_NS)
        p->ack_due = 1;
    if (p->probe_ns && e->now >= p->probe_ns) {
        lc_tell_probe(e, rank);
        p->probe_ns = e->now + 2 * lc_pace_rto(&p->pace);
    }
}

void lc_tick(lc_engine *e) {
    uint64_t interval = TICK_IDLE_NS;
    if (e->active || e->n_tail)
        interval = e->now - e->busy_ns < QUIET_AFTER_NS ? TICK_BUSY_NS : TICK_QUIET_NS;
    uint64_t next = e->now + interval;
    for (uint16_t i = 0; i < e->config.size; i++)
        if (i != e->config.rank && !e->peers[i].dead)
            tick_peer(e, i);
    for (uint32_t i = 0; i < LC_OPS && e->active; i++)
        if (e->table[i] && !tick_op(e, e->table[i], &next))
            break;
    tick_tail(e);
    e->tick_ns = next;
}
