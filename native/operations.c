/* The life of an operation in the loop: start, completion, failure. */
#include "operations.h"

#include <string.h>

#include "batch.h"
#include "completions.h"
#include "copy.h"
#include "gate.h"
#include "linger.h"
#include "message.h"
#include "page.h"

/* ---- start ---- */

static void start_slot(lc_op_slot *s) {
    if (s->at_once && s->desc.target == LC_TARGET_OUT) {
        if (s->desc.finish != LC_FINISH_NONE)
            lc_finish_alone(s);
        else if (s->op->is_large && !s->op->in_place)
            lc_copy_past_caches(s->value, s->own, s->desc.length * s->op->element_bytes);
        else if (s->value != s->own)
            memmove(s->value, s->own, s->desc.length * s->op->element_bytes);
    }
    for (uint32_t i = 0; i < s->desc.n_sources; i++) {
        if (s->n_packets)
            lc_inject_round(&s->ins[i]);
        else
            s->ins[i].state = LC_IN_SETTLED;
    }
    for (uint32_t i = 0; i < s->desc.n_dests && !s->n_packets; i++)
        lc_out_done(&s->outs[i]);
    if (s->desc.n_dests > 1) {
        lc_host *h = s->op->group->host;
        s->contents = h->contents + 1;
        h->contents += s->n_packets;
    }
}

/* Nothing comes from the dead, and nothing is owed to them. */
static void exclude(lc_op *op, uint16_t peer) {
    op->peers[peer].source = op->peers[peer].dest = 0;
    lc_eager_over(op, peer);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++) {
            if (s->ins[j].peer != peer)
                continue;
            if (s->ins[j].state != LC_IN_SETTLED)
                lc_give_up(&s->ins[j], LC_CAUSE_PEER);
            lc_told(&s->ins[j]);
        }
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].peer == peer)
                lc_out_done(&s->outs[j]);
    }
}

/* Own data may be sent ahead to those who are not ready. */
static void wake_all(lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots && op->group->host->config.eager_bytes; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_dests; j++)
            lc_out_wake(&op->slots[i].outs[j]);
}

/* Whether all that the peer sends comes ahead. */
static int comes_ahead(const lc_op *op, uint16_t peer) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++)
            if (s->ins[j].peer == peer && !lc_may_go_ahead(s, op->group->members[peer].path))
                return 0;
    }
    return 1;
}

/* A peer whose packets are few sends them ahead; where they are answered by packets, READY can wait
 * for those. */
static void tell_ready(lc_op *op, uint16_t peer) {
    const lc_op_peer *p = &op->peers[peer];
    int answers = p->source && p->dest && !p->at_once && op->copy_bytes;
    if (answers && comes_ahead(op, peer))
        lc_tell_ready_soon(op, peer);
    else
        lc_tell_call(op, peer, LC_R_READY);
}

void lc_op_start(lc_op *op) {
    lc_group *g = op->group;
    lc_host *h = g->host;
    op->started_ns = h->now;
    op->order = h->started++;
    if (op->call.gate)
        g->held_until_ns = h->now;
    if (op->submitted_ns < g->held_until_ns) /* it stood behind a gate until then */
        op->submitted_ns = g->held_until_ns;
    if (op->submitted_ns > h->now) /* it came after this turn had looked at the clock */
        op->submitted_ns = h->now;
    g->table[op->number % LC_OPS] = op;
    g->next_op = op->number + 1;
    g->active++;
    h->active++;
    h->collectives++;
    h->tick_ns = h->now;
    for (uint32_t i = 0; i < op->n_slots; i++)
        start_slot(&op->slots[i]);
    if (lc_may_linger(op))
        lc_linger(op);
    for (uint16_t i = 0; i < g->config.size && g->n_dead; i++)
        if (g->members[i].dead)
            exclude(op, i);
    for (uint16_t i = 0; i < g->config.size; i++) {
        op->peers[i].want_wait_ns = 2000000;
        op->peers[i].want_ns = h->now + op->peers[i].want_wait_ns;
        if (op->peers[i].source || (op->peers[i].dest && h->config.eager_bytes))
            tell_ready(op, i);
    }
    lc_check_early(op);
    for (uint16_t i = 0; i < g->config.size; i++)
        if (op->peers[i].source)
            lc_take_waiting(g, i);
    wake_all(op);
    lc_touch(op);
}

/* ---- end ---- */

static void add_report(lc_stats *t, const lc_report *r) {
    lc_count_packets(t, r);
    t->operations++;
    t->packets_missing += r->packets_missing;
    t->contributions += r->contributions;
    t->contribution_packets += r->contribution_packets;
    t->deadline_hits += r->deadline_hits;
    t->operation_ns += r->elapsed_ns;
}

/* With no room, the receiver's own timers end the stream. */
static void keep_fin(const lc_out *out) {
    const lc_op *op = out->slot->op;
    lc_host *h = op->group->host;
    if (h->n_late_fins == LC_LATE_FINS)
        return;
    h->late_fins[h->n_late_fins++] =
        (lc_late_fin){.next_ns = out->fin_ns,
                      .stream = {op->group->config.number, op->number, out->number},
                      .sent = out->sent,
                      .word = lc_out_word(out),
                      .process = lc_path_to(out)->number,
                      .round = out->round};
}

/* What an operation sent after its caller had its report. */
static void add_rest(lc_stats *t, const lc_report *now, const lc_report *told) {
    t->packets_sent += now->packets_sent - told->packets_sent;
    t->packets_resent += now->packets_resent - told->packets_resent;
    t->resent_reliable += now->resent_reliable - told->resent_reliable;
    t->nan_groups += now->nan_groups - told->nan_groups;
    t->bytes_sent += now->bytes_sent - told->bytes_sent;
    t->parity_sent += now->parity_sent - told->parity_sent;
}

/* Under the lock: callers see what was counted. */
static void show_figures(lc_group *g) {
    g->stats = g->live;
    g->host->stats = g->host->live;
    for (uint16_t i = 0; i < g->config.size; i++)
        lc_show_counts(&g->peer_stats[i], &g->members[i]);
}

static float max_missing(const lc_op *op) {
    float most = -1;
    for (int i = 0; i < LC_LEVELS; i++) {
        const lc_level *level = &op->call.levels[i];
        if (level->choose && !level->reliable && level->max_missing > most)
            most = level->max_missing;
    }
    return most;
}

/* The caller gets it back. Takes the lock. Unless it lingers, the operation may be gone
 * afterwards. */
static void hand_back(lc_op *op) {
    lc_group *g = op->group;
    lc_host *h = g->host;
    op->report.op = op->number;
    op->report.elapsed_ns = h->now - op->submitted_ns;
    op->report.max_missing = max_missing(op);
    if (!op->letter)
        add_report(&g->live, &op->report);
    pthread_mutex_lock(&h->lock);
    op->told = op->report;
    if (!op->letter)
        g->last = op->report;
    show_figures(g);
    int notify = op->call.notify;
    if (notify)
        lc_completions_put(op);
    lc_gate_done(op);
    lc_page_end(op, h->now);
    op->finished = 1;
    pthread_mutex_unlock(&h->lock);
    /* Who wakes while the lock is held only sleeps again. */
    pthread_cond_broadcast(&g->changed);
}

/* The end of one that its caller has got back before. Takes the lock. */
static void forget(lc_op *op) {
    lc_group *g = op->group;
    lc_host *h = g->host;
    add_rest(&g->live, &op->report, &op->told);
    pthread_mutex_lock(&h->lock);
    if (g->last.op == op->number)
        g->last = op->report;
    show_figures(g);
    lc_linger_over(
        op); /* not before the figures, which are read by who sees that nothing lingers */
    op->lingers = 0;
    int released = op->released;
    pthread_mutex_unlock(&h->lock);
    if (released)
        lc_op_free(op, &h->pool, &h->pool_lock);
}

/* Takes the lock. The operation may be gone afterwards. */
static void finish(lc_op *op) {
    lc_group *g = op->group;
    for (uint16_t i = 0; i < g->config.size; i++)
        lc_eager_over(op, i);                  /* of a peer that was never ready */
    if (g->table[op->number % LC_OPS] == op) { /* else it failed before it was started */
        g->table[op->number % LC_OPS] = NULL;
        g->active--;
        g->host->active--;
        g->host->collectives--;
    }
    if (lc_is_lingering(op)) {
        forget(op);
    } else {
        lc_linger_over(op);
        op->lingers = 0;
        hand_back(op);
    }
}

static int is_complete(const lc_op *op) {
    return !op->slots_unsettled && !op->outs_open && !op->reporting && !op->runs;
}

/* Whether the caller's result is there, though the operation isn't over: nothing else comes. Not
 * for a caller that waits for the end at once; nor where what fills a gap may lie where packets of
 * streams that are open are read from. */
static int has_result(const lc_op *op) {
    return !op->call.waits && !op->slots_unsettled && !(op->in_place && lc_lacks_fill(op));
}

/* Takes the lock. */
static void show_result(lc_op *op) {
    lc_group *g = op->group;
    lc_fill_missing(op);
    lc_gate_done(op);
    pthread_mutex_lock(&g->host->lock);
    lc_page_end(op, g->host->now);
    op->shown = 1;
    pthread_mutex_unlock(&g->host->lock);
    pthread_cond_broadcast(&g->changed);
}

static void complete(lc_op *op) {
    if (!op->shown)
        lc_fill_missing(op);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].state == LC_OUT_SENT)
                keep_fin(&s->outs[j]);
    }
    finish(op);
}

/* All that its caller is to get is here; what remains is for its peers. Not where something is
 * missing: in place, what fills it may lie where peers' packets are read from. */
static void linger(lc_op *op) {
    int rests = !op->reporting && !op->report.packets_missing && !op->runs;
    if (!op->lingers && rests && lc_may_linger(op))
        lc_linger(op);
    if (op->lingers)
        hand_back(op);
}

void lc_complete_touched(lc_host *h) {
    while (h->touched) {
        lc_op *op = h->touched;
        h->touched = op->next_touched;
        op->touched = 0;
        if (op->letter) {
            if (lc_message_over(op, op->runs > 0))
                finish(op);
        } else if (is_complete(op)) {
            complete(op);
        } else if (!op->finished) {
            linger(op);
            if (!op->finished && !op->shown && has_result(op))
                show_result(op);
        }
    }
}

void lc_member_lost(lc_group *g, uint16_t peer) {
    lc_host *h = g->host;
    lc_path *p = g->members[peer].path;
    uint32_t number = g->config.number;
    g->members[peer].dead = 1;
    g->n_dead++;
    uint32_t keep = 0;
    for (uint32_t i = 0; i < p->n_records; i++)
        if (p->records[i].group != number)
            p->records[keep++] = p->records[i];
    p->n_records = keep;
    /* What it posted ahead of the survivors was planned with it; theirs of that number is not. */
    for (uint32_t i = 0; p->early && i < LC_EARLY; i++)
        if (p->early[i].group == number)
            p->early[i].known = 0;
    lc_drop_waiting(g, peer);
    for (uint32_t i = 0; i < h->n_late_fins;) {
        if (h->late_fins[i].process == p->number && h->late_fins[i].stream.group == number)
            h->late_fins[i] = h->late_fins[--h->n_late_fins];
        else
            i++;
    }
    for (uint32_t i = 0; i < LC_OPS; i++)
        if (g->table[i])
            exclude(g->table[i], peer);
    lc_message_gone(g, peer, 1);
}

/* It has ended all calls that it took part in, so it needs nothing of those that linger. */
void lc_left(lc_group *g, uint16_t peer) {
    for (uint32_t i = 0; i < LC_OPS && lc_lingering(g, NULL); i++)
        if (g->table[i] && g->table[i]->lingers)
            exclude(g->table[i], peer);
    lc_message_gone(g, peer, 0);
}

static void fail_op(lc_op *op, const lc_failure *why) {
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_dests; j++)
            lc_out_drop(&op->slots[i].outs[j]);
    if (!lc_is_lingering(op)) {
        if (!op->shown)
            lc_gate_fail(op);
        op->failure = *why;
        op->report.cause = LC_CAUSE_FAILED;
    }
    finish(op);
}

static void execute_failure(lc_group *g) {
    lc_host *h = g->host;
    lc_failure why = g->failing;
    g->failing.code = LC_OK;
    pthread_mutex_lock(&h->lock);
    if (!g->failed.code)
        g->failed = why;
    pthread_mutex_unlock(&h->lock);
    if (!g->broken.code) {
        g->broken = why;
        g->broken_from = g->next_op;
    }
    for (uint32_t i = 0; i < LC_OPS; i++) {
        if (!g->table[i])
            continue;
        if ((int32_t)(g->table[i]->number - g->broken_from) < 0)
            g->broken_from = g->table[i]->number;
        fail_op(g->table[i], &why);
    }
    while (g->queue_first) {
        lc_op *op = g->queue_first;
        g->queue_first = op->next;
        h->queued--;
        fail_op(op, &why);
    }
    g->queue_last = NULL;
    for (lc_op *op; (op = lc_message_take_out(g));)
        fail_op(op, &why);
    for (uint16_t i = 0; i < g->config.size; i++) /* other groups have the same cells */
        if (g->members[i].path)
            lc_drop_waiting(g, i);
}

void lc_execute_failures(lc_host *h) {
    if (!h->failing)
        return;
    h->failing = 0;
    for (lc_group *g = h->groups; g; g = g->next) {
        if (!g->failing.code)
            continue;
        lc_batch_drop(h, g);
        if (g->runs)
            h->failing = 1; /* a link reads memory that would be its callers' again */
        else
            execute_failure(g);
    }
}
