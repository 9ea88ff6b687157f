/* What happens when nothing arrives: questions are repeated, rounds and deadlines end. */
#include "timers.h"

#include "message.h"
#include "silence.h"

static const uint64_t TICK_BUSY_NS = 500000, TICK_QUIET_NS = 5000000, TICK_IDLE_NS = 100000000;
static const uint64_t QUIET_AFTER_NS = 20000000;
static const uint64_t POOL_AGE_NS = 2000000000; /* how long memory that none wants is kept, and as
                                                  long again at most */
/* So many packets in a row of which none came: at 90% loss that happens once in 5e11 times. */
static const uint64_t EMPTY_PACKETS = 256;
static const uint32_t SOON = 4; /* times that something is said again soon */
static const uint64_t ASK_NS = 100000000, WANT_MAX_NS = 100000000;

/* When to say once more what was said so many times again. The first times that is soon: it may
 * have been lost each time, and an operation waits for it. Then it is the rarer, the longer nothing
 * is heard. */
static uint64_t backoff(const lc_host *h, const lc_path *p, uint32_t tries) {
    uint64_t silent = (h->now - p->heard_ns) / 4;
    uint32_t longer = tries < SOON ? 0 : tries - SOON + 1;
    uint64_t wait = lc_pace_rto(&p->pace) << (longer < 3 ? longer : 3);
    uint64_t again = h->now + lc_later(wait, silent < LC_AGAIN_MAX_NS ? silent : LC_AGAIN_MAX_NS);
    return lc_later(again, lc_tell_again_ns(h, p));
}

static void ask(lc_in *in) {
    const lc_op *op = in->slot->op;
    uint64_t now = op->group->host->now;
    if (now - lc_later(in->last_ns, op->started_ns) < ASK_NS || now < in->ask_ns)
        return;
    lc_record r = {
        .kind = LC_R_ASK, .op = op->number, .slot = in->slot->desc.number, .round = in->round};
    lc_tell(op->group, in->peer, &r);
    in->ask_ns = now + ASK_NS;
}

static void ask_for_missing(lc_in *in) {
    in->nack_ns = backoff(in->slot->op->group->host, lc_path_from(in), 1);
    lc_tell_missing(in);
}

static void tick_in(lc_in *in, uint64_t now, uint64_t *next) {
    if (in->tell_next && (in->reporting || in->state == LC_IN_OPEN)) {
        lc_tell_more(in);
        in->nack_ns = backoff(in->slot->op->group->host, lc_path_from(in), 1);
        if (now + TICK_BUSY_NS < *next)
            *next = now + TICK_BUSY_NS;
    }
    if (in->state == LC_IN_CLOSING) {
        if (now >= in->close_ns)
            lc_round_ended(in);
        else if (in->close_ns < *next)
            *next = in->close_ns;
    } else if (in->reporting) {
        if (lc_find_silence(in->slot->op, in->peer, lc_patience(in->slot->op, in->peer)))
            lc_told(in);
        else if (now >= in->nack_ns)
            ask_for_missing(in);
    } else if (in->state == LC_IN_OPEN) {
        if (lc_overdue(in)) {
            lc_give_up(in, LC_CAUSE_DEADLINE);
            return;
        }
        if (in->nack_ns && now >= in->nack_ns)
            ask_for_missing(in);
        ask(in);
    }
}

static void tick_out(lc_out *out, const lc_host *h) {
    lc_op *op = out->slot->op;
    if (out->state == LC_OUT_DONE)
        return;
    int wants_nack = out->state == LC_OUT_OPEN && out->round && out->n_told < out->slot->n_packets;
    if (out->state == LC_OUT_OPEN && !wants_nack && op->peers[out->peer].ready) {
        /* As long as it is sent, the receiver owes no word but acknowledgements. */
        lc_member *m = &op->group->members[out->peer];
        m->heard_ns = lc_later(m->heard_ns, m->path->heard_ns);
    }
    if (!out->slot->level->reliable && lc_find_silence(op, out->peer, lc_patience(op, out->peer))) {
        lc_out_suspend(out);
        return;
    }
    lc_out_resume(out);
    if ((out->state == LC_OUT_SENT || wants_nack) && h->now >= out->fin_ns) {
        lc_tell_fin(out);
        out->fin_ns = out->fin_put_off ? h->now + LC_FIN_AGAIN_NS
                                       : backoff(h, lc_path_to(out), out->fin_tries++);
        out->fin_put_off = 0;
    }
}

static void tick_wants(lc_op *op, uint64_t now) {
    for (uint16_t i = 0; i < op->group->config.size; i++) {
        lc_op_peer *p = &op->peers[i];
        if (!p->dest || p->ready || now < p->want_ns)
            continue;
        lc_tell_call(op, i, LC_R_WANT);
        p->want_wait_ns = p->want_wait_ns * 2 < WANT_MAX_NS ? p->want_wait_ns * 2 : WANT_MAX_NS;
        p->want_ns = now + p->want_wait_ns;
    }
}

/* ---- failures ---- */

/* A peer that keeps the operation from ending, or -1. One that has not posted it comes first:
 * others may only pass its absence on. */
static int waited_for(const lc_op *op) {
    for (uint16_t i = 0; i < op->group->config.size; i++)
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

/* Whether the operation waits for reliable streams from the peer, or owes it some. */
static int awaits_from(const lc_op *op, uint16_t peer) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources && s->level->reliable; j++)
            if (s->ins[j].peer == peer && s->ins[j].state != LC_IN_SETTLED)
                return 1;
    }
    return 0;
}

static int owes_to(const lc_op *op, uint16_t peer) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests && s->level->reliable; j++)
            if (s->outs[j].peer == peer && s->outs[j].state != LC_OUT_DONE)
                return 1;
    }
    return 0;
}

/* Whether nothing comes of what the peer sends: of the group's rounds that have ended, or of all
 * that it says it has sent by this path, since a round of a large stream may never end. */
static int is_empty(const lc_emptiness *e, uint64_t begin, uint64_t now, uint64_t link_ns) {
    return e->packets >= EMPTY_PACKETS && now - lc_later(e->since_ns, begin) > link_ns;
}

/* Whether the link from a peer that this operation needs is dead, and why. A peer that is late
 * answers whatever it is asked, and sends nothing before it is READY: so either silence, or packets
 * that it has sent and of which none came, are the link's doing. */
static int is_dead_link(const lc_op *op, uint16_t peer, lc_failure *why) {
    const lc_host *h = op->group->host;
    const lc_member *m = &op->group->members[peer];
    uint64_t link_ns = op->group->config.link_ns;
    uint64_t begin = lc_later(op->started_ns, h->awake_ns);
    uint64_t silent = h->now - lc_later(m->heard_ns, begin);
    *why = (lc_failure){
        .code = LC_E_LINK, .peer = peer, .op = op->number, .of_message = op->letter != NULL};
    if (silent > link_ns && (awaits_from(op, peer) || owes_to(op, peer))) {
        why->mine[2] = silent;
        return 1;
    }
    const lc_emptiness *e = &m->empty;
    if (!is_empty(e, begin, h->now, link_ns) && m->path)
        e = &m->path->rx_empty;
    if (!is_empty(e, begin, h->now, link_ns) || !awaits_from(op, peer))
        return 0;
    why->mine[0] = e->packets;
    why->mine[2] = h->now - lc_later(e->since_ns, begin);
    return 1;
}

/* The same of the link to it, whose far end says so. */
static int is_unheard_link(const lc_op *op, uint16_t peer, lc_failure *why) {
    const lc_group *g = op->group;
    const lc_member *m = &g->members[peer];
    uint64_t unheard = lc_unheard_ns(m, lc_later(op->started_ns, g->host->awake_ns));
    if (unheard <= g->config.link_ns || (!awaits_from(op, peer) && !owes_to(op, peer)))
        return 0;
    *why = (lc_failure){.code = LC_E_LINK,
                        .peer = peer,
                        .op = op->number,
                        .of_message = op->letter != NULL,
                        .mine = {0, 0, unheard},
                        .theirs = {m->path->unreached}};
    return 1;
}

static int find_dead_link(const lc_op *op, lc_failure *why) {
    const lc_group_config *config = &op->group->config;
    const lc_host *h = op->group->host;
    uint64_t begin = lc_later(op->started_ns, h->awake_ns);
    if (!config->link_ns || h->now - begin <= config->link_ns)
        return 0;
    for (uint16_t i = 0; i < config->size; i++)
        if ((op->peers[i].source || op->peers[i].dest) &&
            (is_dead_link(op, i, why) || is_unheard_link(op, i, why)))
            return 1;
    return 0;
}

static int has_failed(const lc_op *op, lc_failure *why) {
    const lc_host *h = op->group->host;
    if (op->call.timeout_ns && h->now - op->submitted_ns > op->call.timeout_ns) {
        *why = (lc_failure){.code = LC_E_TIMEOUT, .peer = waited_for(op), .op = op->number};
        return 1;
    }
    return find_dead_link(op, why);
}

/* ---- all of them ---- */

static void tick_op(lc_op *op, uint64_t *next) {
    const lc_host *h = op->group->host;
    lc_failure why;
    if (has_failed(op, &why)) {
        lc_fail(op->group, &why);
        return;
    }
    tick_wants(op, h->now);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++)
            tick_in(&s->ins[j], h->now, next);
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            tick_out(&s->outs[j], h);
    }
}

static void tick_letter(lc_letter *letter, uint64_t *next) {
    lc_op *op = letter->op;
    lc_group *g = op->group;
    lc_failure why;
    if (find_dead_link(op, &why)) {
        lc_fail(g, &why);
        return;
    }
    lc_message_tick(g, letter);
    if (!op->n_slots)
        return;
    if (letter->kind == LC_LETTER_SEND)
        tick_out(&op->slots[0].outs[0], g->host);
    else
        tick_in(&op->slots[0].ins[0], g->host->now, next);
}

static void tick_messages(lc_group *g, uint64_t *next) {
    lc_letter *following;
    for (lc_letter *letter = g->mail->live.first; letter && !g->failing.code; letter = following) {
        following = letter->next;
        tick_letter(letter, next);
    }
    if (!g->failing.code)
        lc_mail_tick(g, next);
}

/* The oldest first: its failure is the group's. */
static void tick_group(lc_group *g, uint64_t *next) {
    uint32_t first = g->next_op;
    for (uint32_t left = g->active; left; left -= g->table[first % LC_OPS] != NULL)
        first--;
    for (uint32_t n = first; n != g->next_op && !g->failing.code; n++)
        if (g->table[n % LC_OPS])
            tick_op(g->table[n % LC_OPS], next);
    tick_messages(g, next);
}

static void tick_late_fins(lc_host *h) {
    for (uint32_t i = 0; i < h->n_late_fins;) {
        lc_late_fin *t = &h->late_fins[i];
        if (t->tries >= LC_LATE_FIN_TRIES) {
            *t = h->late_fins[--h->n_late_fins];
            continue;
        }
        lc_path *p = &h->paths[t->process];
        if (h->now >= t->next_ns) {
            lc_record r = {.kind = LC_R_FIN,
                           .op = t->stream.op,
                           .slot = t->stream.slot,
                           .round = t->round,
                           .a = t->sent,
                           .b = p->tx_next,
                           .d = t->word};
            lc_tell_path(p, t->stream.group, &r);
            t->next_ns = backoff(h, p, t->tries++);
        }
        i++;
    }
}

static void tick_path(lc_host *h, lc_path *p, uint64_t *next) {
    uint64_t held = p->n_records ? lc_held_until_ns(h, p) : 0;
    if (held > h->now && held < *next)
        *next = held;
    lc_release_held(h, p);
    lc_keep_alive(h, p);
    if (p->rx_next != p->rx_reported && h->now - p->rx_ack_ns >= lc_ack_ns(p))
        p->ack_due = 1;
    if (atomic_load_explicit(&p->pulse_asked, memory_order_relaxed)) {
        atomic_store(&p->pulse_asked, 0);
        atomic_store(&p->pulse_ns, p->heard_ns);
        lc_tell_probe(p);
    }
    lc_size_check(&p->size, h->now, lc_pace_rto(&p->pace), p->heard_ns, p->tx_acked);
    if (p->probe_ns && h->now >= p->probe_ns) {
        lc_tell_probe(p);
        p->probe_ns = backoff(h, p, 1);
    }
}

/* To free takes time: while packets come, who submits the next operation does it. */
static void tick_pool(lc_host *h) {
    if (h->now - h->pool_aged_ns < POOL_AGE_NS)
        return;
    h->pool_aged_ns = h->now;
    int still = !h->active || h->now - h->busy_ns >= QUIET_AFTER_NS;
    lc_pool_age(&h->pool, &h->pool_lock, still);
}

void lc_tick(lc_host *h) {
    uint64_t interval = TICK_IDLE_NS;
    if (h->active || h->n_late_fins)
        interval = h->now - h->busy_ns < QUIET_AFTER_NS ? TICK_BUSY_NS : TICK_QUIET_NS;
    uint64_t next = h->now + interval;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        for (uint16_t k = 0; k < h->interfaces[i].n_paths; k++)
            tick_path(h, h->interfaces[i].paths[k], &next);
    for (lc_group *g = h->groups; g; g = g->next)
        tick_group(g, &next);
    tick_late_fins(h);
    tick_pool(h);
    h->tick_ns = next;
}
