/* Control records in. None is ever acknowledged for its own sake: each is repeated by a timer until
 * what it asks for has happened, so any of them may be lost. */
#include "records_in.h"

#include <string.h>

#include "fair_share.h"
#include "message.h"
#include "silence.h"

static const uint64_t LOOK_NS = 10000000; /* what a site has told is looked at so often, at most */
static const uint64_t FAILED_NS = 1000000000; /* what is known for so long isn't told any more */
/* Of a path's round trip a port believes so much at once, and more only up to so many times the
 * least of its paths. */
static const int64_t PORT_RTT_NS = 500000000, PORT_RTTS = 8;
static const double SMALLEST = 4; /* parts of the largest packet, for a rate */

static int is_message(const lc_record *r) {
    return r->slot == LC_SLOT_MESSAGE;
}

/* A record's operation: of a stream that comes, or of one that is sent. */
static lc_op *op_arriving(const lc_group *g, uint16_t peer, const lc_record *r) {
    return is_message(r) ? lc_message_from(g, peer, r->op) : lc_find_op(g, r->op);
}

static lc_op *op_going(const lc_group *g, uint16_t peer, const lc_record *r) {
    return is_message(r) ? lc_message_to(g, peer, r->op) : lc_find_op(g, r->op);
}

static void answer_done(lc_group *g, uint16_t peer, const lc_record *r, uint32_t missing) {
    lc_record done = {
        .kind = LC_R_DONE, .op = r->op, .slot = r->slot, .round = r->round, .a = missing};
    lc_tell(g, peer, &done);
}

static void mismatch(lc_op *op, uint16_t peer, uint64_t signature, uint64_t elements,
                     uint32_t dtype) {
    lc_failure why = {.code = LC_E_MISMATCH,
                      .peer = peer,
                      .op = op->number,
                      .mine = {op->call.signature, op->call.in_elements, op->call.dtype},
                      .theirs = {signature, elements, dtype}};
    lc_tell_call(op, peer, LC_R_MISMATCH); /* the loop sends it before it fails */
    lc_fail(op->group, &why);
}

/* The answer to whoever goes on with an operation that has failed here: that it is another one, if
 * that is why. Else none, since FIN or DONE would pass the failure for loss. */
static void tell_failed(lc_group *g, uint16_t peer, uint32_t op) {
    const lc_failure *why = &g->broken;
    if (why->code != LC_E_MISMATCH || why->op != op)
        return;
    lc_record r = {.kind = LC_R_MISMATCH,
                   .op = op,
                   .a = (uint32_t)why->mine[2],
                   .c = why->mine[0],
                   .d = why->mine[1]};
    lc_tell(g, peer, &r);
}

/* The signature covers the sizes; a rank's own number of elements may differ (gather). */
static int same_call(const lc_op *op, const lc_record *r) {
    return r->c == op->call.signature && r->a == op->call.dtype;
}

static void peer_ready(lc_op *op, uint16_t peer, uint8_t patient) {
    if (op->peers[peer].ready)
        return;
    op->peers[peer].patient = patient;
    op->peers[peer].ready = op->peers[peer].agreed = 1;
    lc_eager_over(op, peer);
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++) {
            if (s->outs[j].peer != peer)
                continue;
            lc_out_wake(&s->outs[j]);
            lc_out_check(&s->outs[j]);
        }
    }
}

static lc_early *early_of(const lc_path *p, uint32_t group, uint32_t op) {
    return &p->early[(op + group * 2654435761u) % LC_EARLY];
}

void lc_check_early(lc_op *op) {
    const lc_group *g = op->group;
    for (uint16_t i = 0; i < g->config.size; i++) {
        const lc_path *p = g->members[i].path;
        lc_early *early = p && p->early ? early_of(p, g->config.number, op->number) : NULL;
        if (!early || !early->known || early->group != g->config.number || early->op != op->number)
            continue;
        early->known = 0;
        if (early->signature != op->call.signature || early->dtype != op->call.dtype) {
            mismatch(op, i, early->signature, early->elements, early->dtype);
            return;
        }
        peer_ready(op, i, early->patient);
    }
}

/* Not yet, but alive: whoever asks has to wait. */
static void tell_waiting(lc_path *p, uint32_t group, const lc_record *r, uint16_t slot) {
    lc_record answer = {.kind = LC_R_WAIT, .op = r->op, .slot = slot, .round = r->round};
    lc_tell_path(p, group, &answer);
}

/* A process has posted what this one hasn't. One that is forgotten for another is asked for again,
 * by WANT of either side. */
static void note_early(lc_path *p, uint32_t group, const lc_record *r) {
    *early_of(p, group, r->op) = (lc_early){r->c, r->d, group, r->op, r->a, r->b & 1, 1};
    if (r->kind == LC_R_WANT)
        tell_waiting(p, group, r, 0xFFFF);
}

/* READY and WANT: the peer has posted the operation. */
static void on_call(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(g, r->op);
    lc_path *p = g->members[peer].path;
    if (op) {
        if (!same_call(op, r)) {
            mismatch(op, peer, r->c, r->d, r->a);
            return;
        }
        if (r->kind == LC_R_WANT)
            lc_tell_call(op, peer, LC_R_READY);
        peer_ready(op, peer, r->b & 1);
        lc_take_waiting(g, peer);
    } else if (!lc_op_posted(g, r->op)) {
        if (r->op - g->next_op < LC_OPS)
            note_early(p, g->config.number, r);
    } else if (lc_op_failed(g, r->op)) {
        tell_failed(g, peer, r->op);
    } else if (r->kind == LC_R_WANT) {
        lc_record all = *r;
        all.slot = 0xFFFF;
        answer_done(g, peer, &all, 0);
    }
}

/* How long packets may still come after the end of their stream: what this peer's did before, a
 * quarter of a round trip, and never less than the floor. Before packets are given up for good,
 * four times as long as they were late before; asking for them too early costs no more than a
 * resend. The part of the round trip is for a path that isn't known: it fades with every four
 * streams of which nothing came late. */
static uint64_t reorder_allowance(const lc_in *in) {
    const lc_path *p = lc_path_from(in);
    const lc_group_config *config = &in->slot->op->group->config;
    uint64_t floor = config->reorder_ns ? config->reorder_ns : LC_REORDER_NS;
    uint64_t late = lc_is_last_round(in) ? 4 * p->late_ns : p->late_ns;
    uint64_t unknown = p->settled < 64 ? p->pace.measure.rtt_ns / 4 >> p->settled / 4 : 0;
    return lc_later(lc_later(late, unknown), floor);
}

/* Whether DONE is on its way. Should it be lost, FIN comes again, and that one is answered. */
static int was_answered(const lc_group *g, lc_path *p, const lc_record *r) {
    int answered = p->done_told && lc_names(&p->done, g->config.number, r->op, r->slot);
    if (answered)
        p->done_told = 0;
    return answered;
}

/* An end that was put off counts from when the round was sent: asking too early costs a reliable
 * stream no more than a resend. */
static uint64_t since_end(const lc_in *in, const lc_record *r) {
    uint64_t ns = r->c < LC_FIN_AGAIN_NS / 1000 ? r->c * 1000 : LC_FIN_AGAIN_NS;
    return in->slot->level->reliable ? ns : 0;
}

/* The round that the stream is in has been sent. */
static void close_round(lc_in *in, const lc_record *r) {
    lc_host *h = in->slot->op->group->host;
    in->state = LC_IN_CLOSING;
    in->n_told = r->a;
    in->nack_ns = 0;
    if (!in->fin_ns && !in->started_ns)
        in->excused_ns = h->now; /* until now it may have stood in its sender's queue */
    in->fin_ns = h->now - since_end(in, r);
    in->close_ns = lc_later(in->fin_ns + reorder_allowance(in), h->now);
    if (in->close_ns < h->tick_ns)
        h->tick_ns = in->close_ns;
}

/* Nothing came of asking: the sender has heard of all that is missing here and has none of it. It
 * was lost on a level below, or it died with the rank that had it. */
static int has_nothing(const lc_in *in, const lc_record *r) {
    const lc_op *op = in->slot->op;
    return in->round && r->round == in->round && !r->a && in->state == LC_IN_OPEN && !op->letter &&
           (op->may_lose || op->group->n_dead);
}

/* The end of a stream whose operation isn't here, not yet or not any more. */
static void fin_of_none(lc_group *g, uint16_t peer, const lc_record *r) {
    if (is_message(r)) {
        if (!g->broken.code && lc_message_ended(g, peer, r->op))
            answer_done(g, peer, r, 0);
    } else if (lc_op_failed(g, r->op)) {
        tell_failed(g, peer, r->op);
    } else if (lc_op_posted(g, r->op)) {
        answer_done(g, peer, r, 0);
    }
}

static void on_fin(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_path *p = g->members[peer].path;
    lc_link_seen(p, r->b, 0);
    if (!is_message(r))
        lc_agree(g, r->op, peer); /* it is told to none but those who do */
    if (was_answered(g, p, r))
        return;
    lc_op *op = op_arriving(g, peer, r);
    if (!op) {
        fin_of_none(g, peer, r);
        return;
    }
    lc_in *in = lc_op_in(op, r->slot, peer);
    if (!in) {
        g->live.malformed++;
        return;
    }
    if (!lc_in_learn(in, r->d)) {
        g->live.malformed++;
        return;
    }
    in->ask_ns = 0;
    int open = in->state == LC_IN_OPEN;
    if (has_nothing(in, r)) {
        lc_give_up(in, op->may_lose ? LC_CAUSE_LOSS : LC_CAUSE_PEER);
    } else if (in->reporting && r->round != in->round) {
        in->nack_ns = g->host->now; /* it has not heard all of what was given up */
    } else if (in->state == LC_IN_SETTLED) {
        answer_done(g, peer, r, in->slot->n_packets - in->n_arrived);
        lc_told(in);
    } else if (r->round == in->round) {
        if (open)
            close_round(in, r);
    } else if (in->nack_ns && lc_next_round(r->round) == in->round) {
        in->nack_ns = g->host->now; /* it has not heard what is missing */
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
        if (missing && (s->at_once || s->count[k])) {
            lc_bit_set(out->again, k);
            out->again_left += r->kind == LC_R_NACK;
        }
    }
}

/* A NACK of the next round ends the one before. LOST ends them all, and needs no end of any: no
 * word of a round that the receiver asked for and then gave up may have come here. */
static int begins_round(const lc_out *out, const lc_record *r) {
    if (r->kind == LC_R_LOST)
        return out->slot->level->feedback && !out->given_up && out->state != LC_OUT_DONE;
    return out->state == LC_OUT_SENT && !out->given_up && lc_next_round(out->round) == r->round;
}

static void begin_round(lc_out *out, const lc_record *r) {
    size_t bytes = lc_words(out->slot->n_packets) * 8;
    lc_out_drop(out);
    out->given_up = r->kind == LC_R_LOST;
    memset(out->again, 0, bytes);
    memset(out->told, 0, bytes);
    out->round = r->round;
    out->state = LC_OUT_OPEN;
    out->cursor = out->sent = out->again_left = out->n_told = 0;
    out->fin_tries = 0;
    out->fin_ns = out->slot->op->group->host->now + lc_pace_rto(&lc_path_to(out)->pace);
}

/* The operation has ended here since nothing came from the peer for too long, and the peer still
 * says what it has given up. That nobody listens any more is told by the end that it waits for. */
static void end_reporting(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_record fin = {.kind = LC_R_FIN,
                     .op = r->op,
                     .slot = r->slot,
                     .round = r->round,
                     .b = g->members[peer].path->tx_next};
    lc_tell(g, peer, &fin);
}

static void on_nack(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_op *op = op_going(g, peer, r);
    lc_out *out = op ? lc_op_out(op, r->slot, peer) : NULL;
    if (!op && !is_message(r) && r->kind == LC_R_LOST && lc_op_posted(g, r->op) &&
        !lc_op_failed(g, r->op)) {
        end_reporting(g, peer, r);
        return;
    }
    if (!out || !out->again || !r->round || r->a % 128 || r->a >= r->b ||
        r->b > out->slot->n_packets) {
        g->live.stale++;
        return;
    }
    if (begins_round(out, r)) {
        begin_round(out, r);
    } else if (out->round != r->round || out->given_up != (r->kind == LC_R_LOST)) {
        g->live.stale++;
        return;
    } else if (out->state == LC_OUT_SENT) {
        lc_tell_fin(out);
        return;
    }
    if (out->state != LC_OUT_OPEN)
        return;
    take_told(out, r);
    lc_out_wake(out);
    lc_out_check(out);
}

/* A stream of an operation that has ended here; its group may have gone, too. */
static void late_fin_done(lc_host *h, const lc_path *p, uint32_t group, const lc_record *r) {
    for (uint32_t i = 0; i < h->n_late_fins; i++) {
        const lc_late_fin *t = &h->late_fins[i];
        if (t->process == p->number && lc_names(&t->stream, group, r->op, r->slot)) {
            h->late_fins[i] = h->late_fins[--h->n_late_fins];
            return;
        }
    }
}

/* The peer has settled a stream; for an operation that it has ended altogether, every stream. */
static void on_done(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_op *op = op_going(g, peer, r);
    if (!op) {
        late_fin_done(g->host, g->members[peer].path, g->config.number, r);
        return;
    }
    for (uint32_t i = 0; i < op->n_slots; i++) {
        lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].peer == peer && (s->outs[j].number == r->slot || r->slot == 0xFFFF))
                lc_out_done(&s->outs[j]);
    }
    if (r->slot == 0xFFFF)
        peer_ready(op, peer, 0); /* it must have been; its word was lost */
}

/* More was acknowledged than was sent: a damaged number got through, here or there. Numbers only
 * have to grow, so going on from where the peer is makes both agree again. */
static void jump(lc_path *p, const lc_record *r) {
    p->tx_next = p->tx_acked = p->tx_seen = r->a;
    p->tx_bytes = 0;
    if (p->units_at)
        p->units_at[(r->a - 1) % LC_UNITS] = p->tx_units;
    p->tx_received = (uint32_t)r->d;
    p->tx_lacks = 0;
    p->tx_runs = (uint32_t)(r->d >> 32);
    p->aggregates.is_open = 0;
    p->probe_ns = 0;
}

/* Round trip of a path, as the port believes it: all paths share the port, and a peer may delay its
 * acknowledgements, or invent their age. */
static uint64_t port_rtt_ns(const lc_path *p) {
    const lc_interface *via = p->interface;
    int64_t rtt = lc_measure_rtt_ns(&p->pace.measure), least = INT64_MAX;
    if (rtt <= PORT_RTT_NS || lc_exit_of(p)->n_paths < 2)
        return (uint64_t)rtt;
    for (uint16_t i = 0; i < via->n_paths; i++) {
        const lc_path *other = via->paths[i];
        if (other == p || other->pace.same_host || other->leaves_by != p->leaves_by ||
            !other->pace.measure.rtt.known)
            continue;
        int64_t found = lc_measure_rtt_ns(&other->pace.measure);
        least = found < least ? found : least;
    }
    if (least == INT64_MAX || least < PORT_RTT_NS / PORT_RTTS)
        least = PORT_RTT_NS / PORT_RTTS;
    return (uint64_t)(rtt / PORT_RTTS < least ? rtt : PORT_RTTS * least);
}

/* taken: packets that came, with late ones; bytes: of one. */
static lc_port_ack of_port(const lc_path *p, const lc_measure_ack *ack, uint32_t taken,
                           double bytes) {
    return (lc_port_ack){.now = ack->now,
                         .sent_ns = ack->now - ack->elapsed_ns,
                         .rtt_ns = port_rtt_ns(p),
                         .queue_ns = ack->rtt_ns ? p->pace.queue_ns : -1,
                         .moved = bytes * ack->moved,
                         .taken = bytes * taken,
                         .packet = bytes,
                         .burst = lc_loss_burst(&p->loss)};
}

/* What ranks of a site have told of its exit, which their hosts share, counts once. */
static void look_at_site(const lc_host *h, lc_interface *via, lc_exit *exit) {
    uint32_t n = 0;
    double sum = 0;
    if (exit != &via->exits[LC_FAR] || h->now - exit->looked_ns < LOOK_NS)
        return;
    exit->looked_ns = h->now;
    for (uint16_t i = 0; i < via->n_paths; i++) {
        n += via->paths[i]->far_level > 0;
        sum += lc_rate_of_level(via->paths[i]->far_level);
        via->paths[i]->far_level = 0;
    }
    if (n && lc_far_level(via, h->now))
        lc_uplink_shared(&exit->uplink, n, sum / n);
}

/* Its own law leaves the queue that all paths meet to the port's. */
static void tell_port(const lc_host *h, lc_path *p, const lc_measure_ack *ack, uint32_t taken,
                      double bytes) {
    lc_uplink *uplink = &lc_exit_of(p)->uplink;
    uint32_t renewed = lc_uplink_renewed(uplink);
    if (p->pace.renewed != renewed) {
        p->pace.renewed = renewed;
        lc_measure_forget(&p->pace.measure);
    }
    lc_pace_acked(&p->pace, ack, 1, uplink->low_ns);
    lc_port_ack told = of_port(p, ack, taken, bytes);
    look_at_site(h, p->interface, lc_exit_of(p));
    lc_uplink_acked(uplink, &told);
}

/* By itself, or beside others that know nothing of it but what all of them deliver. */
static void tell_path(lc_path *p, const lc_measure_ack *ack, uint32_t taken, double bytes) {
    lc_interface *via = p->interface;
    if (!p->pace.same_host)
        lc_shared_rate_add(&via->rate, ack->now, ack->taken, p->pace.measure.rtt_ns,
                           p->pace.limited);
    p->pace.alone = via->n_paths == 1;
    lc_pace_acked(&p->pace, ack, lc_fair_share(via, p, ack->now), -1);
    if (!lc_leaves_by_port(p))
        return;
    lc_port_ack told = of_port(p, ack, taken, bytes);
    if (lc_uplink_bound(&lc_exit_of(p)->uplink, &told, lc_pace_rate(&p->pace)))
        lc_pace_start(&p->pace);
}

/* Bytes of a packet, on average, of those that the peer hasn't told of so far; it now tells of some
 * more. Packets differ by call. */
static double told_bytes(lc_path *p, uint32_t moved) {
    uint32_t untold = p->tx_next - p->tx_acked;
    double bytes = untold ? p->tx_bytes / untold : lc_wire_bytes_max(p->interface);
    p->tx_bytes -= bytes * moved;
    return bytes;
}

/* Few bytes are no measure for calls of many. */
static void size_pace(lc_path *p, double bytes) {
    double most = lc_wire_bytes_max(p->interface), least = most / SMALLEST;
    int alone = p->interface->n_paths == 1; /* else its share is of all paths' packets */
    if (!p->pace.same_host && (alone || lc_shares_port(p)))
        lc_pace_sized(&p->pace, bytes < least ? least : bytes < most ? bytes : most);
}

/* How many packets more a peer has taken, as far as that can be: of those that it has seen since,
 * and of those that it lacked before. A liar would make the port faster for all. */
static uint32_t believed(lc_path *p, uint32_t taken, uint32_t moved) {
    uint32_t most = moved + p->tx_lacks;
    if ((int32_t)taken < 0) /* it was told before what is known already */
        taken = 0;
    if (taken > most)
        taken = most;
    p->tx_lacks = most - taken < LC_UNITS ? most - taken : LC_UNITS;
    return taken;
}

static void on_ack(lc_host *h, lc_path *p, const lc_record *r) {
    uint32_t moved = r->a - p->tx_acked;
    lc_note_reached(h, p, r->slot);
    if (p->leaves_by == LC_NEAR)
        p->far_level = r->round;
    p->tx_window = p->units_at && r->b > LC_UNITS ? LC_UNITS : r->b;
    if ((int32_t)(r->a - p->tx_next) > 0) {
        jump(p, r);
        return;
    }
    if (moved > p->tx_next - p->tx_acked)
        return; /* older than what we know */
    uint32_t taken = (uint32_t)r->d - p->tx_received, runs = (uint32_t)(r->d >> 32);
    lc_loss_told(&p->loss, r->a - p->tx_seen, taken, runs - p->tx_runs);
    p->tx_runs = runs;
    uint32_t lost = taken < r->a - p->tx_seen ? r->a - p->tx_seen - taken : 0;
    p->tx_received = (uint32_t)r->d;
    p->tx_seen = r->a;
    taken = believed(p, taken, moved);
    if (moved)
        p->probe_ns = 0;
    double bytes = told_bytes(p, moved);
    p->tx_acked = r->a;
    if (p->interface->link->aggregates &&
        lc_aggregates_told(&p->aggregates, p->tx_acked, p->tx_received, p->size.size))
        lc_link_go_singly(p->interface->link, p->number, p->aggregates.mode != LC_TOGETHER);
    lc_measure_ack ack = {.now = h->now, .moved = moved, .taken = moved > lost ? moved - lost : 0};
    if (moved && r->c >> 32) { /* an answer that comes again tells how old it is */
        uint32_t kept_us = (uint32_t)(r->c >> 32) - 1;
        uint32_t back_us = (uint32_t)(h->came_ns / 1000) - (uint32_t)r->c;
        if (kept_us <= back_us && back_us < 60000000) { /* else a clock that makes no sense */
            ack.rtt_ns = (uint64_t)(back_us - kept_us) * 1000 + 1;
            ack.elapsed_ns = (uint64_t)((uint32_t)(h->now / 1000) - (uint32_t)r->c) * 1000;
            ack.sent_us = (uint32_t)r->c;
            ack.arrived_us = r->op;
        }
    }
    if (moved)
        size_pace(p, bytes);
    if (lc_shares_port(p))
        tell_port(h, p, &ack, taken, bytes);
    else
        tell_path(p, &ack, taken, bytes);
    if (p->pace.rate > 0)
        p->rate = p->pace.rate * p->pace.packet_bytes;
}

/* Packets of older operations go first. Its receiver can't tell: the order may be another there. */
static int stands_behind(const lc_out *out) {
    return lc_path_to(out)->outs->slot->op->order < out->slot->op->order;
}

static void on_ask(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_op *op = op_going(g, peer, r);
    lc_record answer = {.kind = LC_R_WAIT, .op = r->op, .slot = r->slot, .round = r->round};
    if (op) {
        lc_out *out = lc_op_out(op, r->slot, peer);
        if (!out)
            return;
        int wants_nack = out->round && out->n_told < out->slot->n_packets;
        if (out->state != LC_OUT_OPEN || wants_nack) {
            lc_tell_fin(out); /* which asks for the rest of the NACK */
            return;
        }
        if (out->listed && !stands_behind(out))
            return; /* it has packets to send and cannot: that is the network's doing */
    } else if (is_message(r)) {
        return;
    } else if (lc_op_failed(g, r->op)) {
        tell_failed(g, peer, r->op);
        return;
    } else if (lc_op_posted(g, r->op)) {
        answer.kind = LC_R_FIN;
        answer.b = g->members[peer].path->tx_next;
    }
    lc_tell(g, peer, &answer);
}

static void on_wait(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_op *op = op_arriving(g, peer, r);
    lc_in *in = op ? lc_op_in(op, r->slot, peer) : NULL;
    if (in)
        in->excused_ns = g->host->now;
}

/* The peer means the same, and has failed since another rank doesn't. The control plane says so,
 * and why, unless the peer has ended the call for its caller, who then has no error to tell of. */
static void failed_there(lc_op *op, uint16_t peer) {
    uint64_t now = op->group->host->now;
    lc_op_peer *p = &op->peers[peer];
    lc_failure why = {.code = LC_E_ABORTED, .peer = peer, .op = op->number};
    if (!p->failed_ns)
        p->failed_ns = now;
    else if (now - p->failed_ns > FAILED_NS)
        lc_fail(op->group, &why);
}

static void on_mismatch(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_op *op = lc_find_op(g, r->op);
    if (!op)
        return;
    if (same_call(op, r)) {
        failed_there(op, peer);
        return;
    }
    lc_failure why = {.code = LC_E_MISMATCH,
                      .peer = peer,
                      .op = op->number,
                      .mine = {op->call.signature, op->call.in_elements, op->call.dtype},
                      .theirs = {r->c, r->d, r->a}};
    lc_fail(g, &why);
}

/* A record about a group that is not here: not yet, or not any more. Who asks about one that was
 * closed hears nothing: it must not wait for it. */
static void on_absent(lc_host *h, lc_path *p, uint32_t group, const lc_record *r) {
    if (r->kind == LC_R_DONE)
        late_fin_done(h, p, group, r);
    else if (lc_group_gone(h, group))
        h->live.stale++;
    else if ((r->kind == LC_R_READY || r->kind == LC_R_WANT) && !is_message(r))
        note_early(p, group, r);
    else if (r->kind == LC_R_ASK || r->kind == LC_R_MESSAGE || (r->kind == LC_R_MAIL && r->a))
        tell_waiting(p, group, r, r->slot);
    else
        h->live.stale++;
}

static void on_group(lc_group *g, uint16_t peer, const lc_record *r) {
    if (r->kind != LC_R_WAIT) /* which is also said of a group that isn't there yet */
        g->members[peer].met = 1;
    switch (r->kind) {
    case LC_R_READY:
        if (is_message(r))
            lc_message_granted(g, peer, r);
        else
            on_call(g, peer, r);
        break;
    case LC_R_WANT:
        on_call(g, peer, r);
        break;
    case LC_R_MESSAGE:
        lc_message_announced(g, peer, r);
        break;
    case LC_R_MAIL:
        lc_message_mail(g, peer, r);
        break;
    case LC_R_FIN:
        on_fin(g, peer, r);
        break;
    case LC_R_NACK:
    case LC_R_LOST:
        on_nack(g, peer, r);
        break;
    case LC_R_DONE:
        on_done(g, peer, r);
        break;
    case LC_R_MISMATCH:
        on_mismatch(g, peer, r);
        break;
    case LC_R_ASK:
        on_ask(g, peer, r);
        break;
    case LC_R_WAIT:
        on_wait(g, peer, r);
        break;
    default:
        g->live.malformed++;
        break;
    }
}

void lc_control_arrived(lc_host *h, lc_path *p, lc_group *g, const lc_header *header,
                        const uint8_t *payload) {
    uint16_t peer = g ? g->rank_of_process[p->number] : 0;
    h->live.control_received++;
    for (uint16_t i = 0; i < header->count; i++) {
        lc_record r;
        if (lc_record_get(payload + (size_t)i * LC_RECORD_BYTES, &r) != LC_GOOD) {
            h->live.malformed++;
        } else if (r.kind == LC_R_ACK) {
            on_ack(h, p, &r);
        } else if (r.kind == LC_R_PROBE) {
            lc_link_seen(p, r.a, 0);
            p->ack_due = 1;
        } else if (!header->group) {
            h->live.malformed++;
        } else if (!g) {
            on_absent(h, p, header->group, &r);
        } else if (!g->failing.code) {
            on_group(g, peer, &r);
        }
    }
}
