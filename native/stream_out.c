/* What is sent: runs of ready packets, gathered from where they lie, as far as the peer's window,
 * the congestion window and the fixed rate allow. */
#include "stream_out.h"

#include <string.h>

#include "payload.h"

/* Parity is sent when all of its packets have been. */
static uint32_t parity_left(const lc_out *out) {
    const lc_op_slot *s = out->slot;
    if (!out->fec || out->cursor < s->n_ready || s->n_ready + s->n_void < s->n_packets)
        return 0;
    return s->parity->sets - out->parity;
}

static int has_more(const lc_out *out) {
    if (out->round)
        return out->again_left > 0;
    return out->cursor < out->slot->n_ready || parity_left(out);
}

static int round_sent(const lc_out *out) {
    const lc_op_slot *s = out->slot;
    if (out->round)
        return out->again_left == 0 && out->n_told == s->n_packets;
    return out->cursor == s->n_ready && s->n_ready + s->n_void == s->n_packets && !parity_left(out);
}

/* Streams stay in the order of their operations, so that the oldest finishes first; streams of one
 * operation take turns. */
static void list_insert(lc_peer *peer, lc_out *out) {
    lc_out *after = NULL;
    uint32_t number = out->slot->op->number;
    for (lc_out *o = peer->outs; o && (int32_t)(o->slot->op->number - number) <= 0; o = o->next)
        after = o;
    out->prev = after;
    out->next = after ? after->next : peer->outs;
    if (out->next)
        out->next->prev = out;
    if (after)
        after->next = out;
    else
        peer->outs = out;
    out->listed = 1;
}

static void list_remove(lc_peer *peer, lc_out *out) {
    if (out->prev)
        out->prev->next = out->next;
    else
        peer->outs = out->next;
    if (out->next)
        out->next->prev = out->prev;
    out->next = out->prev = NULL;
    out->listed = 0;
}

void lc_out_drop(lc_engine *e, lc_out *out) {
    if (out->listed)
        list_remove(&e->peers[out->peer], out);
}

/* Packets that may go although the peer is not known to be ready. */
static uint32_t eager_room(const lc_engine *e, uint16_t rank) {
    uint32_t used = e->peers[rank].tx_eager;
    return used < e->eager ? e->eager - used : 0;
}

static int may_send(const lc_engine *e, const lc_out *out) {
    return out->slot->op->peers[out->peer].ready || eager_room(e, out->peer);
}

void lc_eager_over(lc_engine *e, lc_op *op, uint16_t peer) {
    e->peers[peer].tx_eager -= op->peers[peer].eager;
    op->peers[peer].eager = 0;
}

void lc_out_wake(lc_engine *e, lc_out *out) {
    if (!out->listed && out->state == LC_OUT_OPEN && has_more(out) && may_send(e, out))
        list_insert(&e->peers[out->peer], out);
}

void lc_out_check(lc_engine *e, lc_out *out) {
    lc_op *op = out->slot->op;
    if (out->state != LC_OUT_OPEN || !round_sent(out) || !op->peers[out->peer].ready)
        return;
    out->state = LC_OUT_SENT;
    out->fin_tries = 0;
    out->fin_ns = e->now + LC_FIN_AGAIN_NS;
    lc_tell_fin(e, out);
    if (!lc_op_resends(op))
        op->outs_open--;
}

void lc_out_done(lc_engine *e, lc_out *out) {
    lc_op *op = out->slot->op;
    if (out->state == LC_OUT_DONE)
        return;
    if (out->state == LC_OUT_OPEN || lc_op_resends(op))
        op->outs_open--;
    out->state = LC_OUT_DONE;
    lc_out_drop(e, out);
}

/* ---- runs ---- */

static uint32_t next_packet(lc_out *out) {
    const lc_op_slot *s = out->slot;
    if (!out->round) {
        uint32_t k = out->cursor++;
        return s->ready ? s->ready[k] : k;
    }
    uint32_t word = out->cursor / 64;
    while (!out->again[word])
        word = word + 1 < lc_words(s->n_packets) ? word + 1 : 0;
    uint32_t k = word * 64 + (uint32_t)__builtin_ctzll(out->again[word]);
    lc_bit_clear(out->again, k);
    out->again_left--;
    out->cursor = word * 64;
    return k;
}

static uint16_t count_of(const lc_op_slot *s, uint32_t k) {
    return s->desc.n_sources ? s->count[k] : 1;
}

static uint32_t wire_bytes(const lc_op *op) {
    return LC_HEADER_BYTES + op->packet_bytes;
}

static uint8_t code_to(lc_engine *e, const lc_op *op, uint16_t peer) {
    return op->call.fec_auto ? lc_fec_choose(&e->peers[peer].fec, op->call.fec) : op->call.fec;
}

/* All of a slot's streams have one parity: that of the path which loses most. */
static uint8_t code_of_slot(lc_engine *e, const lc_op_slot *s) {
    uint8_t found = 0;
    for (uint32_t i = 0; i < s->desc.n_dests; i++) {
        uint8_t code = s->outs[i].state == LC_OUT_DONE ? 0 : code_to(e, s->op, s->outs[i].peer);
        if (code && (!found || code < found))
            found = code;
    }
    return found;
}

/* Adds a packet to its set when it is first sent to anyone. Later it may not be what was sent:
 * in place, the result takes the place of what went into it. */
static void protect(lc_engine *e, lc_out *out, uint32_t k, const uint8_t *payload, uint32_t bytes) {
    const lc_op_slot *s = out->slot;
    lc_parity *p = s->parity;
    if (!p->known)
        lc_parity_begin(p, code_of_slot(e, s), s->n_packets, s->op->packet_bytes);
    if (out->cursor == 1 && p->code && code_to(e, s->op, out->peer))
        out->fec = p->code;
    if (p->sets && out->cursor > p->taken) {
        lc_parity_add(p, k % p->sets, payload, bytes, s->op->packet_bytes, count_of(s, k));
        p->taken++;
    }
}

static void put_packet(lc_engine *e, lc_out *out, lc_run *run, int eager, uint32_t time_us) {
    lc_op_slot *s = out->slot;
    lc_op *op = s->op;
    lc_peer *peer = &e->peers[out->peer];
    int parity = !out->round && out->cursor == s->n_ready;
    uint32_t k = parity ? out->parity++ : next_packet(out);
    uint32_t bytes = lc_payload_bytes(s, k);
    const uint8_t *payload =
        parity ? s->parity->sums + (size_t)k * op->packet_bytes : lc_payload(s, k);
    if (s->parity && !out->round && !parity)
        protect(e, out, k, payload, bytes);
    op->report.parity_sent += (uint64_t)parity;
    lc_header h = {.session = e->expect.session,
                   .link_seq = peer->tx_next++,
                   .op = op->number,
                   .packet = parity ? s->n_packets + k : k,
                   .group = e->config.group,
                   .time_us = time_us,
                   .slot = out->number,
                   .sender = e->config.rank,
                   .receiver = out->peer,
                   .length = (uint16_t)bytes,
                   .count = parity ? s->parity->counts[k] : count_of(s, k),
                   .type = parity ? LC_PARITY : LC_DATA,
                   .eager = (uint8_t)eager,
                   .round = out->round,
                   .format = op->call.dtype,
                   .encoding = op->call.encoding,
                   .fec = out->round ? 0 : out->fec};
    struct iovec *v = &run->iov[2 * run->n_packets];
    lc_wire_put(v[0].iov_base, &h);
    v[0].iov_len = LC_HEADER_BYTES;
    v[1].iov_base = (void *)(uintptr_t)payload;
    v[1].iov_len = bytes;
    run->n_packets++;
    out->sent++;
}

/* Gathers up to most packets of one stream into a run. Returns how many. */
static uint32_t fill_run(lc_engine *e, lc_out *out, uint32_t most) {
    lc_op *op = out->slot->op;
    int ready = op->peers[out->peer].ready;
    if (!ready && most > eager_room(e, out->peer))
        most = eager_room(e, out->peer);
    int i = e->n_runs++;
    lc_run *run = &e->runs[i];
    size_t first = (size_t)i * LC_RUN_PACKETS;
    *run = (lc_run){&e->iov[2 * first], 0, wire_bytes(op), out->peer};
    e->run_op[i] = op;
    /* Sums that this turn of the loop has made would pass for a way of the packets. */
    uint32_t time_us = (uint32_t)(lc_clock_now(e->clock) / 1000);
    for (uint32_t k = 0; k < most; k++)
        run->iov[2 * k].iov_base = e->headers + (first + k) * LC_HEADER_BYTES;
    while (run->n_packets < most && has_more(out)) {
        put_packet(e, out, run, !ready, time_us);
        if (run->iov[2 * run->n_packets - 1].iov_len < op->packet_bytes)
            break; /* a short packet can only be the last of an offloaded send */
    }
    lc_report *r = &op->report;
    r->packets_sent += run->n_packets;
    if (out->round)
        r->packets_resent += run->n_packets;
    e->peers[out->peer].packets_sent += run->n_packets;
    if (!ready) {
        op->peers[out->peer].eager += run->n_packets;
        e->peers[out->peer].tx_eager += run->n_packets;
    }
    return run->n_packets;
}

static uint32_t allowance(lc_engine *e, uint16_t rank, uint32_t packet_bytes) {
    lc_peer *peer = &e->peers[rank];
    uint32_t window = lc_pace_window(&peer->pace, peer->tx_window);
    uint32_t flying = peer->tx_next - peer->tx_acked;
    if (flying >= window) {
        if (!peer->probe_ns)
            peer->probe_ns = e->now + lc_pace_rto(&peer->pace);
        lc_pace_limited(&peer->pace);
        return 0;
    }
    uint32_t most = packet_bytes < LC_RUN_BYTES ? LC_RUN_BYTES / packet_bytes : 1;
    if (most > LC_RUN_PACKETS)
        most = LC_RUN_PACKETS;
    if (most > window - flying)
        most = window - flying;
    most = lc_rate_room(&e->rate, e->now, most, packet_bytes);
    uint32_t may = lc_pace_room(&peer->pace, e->now, most, packet_bytes);
    if (most && !may)
        lc_pace_limited(&peer->pace);
    return may;
}

/* One run for this peer, if it may have one. */
static int serve(lc_engine *e, uint16_t rank) {
    lc_peer *peer = &e->peers[rank];
    while (peer->outs && !may_send(e, peer->outs))
        list_remove(peer, peer->outs); /* other operations have used the room up */
    lc_out *out = peer->outs;
    if (!out)
        return 0;
    uint32_t bytes = wire_bytes(out->slot->op);
    uint32_t most = allowance(e, rank, bytes);
    if (!most)
        return 0;
    uint32_t sent = fill_run(e, out, most);
    lc_rate_spend(&e->rate, e->now, sent, bytes);
    lc_pace_spend(&peer->pace, e->now, sent, bytes);
    list_remove(peer, out);
    if (!has_more(out))
        lc_out_check(e, out);
    else if (may_send(e, out))
        list_insert(peer, out);
    return 1;
}

/* ---- the batch ---- */

static void drop_sent(lc_engine *e, uint32_t packets) {
    int keep = 0;
    for (int i = 0; i < e->n_runs; i++) {
        lc_run run = e->runs[i];
        uint32_t gone = packets < run.n_packets ? packets : run.n_packets;
        packets -= gone;
        for (uint32_t k = 0; k < 2 * gone; k++)
            e->run_op[i]->report.bytes_sent += run.iov[k].iov_len;
        run.iov += 2 * gone;
        run.n_packets -= gone;
        if (run.n_packets) {
            e->run_op[keep] = e->run_op[i];
            e->runs[keep++] = run;
        }
    }
    e->n_runs = keep;
}

/* Returns whether the batch is empty now. */
static int flush_batch(lc_engine *e) {
    if (!e->n_runs)
        return 1;
    for (int i = 0; i < e->n_runs; i++)
        lc_touch(e, e->run_op[i]);
    int error = 0;
    int sent = lc_link_send(e->link, e->runs, e->n_runs, &error);
    if (sent < 0) {
        lc_failure why = {.code = LC_E_SYSTEM, .sys_errno = error, .peer = e->runs[0].peer};
        e->n_runs = 0;
        lc_fail(e, &why);
        return 0;
    }
    drop_sent(e, (uint32_t)sent);
    return !e->n_runs;
}

/* Every peer gets runs until the batch is full. */
int lc_send_data(lc_engine *e) {
    if (lc_failing(e) || !flush_batch(e))
        return 0;
    uint16_t size = e->config.size;
    int more = 1;
    while (more && e->n_runs < LC_BATCH_RUNS) {
        more = 0;
        for (uint16_t i = 0; i < size && e->n_runs < LC_BATCH_RUNS; i++)
            more |= serve(e, (uint16_t)((e->turn + i) % size));
    }
    e->turn = (uint16_t)((e->turn + 1) % size);
    if (!e->n_runs)
        return 0;
    flush_batch(e);
    return 1;
}
