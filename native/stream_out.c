/* What is sent: runs of ready packets, gathered from where they lie, as far as the peer's window,
 * the congestion window and the fixed rate allow. */
#include "stream_out.h"

#include <string.h>

#include "batch.h"
#include "fair_share.h"
#include "payload.h"
#include "recovery_choice.h"
#include "silence.h"

/* The parity of a window goes when all of its packets have been sent. */
static int sends_parity(const lc_out *out) {
    return !out->round && out->code && lc_encoder_is_due(out->slot->encoder, out->due, out->cursor);
}

static int has_more(const lc_out *out) {
    if (out->round)
        return out->again_left > 0;
    return out->cursor < out->slot->n_ready || sends_parity(out);
}

static int round_sent(const lc_out *out) {
    const lc_op_slot *s = out->slot;
    if (out->round)
        return out->again_left == 0 && out->n_told == s->n_packets;
    return out->cursor == s->n_ready && s->n_ready + s->n_void == s->n_packets &&
           !sends_parity(out);
}

/* Streams stay in the order of their operations, so that the oldest finishes first; streams of one
 * operation take turns. */
static void list_insert(lc_path *p, lc_out *out) {
    lc_out *after = NULL;
    uint64_t order = out->slot->op->order;
    for (lc_out *o = p->outs; o && o->slot->op->order <= order; o = o->next)
        after = o;
    out->prev = after;
    out->next = after ? after->next : p->outs;
    if (out->next)
        out->next->prev = out;
    if (after)
        after->next = out;
    else
        p->outs = out;
    out->listed = 1;
    out->slot->op->group->host->listed++;
}

static void list_remove(lc_path *p, lc_out *out) {
    if (out->prev)
        out->prev->next = out->next;
    else
        p->outs = out->next;
    if (out->next)
        out->next->prev = out->prev;
    out->next = out->prev = NULL;
    out->listed = 0;
    out->slot->op->group->host->listed--;
}

void lc_out_drop(lc_out *out) {
    if (out->listed)
        list_remove(lc_path_to(out), out);
}

/* Packets that may go although the peer is not known to be ready. */
static uint32_t eager_room(const lc_out *out) {
    const lc_group *g = out->slot->op->group;
    const lc_path *p = lc_path_to(out);
    int may = g->members[out->peer].met && lc_may_go_ahead(out->slot, p) &&
              !lc_may_be_forgotten(g->host, p);
    uint32_t most = may ? p->interface->eager : 0;
    uint32_t used = p->tx_eager;
    return used < most ? most - used : 0;
}

static int may_send(const lc_out *out) {
    const lc_op *op = out->slot->op;
    return !op->group->failing.code && (op->peers[out->peer].ready || eager_room(out));
}

void lc_eager_over(lc_op *op, uint16_t peer) {
    if (op->peers[peer].eager)
        op->group->members[peer].path->tx_eager -= op->peers[peer].eager;
    op->peers[peer].eager = 0;
}

void lc_out_wake(lc_out *out) {
    if (!out->listed && !out->suspended && out->state == LC_OUT_OPEN && has_more(out) &&
        may_send(out))
        list_insert(lc_path_to(out), out);
}

/* Whether its end needn't be told at once: the peer says by itself that it has all, and until then
 * nobody waits. */
static int is_patient(const lc_out *out) {
    return out->slot->op->copy_bytes && out->slot->level->reliable && !out->round;
}

void lc_out_check(lc_out *out) {
    lc_op *op = out->slot->op;
    if (out->state != LC_OUT_OPEN || out->suspended || !round_sent(out) ||
        !op->peers[out->peer].ready)
        return;
    out->state = LC_OUT_SENT;
    out->fin_tries = 0;
    out->sent_ns = op->group->host->now;
    out->fin_ns = out->sent_ns + LC_FIN_AGAIN_NS;
    if (op->quiet && !out->round)
        out->fin_ns = out->sent_ns + lc_pace_rto(&lc_path_to(out)->pace);
    else if (!is_patient(out))
        lc_tell_fin(out);
    else
        out->fin_put_off = 1;
    if (!lc_resends(out->slot->level, out->rounds))
        op->outs_open--;
    lc_touch(op);
}

/* Whether the operation can't end before it. */
static int is_open(const lc_out *out) {
    int unsent = out->state == LC_OUT_OPEN;
    return !out->suspended &&
           (unsent || (out->state == LC_OUT_SENT && lc_resends(out->slot->level, out->rounds)));
}

void lc_out_suspend(lc_out *out) {
    lc_op *op = out->slot->op;
    if (out->suspended)
        return;
    if (is_open(out))
        op->outs_open--;
    out->suspended = 1;
    lc_out_drop(out);
    lc_touch(op);
}

void lc_out_resume(lc_out *out) {
    if (!out->suspended)
        return;
    out->suspended = 0;
    if (is_open(out))
        out->slot->op->outs_open++;
    lc_out_wake(out);
    lc_out_check(out);
}

void lc_out_done(lc_out *out) {
    lc_op *op = out->slot->op;
    if (out->state == LC_OUT_DONE)
        return;
    if (is_open(out))
        op->outs_open--;
    out->state = LC_OUT_DONE;
    lc_out_drop(out);
    lc_touch(op);
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
    return s->at_once ? 1 : s->count[k];
}

/* Adds a packet to its set when it is first sent to anyone. Later it may not be what was sent:
 * in place, the result takes the place of what went into it. */
static void protect(lc_out *out, uint32_t k, const uint8_t *payload, uint32_t bytes) {
    const lc_op_slot *s = out->slot;
    lc_encoder *e = s->encoder;
    if (e->code && out->cursor > e->taken) {
        lc_encoder_add(e, s->op->gf, k, payload, bytes, s->packet_bytes, count_of(s, k));
        e->taken++;
    }
}

/* A packet on its way: what the header says of it, and where it lies. */
typedef struct {
    const uint8_t *payload;
    uint32_t packet, bytes;
    uint16_t count;
} parcel;

static parcel next_data(lc_out *out) {
    lc_op_slot *s = out->slot;
    uint32_t k = next_packet(out), bytes = lc_payload_bytes(s, k);
    const uint8_t *payload = lc_payload(s, k);
    if (!out->round && out->cursor == 1)
        lc_choose_recovery(out);
    if (s->encoder && !out->round)
        protect(out, k, payload, bytes);
    return (parcel){payload, k, bytes, count_of(s, k)};
}

static parcel next_parity(lc_out *out) {
    const lc_op_slot *s = out->slot;
    lc_encoded row = lc_encoder_row(s->encoder, out->code, &out->due, &out->parity);
    return (parcel){s->encoder->rows + row.at * s->packet_bytes, s->n_packets + row.number,
                    lc_payload_bytes(s, row.longest), s->encoder->counts[row.at]};
}

static void put_packet(lc_out *out, lc_run *run, uint64_t *contents, int eager, uint32_t time_us) {
    lc_op_slot *s = out->slot;
    lc_op *op = s->op;
    const lc_host *host = op->group->host;
    lc_path *path = lc_path_to(out);
    int parity = sends_parity(out);
    parcel p = parity ? next_parity(out) : next_data(out);
    op->report.parity_sent += (uint64_t)parity;
    lc_header h = {.session = host->session,
                   .link_seq = path->tx_next++,
                   .op = op->number,
                   .packet = p.packet,
                   .group = op->group->config.number,
                   .time_us = time_us,
                   .slot = out->number,
                   .sender = host->config.process,
                   .receiver = path->number,
                   .length = (uint16_t)p.bytes,
                   .count = p.count,
                   .type = parity ? LC_PARITY : LC_DATA,
                   .eager = (uint8_t)eager,
                   .round = out->round,
                   .format = op->call.dtype,
                   .encoding = out->slot->out_codec->encoding,
                   .code = out->round ? 0 : lc_out_word(out)};
    struct iovec *v = &run->iov[2 * run->n_packets];
    lc_wire_put(v[0].iov_base, &h);
    v[0].iov_len = LC_HEADER_BYTES;
    v[1].iov_base = (void *)(uintptr_t)p.payload;
    v[1].iov_len = p.bytes;
    if (path->units_at) {
        path->tx_units += lc_units(path->interface, run->packet_bytes);
        path->units_at[h.link_seq % LC_UNITS] = path->tx_units;
    }
    contents[run->n_packets] = s->contents && !parity ? s->contents + p.packet : 0;
    run->n_packets++;
    out->sent++;
}

/* Whether what is to be told to the peer can go in the datagram of the stream's next packet: it is
 * the last one, so that no packets of one size are torn apart. */
static int carries_control(const lc_out *out) {
    const lc_op_slot *s = out->slot;
    const lc_interface *via = lc_path_to(out)->interface;
    if (out->round || s->n_ready - out->cursor != 1 || sends_parity(out))
        return 0;
    uint32_t k = s->ready ? s->ready[out->cursor] : out->cursor;
    uint32_t control = lc_control_bytes(lc_path_to(out));
    uint32_t bytes = control + lc_payload_bytes(s, k);
    return control <= LC_HEADER_BYTES + via->control_bytes && bytes <= via->payload_bytes &&
           lc_datagram_bytes(lc_path_to(out), bytes) <= lc_path_to(out)->size.size &&
           lc_units(via, LC_HEADER_BYTES + bytes) <= lc_units(via, lc_wire_bytes(out));
}

/* Makes pieces of the run's only packet, where its path doesn't carry it as one. */
static void cut(const lc_host *h, const lc_path *p, lc_run *run, uint64_t *contents) {
    const lc_interface *via = p->interface;
    uint32_t bytes = lc_datagram_bytes(p, (uint32_t)run->iov[1].iov_len);
    uint32_t n = lc_size_pieces(&p->size, bytes, lc_head_bytes(via));
    if (n < 2)
        return;
    const lc_header like = {.session = h->session,
                            .link_seq = p->tx_next - 1,
                            .time_us = (uint32_t)(h->now / 1000),
                            .sender = h->config.process,
                            .receiver = p->number};
    run->packet_bytes = via->tag_bytes + lc_pieces_cut(run->iov, (uint16_t)n, &like);
    run->n_packets = n;
    memset(contents, 0, n * sizeof *contents);
}

/* Gathers up to most packets of one stream into a run. Returns how many. */
static uint32_t fill_run(lc_host *h, lc_out *out, uint32_t most) {
    lc_op *op = out->slot->op;
    lc_path *path = lc_path_to(out);
    int ready = op->peers[out->peer].ready;
    if (!ready && most > eager_room(out))
        most = eager_room(out);
    lc_interface *via = path->interface;
    int i = lc_batch_add(via, op);
    lc_run *run = &via->runs[i];
    size_t first = (size_t)i * LC_RUN_PACKETS;
    int is_alike = out->slot->contents && !via->tag_bytes; /* sealed, each is another one */
    *run = (lc_run){.iov = &via->iov[2 * first],
                    .packet_bytes = lc_wire_bytes(out),
                    .peer = path->number,
                    .receivers = (uint16_t)(is_alike ? out->slot->desc.n_dests : 1),
                    .contents = &via->contents[first]};
    /* Sums that this turn of the loop has made would pass for a way of the packets. */
    uint32_t time_us = (uint32_t)(lc_clock_now(h->clock) / 1000);
    int too_large = run->packet_bytes > path->size.size;
    most = too_large ? 1 : most;
    for (uint32_t k = 0; k < most; k++)
        run->iov[2 * k].iov_base = via->headers + (first + k + too_large) * LC_HEADER_BYTES;
    uint8_t *datagram = via->records_out + (size_t)i * lc_control_room(via);
    uint32_t ahead = carries_control(out) ? lc_control_ahead(h, path, datagram) : 0;
    via->run_ahead[i] = ahead;
    if (ahead) {
        run->iov[0].iov_base = datagram + ahead;
        most = 1;
    }
    while (run->n_packets < most && has_more(out)) {
        put_packet(out, run, &via->contents[first], !ready, time_us);
        if (run->iov[2 * run->n_packets - 1].iov_len < out->slot->packet_bytes)
            break; /* a short packet can only be the last of an offloaded send */
    }
    if (ahead) {
        run->iov[0] = (struct iovec){datagram, ahead + LC_HEADER_BYTES};
        run->packet_bytes += ahead;
    }
    uint32_t sent = run->n_packets;
    if (too_large)
        cut(h, path, run, &via->contents[first]);
    uint32_t datagram_bytes = via->tag_bytes;
    datagram_bytes += (uint32_t)(run->iov[0].iov_len + run->iov[1].iov_len);
    lc_size_sent(&path->size, datagram_bytes, run->n_packets, path->tx_next, h->now);
    lc_aggregates_sent(&path->aggregates, path->tx_next - sent, sent, run->n_packets > 1,
                       path->tx_received);
    lc_batch_seal(h, via, run, i);
    lc_report *r = &op->report;
    r->packets_sent += sent;
    if (out->round) {
        r->packets_resent += sent;
        if (out->slot->level->reliable)
            r->resent_reliable += sent;
    }
    op->group->members[out->peer].packets_sent += sent;
    if (!ready) {
        op->peers[out->peer].eager += sent;
        path->tx_eager += sent;
    }
    return sent;
}

/* After a pause several paths begin at once, and what each knows of its rate may be what it had
 * while the others had nothing to send. */
static void begin_anew(const lc_host *h, lc_path *p) {
    if (lc_pace_rests(&p->pace, h->now) && !lc_units_flying(p))
        lc_pace_begin(&p->pace, h->now,
                      lc_shares_port(p) ? 1 : lc_fair_share_to_begin(p->interface, p));
}

static uint32_t allowance(lc_host *h, lc_path *p, uint32_t packet_bytes) {
    uint32_t room = lc_window_room(p, packet_bytes);
    if (!room) {
        if (!p->probe_ns)
            p->probe_ns = h->now + lc_pace_rto(&p->pace);
        lc_pace_limited(&p->pace);
        return 0;
    }
    uint32_t most = packet_bytes < LC_RUN_BYTES ? LC_RUN_BYTES / packet_bytes : 1;
    if (most > LC_RUN_PACKETS)
        most = LC_RUN_PACKETS;
    if (most > room)
        most = room;
    if (!p->interface->link->local)
        most = lc_rate_room(&h->rate, h->now, most, packet_bytes);
    uint32_t may = lc_pace_room(&p->pace, h->now, most, packet_bytes);
    if (most && !may)
        lc_pace_limited(&p->pace);
    if (!may || !lc_leaves_by_port(p))
        return may;
    lc_exit *exit = lc_exit_of(p);
    may = lc_uplink_room(&exit->uplink, h->now, may, packet_bytes, exit->n_sending);
    if (!may && !lc_shares_port(p))
        lc_pace_limited(&p->pace);
    return may;
}

/* One run on this path, if it may have one. */
static int serve(lc_host *h, lc_path *p) {
    while (p->outs && !may_send(p->outs))
        list_remove(p, p->outs); /* other operations have used the room up */
    lc_out *out = p->outs;
    if (!out)
        return 0;
    uint32_t bytes = lc_wire_bytes(out);
    begin_anew(h, p);
    uint32_t most = allowance(h, p, bytes);
    if (!most)
        return 0;
    uint32_t sent = fill_run(h, out, most);
    if (!p->interface->link->local)
        lc_rate_spend(&h->rate, h->now, sent, bytes);
    lc_pace_spend(&p->pace, h->now, sent, bytes);
    p->tx_bytes += (double)sent * bytes;
    if (lc_leaves_by_port(p))
        lc_uplink_spend(&lc_exit_of(p)->uplink, h->now, (double)sent * bytes);
    lc_note_sent(h, p);
    list_remove(p, out);
    if (!has_more(out))
        lc_out_check(out);
    else if (may_send(out))
        list_insert(p, out);
    return 1;
}

/* ---- turns ---- */

/* In memory, whoever sleeps is woken by what is sent and finds all of it there; a system call that
 * takes as much would keep this thread from what has come. */
static int batch_runs(const lc_interface *via) {
    return via->link->local ? LC_BATCH_RUNS : LC_BATCH_RUNS_FAR;
}

/* Every path gets runs until the batch is full. */
static int send_by(lc_host *h, lc_interface *via) {
    uint16_t n = via->n_paths;
    if (!n || via->failed.code || !lc_batch_flush(h, via))
        return 0;
    if (via->control_waits)
        lc_send_control_by(h, via);
    if (via->control_waits) /* READY among it, perhaps, which eager packets must not pass */
        return 0;
    int more = 1, most = batch_runs(via);
    for (int i = 0; i < LC_UPLINKS; i++)
        via->exits[i].n_sending = 0;
    for (uint16_t i = 0; i < n && via->paces_port; i++)
        lc_exit_of(via->paths[i])->n_sending +=
            via->paths[i]->outs && !via->paths[i]->pace.same_host;
    while (more && via->n_runs < most) {
        more = 0;
        uint16_t first = via->turn;
        for (uint16_t i = 0; i < n && via->n_runs < most; i++) {
            uint16_t k = (uint16_t)((first + i) % n);
            if (!serve(h, via->paths[k]))
                continue;
            more = 1;
            if (via->paces_port) /* whoever is next, however often nothing may go */
                via->turn = (uint16_t)((k + 1) % n);
        }
    }
    if (!via->paces_port)
        via->turn = (uint16_t)((via->turn + 1) % n);
    if (!via->n_runs)
        return 0;
    via->moved_ns = h->now;
    lc_batch_flush(h, via);
    return 1;
}

static int has_data_without_room(const lc_interface *via) {
    for (uint16_t i = 0; i < via->n_paths; i++) {
        const lc_out *first = via->paths[i]->outs;
        if (first && !carries_control(first))
            return 1;
    }
    return 0;
}

void lc_tell_before_data(lc_host *h) {
    for (uint16_t i = 0; i < h->n_interfaces; i++) {
        if (!has_data_without_room(&h->interfaces[i]))
            continue;
        lc_send_control(h);
        return;
    }
}

int lc_send_data(lc_host *h) {
    int any = 0;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        any |= send_by(h, &h->interfaces[(h->turn + i) % h->n_interfaces]);
    h->turn = (uint16_t)((h->turn + 1) % h->n_interfaces);
    return any;
}
