/* Control records out: they wait in a list of each peer's until the loop flushes them. */
#include "control_out.h"

#include <string.h>

void lc_tell(lc_engine *e, uint16_t peer, const lc_record *record) {
    lc_peer *p = &e->peers[peer];
    if (p->n_records < LC_RECORDS && !p->dead)
        p->records[p->n_records++] = *record;
}

void lc_tell_call(lc_engine *e, lc_op *op, uint16_t peer, uint8_t kind) {
    lc_record r = {.kind = kind,
                   .op = op->number,
                   .a = op->call.dtype,
                   .c = op->call.signature,
                   .d = op->call.in_elements};
    lc_tell(e, peer, &r);
}

void lc_tell_fin(lc_engine *e, lc_out *out) {
    lc_record r = {.kind = LC_R_FIN,
                   .op = out->slot->op->number,
                   .slot = out->number,
                   .round = out->round,
                   .a = out->sent,
                   .b = e->peers[out->peer].tx_next};
    /* While parts of a NACK or LOST are missing, the round before it is the one that is over. */
    if (out->state == LC_OUT_OPEN)
        r.round--;
    lc_tell(e, out->peer, &r);
}

void lc_tell_probe(lc_engine *e, uint16_t peer) {
    lc_record r = {.kind = LC_R_PROBE, .a = e->peers[peer].tx_next};
    lc_tell(e, peer, &r);
}

static uint64_t missing_word(const lc_in *in, uint32_t base) {
    uint32_t n = in->slot->n_packets;
    if (base >= n)
        return 0;
    const lc_call *call = &in->slot->op->call;
    uint64_t miss = ~in->arrived[base / 64];
    if (in->needed && in->round > call->repair)
        miss &= in->needed[base / 64];
    return n - base < 64 ? miss & ((1ull << (n - base)) - 1) : miss;
}

/* Each record names what is missing of 128 packets, and says that nothing else is missing before b,
 * where the next record begins. So the sender knows when it has heard of every packet, whichever
 * records were lost and whatever arrives between one telling and the next. */
void lc_tell_missing(lc_engine *e, lc_in *in) {
    const lc_op_slot *s = in->slot;
    lc_record r = {.kind = in->telling ? LC_R_LOST : LC_R_NACK,
                   .op = s->op->number,
                   .slot = s->desc.number,
                   .round = in->round};
    r.c = missing_word(in, 0);
    r.d = missing_word(in, 64);
    for (uint32_t base = 128; base < s->n_packets; base += 128) {
        uint64_t c = missing_word(in, base);
        uint64_t d = missing_word(in, base + 64);
        if (!(c | d))
            continue;
        r.b = base;
        lc_tell(e, in->peer, &r);
        r.a = base;
        r.c = c;
        r.d = d;
    }
    r.b = s->n_packets;
    lc_tell(e, in->peer, &r);
}

/* The echo travels with the time it was kept here, or waiting would pass for a long way. It is told
 * once: what FIN or PROBE say about later packets, or none that came, tells nothing of the way. */
static lc_record ack_of(const lc_engine *e, const lc_peer *p) {
    lc_record r = {.kind = LC_R_ACK, .a = p->rx_next, .b = e->window, .d = p->rx_taken};
    if (p->rx_echo_ns) {
        r.c = ((e->now - p->rx_echo_ns) / 1000 + 1) << 32 | p->rx_echo_us;
        r.op = (uint32_t)(p->rx_echo_ns / 1000);
    }
    return r;
}

/* The link has taken a datagram with the acknowledgement and the first n records. */
static void control_went(lc_engine *e, lc_peer *p, uint32_t n) {
    p->rx_echo_ns = 0;
    p->rx_reported = p->rx_next;
    p->rx_ack_ns = e->now;
    p->ack_due = 0;
    p->n_records -= n;
    memmove(p->records, p->records + n, p->n_records * sizeof *p->records);
}

static uint32_t records_in_one(const lc_engine *e, const lc_peer *p) {
    uint32_t room = e->config.payload_bytes / LC_RECORD_BYTES - 1;
    return p->n_records < room ? p->n_records : room;
}

/* Puts one datagram of records for a peer into a run, an acknowledgement first. */
static void put_control(lc_engine *e, uint16_t rank, lc_run *run, int i) {
    lc_peer *p = &e->peers[rank];
    uint32_t n = records_in_one(e, p);
    uint8_t *payload = e->control_out + (size_t)i * e->config.payload_bytes;
    lc_record ack = ack_of(e, p);
    lc_record_put(payload, &ack);
    for (uint32_t k = 0; k < n; k++)
        lc_record_put(payload + (size_t)(k + 1) * LC_RECORD_BYTES, &p->records[k]);
    lc_header h = {.session = e->expect.session,
                   .group = e->config.group,
                   .time_us = (uint32_t)(e->now / 1000),
                   .sender = e->config.rank,
                   .receiver = rank,
                   .length = (uint16_t)((n + 1) * LC_RECORD_BYTES),
                   .count = (uint16_t)(n + 1),
                   .type = LC_CONTROL};
    size_t first = (size_t)i * LC_RUN_PACKETS;
    *run = (lc_run){&e->iov[2 * first], 1, LC_HEADER_BYTES + h.length, rank};
    run->iov[0] = (struct iovec){e->headers + first * LC_HEADER_BYTES, LC_HEADER_BYTES};
    run->iov[1] = (struct iovec){payload, h.length};
    lc_wire_put(run->iov[0].iov_base, &h);
}

/* Gathers a datagram for each of the peers from *next on that have something to hear, as many as
 * fit a batch. Returns how many. */
static int gather_control(lc_engine *e, lc_run *runs, uint16_t *next) {
    int n = 0;
    for (; n < LC_BATCH_RUNS && *next < e->config.size; (*next)++) {
        const lc_peer *p = &e->peers[*next];
        if (!p->n_records && !p->ack_due)
            continue;
        put_control(e, *next, &runs[n], n);
        n++;
    }
    return n;
}

/* Sends one batch. Returns whether the link took all of it; *more: some peer has further records.
 */
static int flush_some(lc_engine *e, const lc_run *runs, int n, int *more) {
    int error = 0;
    int sent = lc_link_send(e->link, runs, n, &error);
    if (sent < 0) {
        lc_failure why = {.code = LC_E_SYSTEM, .sys_errno = error, .peer = runs[0].peer};
        lc_fail(e, &why);
        return 0;
    }
    for (int i = 0; i < sent; i++) {
        lc_peer *p = &e->peers[runs[i].peer];
        control_went(e, p, records_in_one(e, p));
        *more |= p->n_records > 0;
    }
    e->live.control_sent += (uint64_t)sent;
    e->control_waits = sent < n;
    return sent == n;
}

/* Control follows the data that it speaks of: only when no data waits for the link. What the link
 * doesn't take stays in its list, and its echo untold. */
void lc_send_control(lc_engine *e) {
    lc_run runs[LC_BATCH_RUNS];
    e->control_waits = 0;
    int more = e->n_runs == 0;
    while (more) {
        more = 0;
        uint16_t next = 0;
        for (int n; (n = gather_control(e, runs, &next)) > 0;)
            if (!flush_some(e, runs, n, &more))
                return;
    }
}
