/* Control records out: they wait in a list of each path's until the loop flushes them. */
#include "records_out.h"

#include <string.h>

#include "batch.h"
#include "silence.h"

enum { LOOK_BACK = 16 };
static const double COPIES_MOST = 8, COPIES_S = 0.0005; /* of sending them */

/* Whether what is sent by itself goes out several times. */
static int is_copied(const lc_path *p) {
    return lc_leaves_by_port(p) && lc_uplink_lost(&lc_exit_of(p)->uplink) >= LC_OVERRUN_LOSSY;
}

/* Copies of a question are answered by one word. */
static int waits(const lc_path *p, uint32_t group, const lc_record *record) {
    if (!p->n_records || !is_copied(p))
        return 0;
    uint32_t first = p->n_records > LOOK_BACK ? p->n_records - LOOK_BACK : 0;
    for (uint32_t i = first; i < p->n_records; i++)
        if (p->records[i].group == group && !memcmp(&p->records[i].record, record, sizeof *record))
            return 1;
    return 0;
}

void lc_tell_path(lc_path *p, uint32_t group, const lc_record *record) {
    p->hold_ns = 0;
    if (p->records && p->n_records < LC_RECORDS && !waits(p, group, record))
        p->records[p->n_records++] = (lc_queued){*record, group};
}

void lc_tell(lc_group *g, uint16_t peer, const lc_record *record) {
    const lc_member *m = &g->members[peer];
    if (!m->dead)
        lc_tell_path(m->path, g->config.number, record);
}

void lc_tell_soon(lc_group *g, uint16_t peer, const lc_record *record) {
    const lc_member *m = &g->members[peer];
    lc_host *h = g->host;
    lc_path *p = m->path;
    uint64_t until = p->n_records ? p->hold_ns : h->now + LC_HOLD_NS;
    lc_tell(g, peer, record);
    p->hold_ns = until;
    h->held_ns = lc_later(h->held_ns, until);
    if (until && until < h->tick_ns)
        h->tick_ns = until;
}

static lc_record call_of(const lc_op *op, uint8_t kind) {
    return (lc_record){.kind = kind,
                       .op = op->number,
                       .a = op->call.dtype,
                       .b = op->copy_bytes > 0,
                       .c = op->call.signature,
                       .d = op->call.in_elements};
}

void lc_tell_call(lc_op *op, uint16_t peer, uint8_t kind) {
    lc_record r = call_of(op, kind);
    lc_tell(op->group, peer, &r);
}

void lc_tell_ready_soon(lc_op *op, uint16_t peer) {
    lc_record r = call_of(op, LC_R_READY);
    lc_tell_soon(op->group, peer, &r);
}

void lc_tell_fin(lc_out *out) {
    lc_record r = {.kind = LC_R_FIN,
                   .op = out->slot->op->number,
                   .slot = out->number,
                   .round = out->round,
                   .a = out->sent,
                   .b = lc_path_to(out)->tx_next,
                   .c = (out->slot->op->group->host->now - out->sent_ns) / 1000,
                   .d = lc_out_word(out)};
    /* While parts of a NACK or LOST are missing, the round before it is the one that is over. */
    if (out->state == LC_OUT_OPEN)
        r.round--;
    lc_tell(out->slot->op->group, out->peer, &r);
}

void lc_tell_probe(lc_path *p) {
    lc_record r = {.kind = LC_R_PROBE, .a = p->tx_next};
    lc_tell_path(p, 0, &r);
}

static uint64_t missing_word(const lc_in *in, uint32_t base) {
    uint32_t n = in->slot->n_packets;
    if (base >= n)
        return 0;
    uint64_t miss = ~in->arrived[base / 64];
    if (in->needed && in->round > in->rounds)
        miss &= in->needed[base / 64];
    return n - base < 64 ? miss & ((1ull << (n - base)) - 1) : miss;
}

/* Each record names what is missing of 128 packets, and says that nothing else is missing before b,
 * where the next record begins. So the sender knows when it has heard of every packet, whichever
 * records were lost and whatever arrives between one record and the next. What finds no room in
 * the path's list is told once that has been sent (lc_tell_more). */
static void tell_from(lc_in *in, uint32_t first) {
    const lc_op_slot *s = in->slot;
    const lc_path *p = lc_path_from(in);
    lc_record r = {.kind = in->reporting ? LC_R_LOST : LC_R_NACK,
                   .op = s->op->number,
                   .slot = s->desc.number,
                   .round = in->round,
                   .a = first};
    in->tell_next = 0;
    r.c = missing_word(in, first);
    r.d = missing_word(in, first + 64);
    for (uint32_t base = first + 128; base < s->n_packets; base += 128) {
        uint64_t c = missing_word(in, base);
        uint64_t d = missing_word(in, base + 64);
        if (!(c | d))
            continue;
        r.b = base;
        lc_tell(s->op->group, in->peer, &r);
        r.a = base;
        r.c = c;
        r.d = d;
        if (p->n_records >= LC_RECORDS - LC_RECORDS / 8) { /* the rest is for other records */
            in->tell_next = base;
            return;
        }
    }
    r.b = s->n_packets;
    lc_tell(s->op->group, in->peer, &r);
}

void lc_tell_missing(lc_in *in) {
    tell_from(in, 0);
}

void lc_tell_more(lc_in *in) {
    tell_from(in, in->tell_next);
}

/* The echo travels with the time it was kept here, or waiting would pass for a long way. It is told
 * once: what FIN or PROBE say about later packets, or none that came, tells nothing of the way. */
static lc_record ack_of(const lc_host *h, const lc_path *p) {
    lc_record r = {.kind = LC_R_ACK,
                   .round = p->leaves_by == LC_NEAR ? lc_far_level(p->interface, h->now) : 0,
                   .slot = lc_heard_age(h, p),
                   .a = p->rx_next,
                   .b = p->interface->window,
                   .d = (uint64_t)p->rx_runs.count << 32 | p->rx_taken};
    if (p->rx_echo_ns) {
        r.c = ((h->now - p->rx_echo_ns) / 1000 + 1) << 32 | p->rx_echo_us;
        r.op = (uint32_t)(p->rx_echo_ns / 1000);
    }
    return r;
}

/* The records of one packet that the path carries, besides the acknowledgement: the first ones, as
 * long as they are of one group. */
static uint32_t records_in_one(const lc_path *p) {
    const lc_interface *via = p->interface;
    uint32_t carried = p->size.size - lc_head_bytes(via);
    uint32_t payload = carried < via->control_bytes ? carried : via->control_bytes;
    uint32_t room = payload / LC_RECORD_BYTES - 1;
    uint32_t n = 0;
    while (n < p->n_records && n < room && p->records[n].group == p->records[0].group)
        n++;
    return n;
}

uint64_t lc_tell_again_ns(const lc_host *h, const lc_path *p) {
    if (!p->unanswered_ns)
        return 0;
    uint64_t silent = h->now - p->unanswered_ns, then = p->told_ns - p->unanswered_ns;
    if (silent <= lc_pace_rto(&p->pace))
        return 0;
    return p->told_ns + (then < LC_AGAIN_MAX_NS ? then : LC_AGAIN_MAX_NS);
}

uint64_t lc_held_until_ns(const lc_host *h, const lc_path *p) {
    return lc_later(p->hold_ns, lc_tell_again_ns(h, p));
}

/* A pause that is longer than any between repeated records: what went before it had no answer to
 * wait for. */
static void note_told(const lc_host *h, lc_path *p) {
    if (!p->unanswered_ns || h->now - p->told_ns > 2 * LC_AGAIN_MAX_NS)
        p->unanswered_ns = h->now;
    p->told_ns = h->now;
}

/* The acknowledgement and the first n records are on their way. */
static void control_went(lc_host *h, lc_path *p, uint32_t n) {
    lc_note_sent(h, p);
    if (n)
        note_told(h, p);
    p->rx_echo_ns = 0;
    p->rx_largest = 0;
    p->rx_reported = p->rx_next;
    p->rx_units = 0;
    p->rx_ack_ns = h->now;
    p->ack_due = 0;
    p->n_records -= n;
    p->hold_ns = 0;
    memmove(p->records, p->records + n, p->n_records * sizeof *p->records);
}

/* Writes a packet of the first n records, an acknowledgement before them. Returns the bytes of its
 * payload. */
static uint16_t write_control(const lc_host *h, const lc_path *p, uint32_t n, uint8_t *to,
                              uint8_t *payload) {
    lc_record ack = ack_of(h, p);
    lc_record_put(payload, &ack);
    for (uint32_t k = 0; k < n; k++)
        lc_record_put(payload + (size_t)(k + 1) * LC_RECORD_BYTES, &p->records[k].record);
    lc_header header = {.session = h->session,
                        .group = n ? p->records[0].group : 0,
                        .op = lc_records_check(payload, n + 1),
                        .slot = (uint16_t)(p->rx_largest < UINT16_MAX ? p->rx_largest : UINT16_MAX),
                        .time_us = (uint32_t)(h->now / 1000),
                        .sender = h->config.process,
                        .receiver = p->number,
                        .length = (uint16_t)((n + 1) * LC_RECORD_BYTES),
                        .count = (uint16_t)(n + 1),
                        .type = LC_CONTROL};
    lc_wire_put(to, &header);
    return header.length;
}

/* Puts one datagram for a process into a run. */
static void put_control(const lc_host *h, const lc_path *p, lc_run *run, int i) {
    lc_interface *via = p->interface;
    uint32_t n = records_in_one(p);
    size_t first = (size_t)i * LC_RUN_PACKETS;
    uint8_t *header = via->headers + first * LC_HEADER_BYTES;
    uint8_t *payload = via->records_out + (size_t)i * lc_control_room(via);
    uint16_t length = write_control(h, p, n, header, payload);
    *run = (lc_run){.iov = &via->iov[2 * first],
                    .n_packets = 1,
                    .packet_bytes = LC_HEADER_BYTES + via->tag_bytes + length,
                    .peer = p->number,
                    .copied = 1};
    run->iov[0] = (struct iovec){header, LC_HEADER_BYTES};
    run->iov[1] = (struct iovec){payload, length};
    lc_batch_seal(h, via, run, i);
}

static int has_control(const lc_path *p) {
    return p->n_records || p->ack_due;
}

uint32_t lc_control_bytes(const lc_path *p) {
    return has_control(p) ? LC_HEADER_BYTES + (p->n_records + 1) * LC_RECORD_BYTES : 0;
}

uint32_t lc_control_ahead(lc_host *h, lc_path *p, uint8_t *to) {
    if (!has_control(p))
        return 0;
    uint32_t n = records_in_one(p);
    uint16_t length = write_control(h, p, n, to, to + LC_HEADER_BYTES);
    control_went(h, p, n);
    h->live.control_sent++;
    return LC_HEADER_BYTES + (uint32_t)length;
}

/* Of a datagram with records. A path that loses packets in bursts would lose them, and what repeats
 * them once in a round trip, as often as a burst is long. */
static uint32_t copies(const lc_path *p) {
    if (!p->n_records || !is_copied(p))
        return 1;
    double bytes = LC_HEADER_BYTES + (records_in_one(p) + 1) * LC_RECORD_BYTES;
    double most = 1 + COPIES_S * p->rate / bytes, burst = lc_loss_burst(&p->loss);
    if (most > COPIES_MOST)
        most = COPIES_MOST;
    return (uint32_t)(burst < most ? burst : most);
}

/* Gathers a datagram for each of the paths from *next on that have something to tell, as many as
 * fit a batch. Returns how many. */
static int gather_control(const lc_host *h, const lc_interface *via, lc_run *runs, uint16_t *next) {
    int n = 0;
    for (; n < LC_BATCH_RUNS && *next < via->n_paths; (*next)++) {
        const lc_path *p = via->paths[*next];
        if (!has_control(p) || (!p->ack_due && lc_held_until_ns(h, p) > h->now))
            continue;
        for (uint32_t left = copies(p); left && n < LC_BATCH_RUNS; left--, n++)
            put_control(h, p, &runs[n], n);
    }
    return n;
}

/* Sends one batch. Returns whether the link took all of it; *more: some process has further
 * records. */
static int flush_some(lc_host *h, lc_interface *via, const lc_run *runs, int n, int *more) {
    int error = 0;
    int sent = lc_link_send(via->link, runs, n, &error);
    if (sent < 0) {
        lc_fail_interface(h, via, error);
        return 0;
    }
    for (int i = 0; i < sent; i++) {
        lc_path *p = &h->paths[runs[i].peer];
        if (i && runs[i].peer == runs[i - 1].peer)
            continue; /* a copy */
        lc_size_sent(&p->size, runs[i].packet_bytes, 1, p->tx_next, h->now);
        control_went(h, p, records_in_one(p));
        if (lc_leaves_by_port(p))
            lc_uplink_spend(&lc_exit_of(p)->uplink, h->now, runs[i].packet_bytes);
        *more |= p->n_records > 0;
    }
    if (sent)
        via->moved_ns = h->now;
    h->live.control_sent += (uint64_t)sent;
    via->control_waits = sent < n;
    return sent == n;
}

/* Probes as large as the packets that they stand for, for those paths on which some are due. */
static void send_probes(lc_host *h, lc_interface *via, lc_path *p) {
    static const uint8_t padding[LC_CUT_BYTES];
    lc_run runs[LC_SIZE_PROBES];
    uint32_t sizes[LC_SIZE_PROBES];
    uint32_t n = lc_size_probes(&p->size, h->now, lc_pace_rto(&p->pace), sizes);
    const lc_record ask = {.kind = LC_R_PROBE, .a = p->tx_next};
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *to = via->records_out + (size_t)i * lc_control_room(via);
        lc_header header = {.session = h->session,
                            .time_us = (uint32_t)(h->now / 1000),
                            .sender = h->config.process,
                            .receiver = p->number,
                            .length = (uint16_t)(sizes[i] - lc_head_bytes(via)),
                            .count = 1,
                            .type = LC_CONTROL};
        lc_record_put(to + LC_HEADER_BYTES, &ask);
        header.op = lc_records_check(to + LC_HEADER_BYTES, 1);
        lc_wire_put(to, &header);
        runs[i] = (lc_run){.iov = &via->iov[2 * (size_t)i * LC_RUN_PACKETS],
                           .n_packets = 1,
                           .packet_bytes = sizes[i],
                           .peer = p->number,
                           .copied = 1};
        runs[i].iov[0] = (struct iovec){to, LC_HEADER_BYTES + LC_RECORD_BYTES};
        runs[i].iov[1] =
            (struct iovec){(void *)(uintptr_t)padding, header.length - LC_RECORD_BYTES};
        lc_batch_seal(h, via, &runs[i], (int)i);
    }
    int error = 0;
    if (n && lc_link_send(via->link, runs, (int)n, &error) < 0)
        lc_fail_interface(h, via, error);
}

/* Control follows the data that it speaks of: only when no data waits for the link. What the link
 * doesn't take stays in its list, and its echo isn't sent. */
void lc_send_control_by(lc_host *h, lc_interface *via) {
    lc_run runs[LC_BATCH_RUNS];
    via->control_waits = 0;
    int more = via->n_runs == 0 && !via->failed.code;
    while (more) {
        more = 0;
        uint16_t next = 0;
        for (int n; (n = gather_control(h, via, runs, &next)) > 0;)
            if (!flush_some(h, via, runs, n, &more))
                return;
    }
    for (uint16_t i = 0; via->link->routed && i < via->n_paths; i++)
        if (via->n_runs == 0 && !via->failed.code && lc_size_is_due(&via->paths[i]->size, h->now))
            send_probes(h, via, via->paths[i]);
}

void lc_send_control(lc_host *h) {
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        lc_send_control_by(h, &h->interfaces[i]);
}
