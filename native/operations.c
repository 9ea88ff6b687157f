/* The life of an operation in the progress thread: start, completion, failure. */
#include "operations.h"

#include <string.h>

/* ---- start ---- */

static void start_slot(lc_engine *e, lc_op *op, lc_op_slot *s) {
    if (!s->desc.n_sources && s->desc.target == LC_TARGET_OUT) {
        if (s->desc.finish != LC_FINISH_NONE)
            lc_finish_alone(s);
        else if (s->value != s->own)
            memmove(s->value, s->own, s->desc.length * op->element_bytes);
    }
    for (uint32_t i = 0; i < s->desc.n_sources; i++) {
        if (s->n_packets)
            lc_inject_round(e, &s->ins[i]);
        else
            s->ins[i].state = LC_IN_SETTLED;
    }
    for (uint32_t i = 0; i < s->desc.n_dests && !s->n_packets; i++)
        lc_out_done(e, &s->outs[i]);
}

/* Nothing comes from the dead, and nothing is owed to them. */
static void go_without(lc_engine *e, lc_op *op, uint16_t peer) {
    op->peers[peer].source = op->peers[peer].dest = 0;
    lc_eager_over(e, op, peer);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++) {
            if (s->ins[j].peer != peer)
                continue;
            if (s->ins[j].state != LC_IN_SETTLED)
                lc_give_up(e, &s->ins[j], LC_CAUSE_PEER);
            s->op->telling -= s->ins[j].telling;
            s->ins[j].telling = 0;
        }
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].peer == peer)
                lc_out_done(e, &s->outs[j]);
    }
}

/* Own data may be sent ahead to those who are not ready. */
static void wake_all(lc_engine *e, lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots && e->eager; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_dests; j++)
            lc_out_wake(e, &op->slots[i].outs[j]);
}

void lc_op_start(lc_engine *e, lc_op *op) {
    op->started_ns = e->now;
    if (op->submitted_ns > e->now) /* it came after this turn had looked at the clock */
        op->submitted_ns = e->now;
    e->table[op->number % LC_OPS] = op;
    e->next_op = op->number + 1;
    e->active++;
    e->tick_ns = e->now;
    for (uint32_t i = 0; i < op->n_slots; i++)
        start_slot(e, op, &op->slots[i]);
    for (uint16_t i = 0; i < e->config.size && e->n_dead; i++)
        if (e->peers[i].dead)
            go_without(e, op, i);
    for (uint16_t i = 0; i < e->config.size; i++) {
        op->peers[i].want_wait_ns = 2000000;
        op->peers[i].want_ns = e->now + op->peers[i].want_wait_ns;
        if (op->peers[i].source || (op->peers[i].dest && e->eager))
            lc_tell_call(e, op, i, LC_R_READY);
    }
    lc_check_early(e, op);
    for (uint16_t i = 0; i < e->config.size; i++)
        lc_take_waiting(e, i);
    wake_all(e, op);
    lc_touch(e, op);
}

/* ---- end ---- */

static void add_report(lc_stats *t, const lc_report *r) {
    t->operations++;
    t->packets_sent += r->packets_sent;
    t->packets_resent += r->packets_resent;
    t->bytes_sent += r->bytes_sent;
    t->parity_sent += r->parity_sent;
    t->parity_received += r->parity_received;
    t->packets_recovered += r->packets_recovered;
    t->packets_received += r->packets_received;
    t->bytes_received += r->bytes_received;
    t->packets_missing += r->packets_missing;
    t->contributions += r->contributions;
    t->contribution_packets += r->contribution_packets;
    t->deadline_hits += r->deadline_hits;
    t->operation_ns += r->elapsed_ns;
}

static void add_tail(lc_engine *e, const lc_out *out) {
    if (e->n_tail == LC_TAIL)
        return; /* the receiver's own timers end the stream */
    e->tail[e->n_tail++] = (lc_tail){.next_ns = out->fin_ns,
                                     .op = out->slot->op->number,
                                     .sent = out->sent,
                                     .peer = out->peer,
                                     .number = out->number,
                                     .round = out->round};
}

static void finish(lc_engine *e, lc_op *op) {
    for (uint16_t i = 0; i < e->config.size; i++)
        lc_eager_over(e, op, i); /* of a peer that was never ready */
    op->report.op = op->number;
    op->report.elapsed_ns = e->now - op->submitted_ns;
    add_report(&e->live, &op->report);
    if (e->table[op->number % LC_OPS] == op) { /* else it failed before it was started */
        e->table[op->number % LC_OPS] = NULL;
        e->active--;
    }
    pthread_mutex_lock(&e->lock);
    e->last = op->report;
    e->stats = e->live;
    for (uint16_t i = 0; i < e->config.size; i++) {
        e->peer_stats[i].packets_sent = e->peers[i].packets_sent;
        e->peer_stats[i].packets_received = e->peers[i].packets_received;
        e->peer_stats[i].packets_missing = e->peers[i].packets_missing;
        e->peer_stats[i].offered = e->peers[i].offered;
        e->peer_stats[i].delivered = e->peers[i].delivered;
    }
    if (op->call.notify) {
        op->next = NULL;
        if (e->done_last)
            e->done_last->next = op;
        else
            e->done_first = op;
        e->done_last = op;
    }
    int notify = op->call.notify;
    op->finished = 1;
    pthread_mutex_unlock(&e->lock);
    /* It may be gone by now. Who wakes while the lock is held only sleeps again. */
    if (notify)
        pthread_cond_broadcast(&e->notified);
    pthread_cond_broadcast(&e->changed);
}

static int in_batch(const lc_engine *e, const lc_op *op) {
    for (int i = 0; i < e->n_runs; i++)
        if (e->run_op[i] == op)
            return 1;
    return 0;
}

static int is_complete(const lc_engine *e, const lc_op *op) {
    return !op->slots_unsettled && !op->outs_open && !op->telling && !in_batch(e, op);
}

static void complete(lc_engine *e, lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].state == LC_OUT_SENT)
                add_tail(e, &s->outs[j]);
    }
    finish(e, op);
}

void lc_complete_touched(lc_engine *e) {
    while (e->touched) {
        lc_op *op = e->touched;
        e->touched = op->next_touched;
        op->touched = 0;
        if (is_complete(e, op))
            complete(e, op);
    }
}

void lc_bury(lc_engine *e, uint16_t peer) {
    lc_peer *p = &e->peers[peer];
    p->dead = 1;
    p->n_records = 0;
    p->ack_due = 0;
    p->held_bytes = 0;
    /* What it posted ahead of the survivors was planned with it; theirs of that number is not. */
    memset(p->early, 0, LC_OPS * sizeof *p->early);
    lc_drop_waiting(e, peer);
    e->n_dead++;
    for (uint32_t i = 0; i < e->n_tail;) {
        if (e->tail[i].peer == peer)
            e->tail[i] = e->tail[--e->n_tail];
        else
            i++;
    }
    for (uint32_t i = 0; i < LC_OPS; i++) {
        lc_op *op = e->table[i];
        if (!op)
            continue;
        go_without(e, op, peer);
        lc_touch(e, op);
    }
}

static void fail_op(lc_engine *e, lc_op *op, const lc_failure *why) {
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_dests; j++)
            lc_out_drop(e, &op->slots[i].outs[j]);
    op->failure = *why;
    op->report.cause = LC_CAUSE_FAILED;
    finish(e, op);
}

void lc_execute_failure(lc_engine *e) {
    if (!e->failing.code)
        return;
    lc_failure why = e->failing;
    e->failing.code = LC_OK;
    pthread_mutex_lock(&e->lock);
    if (!e->failed.code)
        e->failed = why;
    pthread_mutex_unlock(&e->lock);
    if (!e->broken.code) {
        e->broken = why;
        e->broken_from = e->next_op;
    }
    e->n_runs = 0;
    for (uint32_t i = 0; i < LC_OPS; i++) {
        if (!e->table[i])
            continue;
        if ((int32_t)(e->table[i]->number - e->broken_from) < 0)
            e->broken_from = e->table[i]->number;
        fail_op(e, e->table[i], &why);
    }
    while (e->queue_first) {
        lc_op *op = e->queue_first;
        e->queue_first = op->next;
        fail_op(e, op, &why);
    }
    e->queue_last = NULL;
}
