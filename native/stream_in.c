/* Streams that arrive: packets are checked against their stream and combined into its slot; what
 * doesn't come is asked for again or given up. */
#include "stream_in.h"

#include <string.h>

#include "payload.h"
#include "silence.h"

static const uint64_t LATE_MAX_NS = 100000000;

static lc_host *host_of(const lc_in *in) {
    return in->slot->op->group->host;
}

/* ---- deadlines ---- */

/* Silence before this time is not the network's: the peer waited itself, this process didn't run,
 * or the peer sent packets of an older operation, which go first, or of this one's other streams,
 * which take turns. */
static uint64_t excused_until(const lc_in *in) {
    const lc_path *p = lc_path_from(in);
    const lc_op *op = in->slot->op;
    uint64_t excused = lc_later(in->excused_ns, op->group->host->awake_ns);
    int other = p->data_order < op->order ||
                (p->data_order == op->order && p->data_slot != in->slot->desc.number);
    return other ? lc_later(excused, p->data_ns) : excused;
}

/* Nothing comes from the peer, and nothing excuses that. One that hears nothing can only send what
 * goes ahead, and no other stream's packets are a reason to wait for this one's. */
static int has_silent_link(const lc_in *in) {
    const lc_host *h = host_of(in);
    uint64_t patience = lc_patience(in->slot->op, in->peer);
    if (h->now - lc_later(in->excused_ns, h->awake_ns) <= patience ||
        h->now - in->last_ns <= patience)
        return 0;
    enum lc_silence found = lc_find_silence(in->slot->op, in->peer, patience);
    return found == LC_SILENT_TO || (found && h->now - excused_until(in) > patience);
}

int lc_overdue(const lc_in *in) {
    const lc_op *op = in->slot->op;
    const lc_group_config *config = &op->group->config;
    const lc_host *h = op->group->host;
    if (in->slot->level->reliable)
        return 0;
    if (has_silent_link(in))
        return 1;
    if (!in->started_ns && !in->fin_ns) /* it may stand in its sender's queue */
        return 0;
    uint64_t excused = excused_until(in);
    if (lc_in_lacks(in)) {
        /* Only a link on which nothing arrives any more is a reason to do without. */
        uint64_t came = lc_later(in->last_ns, op->started_ns);
        return h->now - lc_later(came, excused) > config->deadline_max_ns;
    }
    if (!in->started_ns)
        return 0;
    if (h->now - lc_later(in->last_ns, excused) > config->deadline_max_ns) {
        /* The link has been silent for hardly less, if it is why. */
        (void)lc_find_silence(in->slot->op, in->peer, config->deadline_max_ns / 2);
        return 1;
    }
    lc_path *p = lc_path_from(in);
    if (lc_still(h, p))
        return 0;
    excused = lc_later(excused, p->back_ns);
    /* The ceiling is for silence: a slow link whose packets keep coming loses nothing by it. */
    if (h->now - lc_later(in->started_ns, excused) <=
        lc_deadline_of(&p->deadline, in->slot->n_packets, config->deadline_min_ns, UINT64_MAX))
        return 0;
    /* What was learnt may be of another path than this one has become: packets that keep coming are
     * waited for, as far apart as they may be by now. */
    return h->now - lc_later(in->last_ns, excused) >
           lc_deadline_silence(&p->deadline, lc_later(in->gap_ns, p->pace.measure.rtt_ns));
}

/* ---- rounds ---- */

static void settle(lc_in *in, int cause) {
    lc_op_slot *s = in->slot;
    lc_op *op = s->op;
    lc_host *h = op->group->host;
    lc_member *m = &op->group->members[in->peer];
    uint32_t missing = s->n_packets - in->n_arrived;
    in->state = LC_IN_SETTLED;
    in->settled_ns = h->now;
    in->cause = (uint8_t)cause;
    op->report.packets_missing += missing;
    m->packets_missing += missing;
    /* Copies may have been repaired by other rules than the sums that rates are for. */
    if (!s->level->reliable && s->desc.combine == LC_ADD && cause != LC_CAUSE_PEER) {
        m->offered += s->n_packets;
        m->delivered += in->n_arrived;
    }
    if (missing && op->report.cause < cause)
        op->report.cause = cause;
    lc_path *p = m->path;
    p->late_ns -= p->late_ns / 64;
    p->settled++;
    p->last = (lc_stream_name){op->group->config.number, op->number, s->desc.number};
    p->last_fin_ns = missing ? in->fin_ns : 0;
    /* A pause of either process says nothing of the path. */
    int paused = p->back_ns > in->started_ns || h->awake_ns > in->started_ns;
    if (in->n_arrived > 1 && !paused)
        lc_deadline_add(&p->deadline, in->last_ns - in->started_ns, in->gap_ns, in->n_arrived);
    lc_touch(op);
}

static void tell_done(const lc_in *in, int soon) {
    const lc_op_slot *s = in->slot;
    lc_record done = {.kind = LC_R_DONE,
                      .op = s->op->number,
                      .slot = s->desc.number,
                      .round = in->round,
                      .a = s->n_packets - in->n_arrived};
    if (soon)
        lc_tell_soon(s->op->group, in->peer, &done);
    else
        lc_tell(s->op->group, in->peer, &done);
}

/* The round is asked for again unless something of it comes by then. */
static void await_round(lc_in *in) {
    in->nack_ns = host_of(in)->now + lc_pace_rto(&lc_path_from(in)->pace);
}

void lc_give_up(lc_in *in, int cause) {
    lc_op_slot *s = in->slot;
    if (cause == LC_CAUSE_DEADLINE)
        s->op->report.deadline_hits++;
    settle(in, cause);
    int tells = s->level->feedback && !s->level->reliable && cause != LC_CAUSE_PEER;
    if (tells) {
        in->reporting = 1;
        s->op->reporting++;
    }
    for (uint32_t k = 0; k < s->n_packets; k++)
        if (!lc_bit(in->arrived, k))
            lc_source_settled(s, k);
    if (tells) {
        in->round = lc_next_round(in->round);
        await_round(in);
        lc_tell_missing(in);
        return;
    }
    tell_done(in, 0);
}

void lc_told(lc_in *in) {
    if (!in->reporting)
        return;
    in->reporting = 0;
    in->slot->op->reporting--;
    lc_touch(in->slot->op);
}

void lc_inject_round(lc_in *in) {
    if (!in->lost)
        return;
    const lc_op_slot *s = in->slot;
    const lc_group *g = s->op->group;
    lc_inject link = lc_inject_link(&g->config.inject, g->members[in->peer].inject_loss);
    uint64_t key = lc_inject_key(&link, g->config.fault_group, s->op->number, s->desc.number,
                                 in->peer, g->config.rank, in->round);
    /* What is lost of the others doesn't depend on how much parity there is. */
    uint32_t parity = in->round ? 0 : lc_parity_room(s->level, s->n_packets);
    (void)lc_inject_losses(&link, key, s->n_packets + parity, in->lost);
}

/* What the peer has sent in the round that ends, if nothing of it came. */
static void note_empty_round(lc_in *in) {
    lc_member *m = &in->slot->op->group->members[in->peer];
    if (in->n_told && !in->came)
        lc_note_empty(&m->empty, in->n_told, host_of(in)->now);
    in->n_told = 0;
    in->came = 0;
}

void lc_round_ended(lc_in *in) {
    note_empty_round(in);
    if (lc_is_last_round(in)) {
        int lacks = lc_in_lacks(in);
        if (!lacks || lc_overdue(in)) {
            lc_give_up(in, lacks ? LC_CAUSE_DEADLINE : LC_CAUSE_LOSS);
            return;
        }
    }
    in->round = lc_next_round(in->round);
    in->state = LC_IN_OPEN;
    await_round(in);
    lc_inject_round(in);
    lc_tell_missing(in);
}

/* ---- packets ---- */

/* A packet that came after the end of its stream was said. One that a link held for longer than
 * reordering takes would make every stream with a loss wait for its like. */
static void note_late(const lc_host *h, lc_path *p, uint64_t fin_ns) {
    uint64_t late = h->now - fin_ns;
    if (fin_ns && late > p->late_ns && late <= LATE_MAX_NS + p->pace.measure.rtt_ns)
        p->late_ns = late;
}

static void note_arrival(lc_in *in) {
    uint64_t now = host_of(in)->now;
    if (!in->started_ns)
        in->started_ns = now;
    else if (now - in->last_ns > in->gap_ns)
        in->gap_ns = now - in->last_ns;
    in->last_ns = now;
    in->ask_ns = 0;
    lc_path *p = lc_path_from(in);
    p->data_ns = now;
    p->data_order = in->slot->op->order;
    p->data_slot = in->slot->desc.number;
    if (in->state == LC_IN_CLOSING)
        note_late(host_of(in), p, in->fin_ns);
}

void lc_note_packet(lc_host *h, lc_path *p, const lc_header *header) {
    const lc_interface *via = p->interface;
    p->rx_taken++;
    p->rx_units += lc_units(via, LC_HEADER_BYTES + header->length);
    if (lc_link_seen(p, header->link_seq + 1, 1)) {
        p->rx_echo_us = header->time_us; /* of an old packet it would tell how old that is */
        p->rx_echo_ns = h->came_ns;
    } else {
        p->rx_empty.packets = 0;
        lc_runs_came(&p->rx_runs, header->link_seq);
    }
    uint32_t unreported = p->rx_next - p->rx_reported;
    uint32_t most = (via->window + 3) / 4;
    if (unreported >= (most < LC_ACK_PACKETS ? most : LC_ACK_PACKETS) || p->rx_units >= most ||
        (unreported >= LC_ACK_PACKETS / 8 && h->now - p->rx_ack_ns >= lc_ack_ns(p)))
        p->ack_due = 1;
}

/* Whether as many can have contributed as the packet says: contributions of other sources, and the
 * slot's own, have to fit the group beside them. */
static int is_believable(const lc_in *in, uint32_t k, uint32_t count) {
    const lc_op_slot *s = in->slot;
    return s->count[k] + count + (s->desc.own != LC_OWN_NONE) <= s->op->group->config.size;
}

/* Whether a stream can have these means against loss; once they are known, no others. */
static int may_be_word(const lc_in *in, uint64_t word) {
    const lc_op_slot *s = in->slot;
    if (in->told)
        return word == in->word;
    if (word >> LC_WORD_BITS)
        return 0;
    uint16_t code = lc_word_code((uint32_t)word);
    uint8_t rounds = lc_word_rounds((uint32_t)word);
    if (rounds && !(s->level->choose & LC_CHOOSE_ROUNDS))
        return 0;
    return in->decoder ? lc_parity_allows(s->level, code, s->n_packets) : !code;
}

static void learn_word(lc_in *in, uint16_t word) {
    if (in->told)
        return;
    in->told = 1;
    in->word = word;
    if (in->slot->level->choose & LC_CHOOSE_ROUNDS)
        in->rounds = lc_word_rounds(word);
    if (in->decoder)
        lc_decoder_begin(in->decoder, lc_word_code(word), in->slot->n_packets, in->n_arrived > 0);
}

int lc_in_learn(lc_in *in, uint64_t word) {
    if (!word) /* it isn't known any more, or says nothing */
        return 1;
    if (!may_be_word(in, word))
        return 0;
    if (in->state != LC_IN_SETTLED)
        learn_word(in, (uint16_t)word);
    return 1;
}

/* Whether the packet can be of this stream. Later rounds say nothing of its parity. */
static int belongs(const lc_in *in, const lc_header *h) {
    const lc_op_slot *s = in->slot;
    uint32_t k = h->packet;
    if (h->format != s->op->call.dtype || h->encoding != s->in_codec->encoding ||
        (!h->round && !may_be_word(in, h->code)))
        return 0;
    if (h->type == LC_PARITY) {
        lc_shape shape = lc_shape_of(lc_word_code(h->code), s->n_packets);
        if (k < s->n_packets || k - s->n_packets >= shape.parity)
            return 0;
        k = lc_shape_packet(&shape, lc_shape_row(&shape, k - s->n_packets).set, 0);
    }
    return k < s->n_packets && h->length == lc_payload_in_bytes(s, k);
}

/* The sender of a stream that may be resent waits for this word, and needn't say FIN to get it. */
static void tell_whole(const lc_in *in) {
    lc_path *p = lc_path_from(in);
    const lc_op *op = in->slot->op;
    tell_done(in, op->peers[in->peer].patient);
    if (in->state == LC_IN_OPEN) {
        p->done = (lc_stream_name){op->group->config.number, op->number, in->slot->desc.number};
        p->done_told = 1;
    }
}

/* A packet of the stream is here, from the wire or restored. */
static void take(lc_in *in, const lc_header *h, const uint8_t *payload) {
    lc_op_slot *s = in->slot;
    lc_bit_set(in->arrived, h->packet);
    in->n_arrived++;
    s->op->group->members[in->peer].packets_received++;
    s->op->report.packets_received++;
    lc_combine(s, in->peer, h, payload);
    if (in->n_arrived == s->n_packets) {
        int waits = s->op->letter || lc_resends(s->level, in->rounds);
        if (waits && !s->op->quiet)
            tell_whole(in);
        settle(in, LC_CAUSE_COMPLETE);
    }
    lc_source_settled(s, h->packet);
}

/* Of data that lie where they came nothing has been computed yet. */
static void add_others(lc_in *in, uint32_t set, const lc_restorer *r) {
    lc_op_slot *s = in->slot;
    const lc_shape *shape = &in->decoder->shape;
    lc_rs_rows rows = lc_decoder_rows(in->decoder, set, s->in_bytes);
    for (uint32_t i = 0, n = lc_shape_columns(shape, set); i < n; i++) {
        uint32_t k = lc_shape_packet(shape, set, i);
        if (lc_bit(in->arrived, k))
            lc_rs_add(s->op->gf, &rows, r->which, r->e, i, lc_payload(s, k), lc_payload_bytes(s, k),
                      s->count[k]);
    }
}

/* Whether what comes back can be. Nobody may have contributed to a packet, and it was never sent:
 * then its count is 0. */
static int all_believable(const lc_in *in, uint32_t set, const lc_restorer *r) {
    for (uint32_t j = 0; j < r->e; j++) {
        uint32_t k = lc_shape_packet(&in->decoder->shape, set, r->columns[j]);
        if (r->counts[j] && !is_believable(in, k, r->counts[j]))
            return 0;
    }
    return 1;
}

static void take_restored(lc_in *in, uint32_t set, const lc_restorer *r, uint32_t first,
                          uint32_t n) {
    lc_op_slot *s = in->slot;
    for (uint32_t j = 0; j < n; j++) {
        uint32_t k = lc_shape_packet(&in->decoder->shape, set, r->columns[first + j]);
        lc_header h = {.packet = k,
                       .count = r->counts[first + j],
                       .length = (uint16_t)lc_payload_in_bytes(s, k)};
        if (!h.count)
            continue;
        s->op->report.packets_recovered++;
        take(in, &h, r->packets + (size_t)j * s->in_bytes);
    }
}

/* As many rows of the set have come as packets lack: these are restored, or what has come is not of
 * one stream, and the set is left to repair. */
static void restore(lc_in *in, uint32_t set) {
    const lc_op_slot *s = in->slot;
    lc_decoder *d = in->decoder;
    lc_restorer *r = host_of(in)->restorer;
    if (!lc_decoder_can(d, set))
        return;
    int found = lc_decoder_find(d, set, in->arrived, r);
    d->left[set] = 0;
    if (!found)
        return;
    if (d->keeps)
        add_others(in, set, r);
    if (!lc_decoder_solve(d, set, r) || !all_believable(in, set, r))
        return;
    for (uint32_t j = 0; j < r->e; j += LC_RESTORED) {
        uint32_t n = r->e - j < LC_RESTORED ? r->e - j : LC_RESTORED;
        lc_decoder_restore(d, s->op->gf, set, r, j, n, s->in_bytes);
        take_restored(in, set, r, j, n);
    }
}

static void parity_arrived(lc_in *in, const lc_header *h, const uint8_t *payload) {
    lc_op *op = in->slot->op;
    lc_decoder *d = in->decoder;
    uint32_t j = h->packet - in->slot->n_packets;
    if (lc_bit(d->came, j)) {
        op->group->live.repeated++;
        return;
    }
    lc_bit_set(d->came, j);
    op->report.parity_received++;
    op->report.bytes_received += lc_datagram_bytes(lc_path_from(in), h->length);
    if (in->state == LC_IN_SETTLED)
        return; /* that it wasn't needed is as it should be */
    note_arrival(in);
    restore(in, lc_decoder_add_row(d, op->gf, j, payload, h->length, in->slot->in_bytes, h->count));
}

/* A packet of no operation that is here: it came late, or is of one that has failed. */
static void take_stale(lc_group *g, lc_path *p, const lc_header *header) {
    g->live.stale += header->type == LC_DATA;
    if (lc_names(&p->last, g->config.number, header->op, header->slot))
        note_late(g->host, p, p->last_fin_ns);
}

/* The path has brought it: no other group's packets are lost there. This one's are, also where its
 * round never ends. */
static void lose(lc_group *g, lc_member *m, const lc_header *header, int kept) {
    lc_emptiness *e = &m->empty;
    g->live.packets_injected++;
    m->path->rx_empty.packets = 0;
    if (!e->packets++) {
        e->since_ns = g->host->now;
        e->times = 0;
    }
    if (kept)
        lc_link_lost(m->path, header->link_seq);
}

/* Whether injection loses a packet that nothing depends on any more: senders measure their paths by
 * these, too. */
static int is_lost_late(lc_group *g, uint16_t peer, const lc_header *header, int kept) {
    lc_inject link = lc_inject_link(&g->config.inject, g->members[peer].inject_loss);
    if (!(link.loss > 0))
        return 0;
    uint64_t key = lc_inject_key(&link, g->config.fault_group, header->op, header->slot, peer,
                                 g->config.rank, header->round);
    if (!lc_inject_loses(&link, key, header->packet))
        return 0;
    lose(g, &g->members[peer], header, kept);
    return 1;
}

/* Whether injection loses the packet, or its fate belongs to a round that is over. */
static int is_lost(lc_in *in, const lc_header *header, int kept) {
    lc_group *g = in->slot->op->group;
    if (!in->lost)
        return 0;
    if (in->state == LC_IN_SETTLED)
        return is_lost_late(g, in->peer, header, kept);
    if (header->round != in->round) {
        g->live.stale++;
        return 1;
    }
    if (!lc_bit(in->lost, header->packet))
        return 0;
    in->slot->op->report.packets_injected++;
    lose(g, &g->members[in->peer], header, kept);
    return 1;
}

/* A packet of data that has not come before. */
static void data_arrived(lc_in *in, const lc_header *header, const uint8_t *payload) {
    lc_op *op = in->slot->op;
    note_arrival(in);
    if (in->nack_ns && in->state == LC_IN_OPEN && header->round == in->round)
        await_round(in); /* what was asked for was heard */
    op->report.bytes_received += lc_datagram_bytes(lc_path_from(in), header->length);
    take(in, header, payload);
    if (!in->decoder || !in->decoder->code || in->state == LC_IN_SETTLED)
        return;
    restore(in, lc_decoder_add(in->decoder, op->gf, header->packet, payload, header->length,
                               in->slot->in_bytes, header->count));
}

void lc_note_fertile(lc_member *m) {
    m->empty.packets = 0;
}

static void take_into(lc_in *in, const lc_header *header, const uint8_t *payload, int kept) {
    lc_op *op = in->slot->op;
    lc_group *g = op->group;
    lc_path *p = lc_path_from(in);
    if (!belongs(in, header)) {
        g->live.malformed++;
        return;
    }
    if (is_lost(in, header, kept))
        return;
    if (!kept)
        lc_note_packet(g->host, p, header);
    in->came = 1;
    lc_note_fertile(&g->members[in->peer]);
    if (!header->round)
        learn_word(in, header->code);
    if (header->type == LC_PARITY) {
        parity_arrived(in, header, payload);
    } else if (lc_bit(in->arrived, header->packet)) {
        g->live.repeated++;
    } else if (in->state == LC_IN_SETTLED) {
        g->live.stale++;
        note_late(g->host, p, in->fin_ns);
    } else if (!is_believable(in, header->packet, header->count)) {
        g->live.malformed++;
    } else {
        data_arrived(in, header, payload);
    }
}

void lc_in_take_into(lc_in *in, const lc_header *header, const uint8_t *payload) {
    take_into(in, header, payload, 0);
}

void lc_in_take(lc_group *g, uint16_t peer, const lc_header *header, const uint8_t *payload,
                int kept) {
    lc_path *p = g->members[peer].path;
    lc_op *op = lc_find_op(g, header->op);
    lc_in *in = op ? lc_op_in(op, header->slot, peer) : NULL;
    if (in) {
        take_into(in, header, payload, kept);
    } else if (op) {
        g->live.malformed++;
    } else if (!is_lost_late(g, peer, header, kept)) {
        if (!kept)
            lc_note_packet(g->host, p, header);
        lc_note_fertile(&g->members[peer]);
        take_stale(g, p, header);
    }
}
