/* Datagrams in: aggregates are cut into packets, headers are checked, seeded faults are applied. */
#include "datagrams.h"

#include <string.h>

enum { CALLS_PER_TURN = 4, ASK_EVERY_TURNS = 4, MOST_TURNS = 64 };

static const uint64_t QUIET_NS = 200000;

/* A packet of data goes to its group, if that is here and its sender is a member that lives. */
static void deliver(lc_host *h, lc_path *p, lc_group *g, const lc_header *header,
                    const uint8_t *payload) {
    uint16_t peer = g ? g->rank_of_process[p->number] : 0xFFFF;
    if (peer == 0xFFFF) {
        lc_note_packet(h, p, header);
        h->live.stale += !g;
        h->live.foreign += g != NULL;
    } else if (g->members[peer].dead) {
        lc_note_packet(h, p, header);
        g->live.stale++;
    } else if (!g->failing.code) {
        g->members[peer].met = 1;
        g->members[peer].heard_ns = h->now;
        lc_data_arrived(g, peer, header, payload);
    }
}

void lc_release_held(lc_host *h, lc_path *p) {
    if (!p->held_bytes)
        return;
    lc_header header;
    uint32_t n = p->held_bytes;
    p->held_bytes = 0;
    h->came_ns = h->now;
    if (lc_wire_get(p->held, n, &p->interface->expect, &header) == LC_GOOD)
        deliver(h, p, lc_find_group(h, header.group), &header, p->held + LC_HEADER_BYTES);
}

/* Late and repeated packets, as a bad network makes them. */
static void deliver_faulty(lc_host *h, lc_path *p, lc_group *g, const lc_header *header,
                           const uint8_t *packet, const uint8_t *payload) {
    const lc_inject *faults = &g->config.inject;
    uint64_t key = lc_inject_key(faults, g->config.fault_group, header->op, header->slot,
                                 g->rank_of_process[p->number], g->config.rank, header->round);
    if (!p->held_bytes && lc_inject_reorders(faults, key, header->packet)) {
        memcpy(p->held, packet, LC_HEADER_BYTES);
        memcpy(p->held + LC_HEADER_BYTES, payload, header->length);
        p->held_bytes = LC_HEADER_BYTES + header->length;
        g->live.packets_reordered++;
        return;
    }
    deliver(h, p, g, header, payload);
    if (lc_inject_duplicates(faults, key, header->packet)) {
        g->live.packets_duplicated++;
        deliver(h, p, g, header, payload);
    }
    lc_release_held(h, p);
}

static int is_faulty(const lc_group *g, const lc_path *p) {
    return g && (g->config.inject.dup > 0 || g->config.inject.reorder > 0) &&
           g->rank_of_process[p->number] != 0xFFFF;
}

static void data(lc_host *h, lc_path *p, const lc_header *header, const uint8_t *packet,
                 const uint8_t *payload) {
    lc_group *g = lc_find_group(h, header->group);
    if (is_faulty(g, p))
        deliver_faulty(h, p, g, header, packet, payload);
    else
        deliver(h, p, g, header, payload);
}

/* The packet that it completes is believed as far as if it had come as one. */
static void piece(lc_host *h, lc_path *p, const lc_header *header, const uint8_t *payload) {
    uint32_t n;
    lc_header whole;
    const uint8_t *packet = p->pieces ? lc_pieces_take(p->pieces, header, payload, &n) : NULL;
    if (!packet)
        return;
    if (lc_wire_get(packet, n, &p->interface->expect, &whole) == LC_GOOD &&
        (whole.type == LC_DATA || whole.type == LC_PARITY) && whole.sender == header->sender &&
        whole.link_seq == header->link_seq)
        data(h, p, &whole, packet, packet + LC_HEADER_BYTES);
    else
        h->live.malformed++;
}

static void control(lc_host *h, lc_path *p, const lc_header *header, const uint8_t *payload) {
    lc_group *g = header->group ? lc_find_group(h, header->group) : NULL;
    lc_release_held(h, p);
    lc_size_came(&p->size, header->slot, h->now);
    lc_aggregates_came(&p->aggregates, header->slot, p->size.size);
    uint16_t peer = g ? g->rank_of_process[p->number] : 0xFFFF;
    if (g && peer == 0xFFFF) {
        h->live.foreign++;
    } else if (g && g->members[peer].dead) {
        g->live.stale++;
    } else {
        if (g)
            g->members[peer].heard_ns = h->now;
        lc_control_arrived(h, p, g, header, payload);
    }
}

/* A process is believed only by the link that reaches it, and if it is reached at all. */
static int is_from(const lc_host *h, const lc_interface *via, const lc_arrival *arrival,
                   uint16_t sender) {
    const lc_path *p = &h->paths[sender];
    return p->records && p->interface == via && lc_link_is_from(via->link, arrival, sender);
}

static void count_refused(lc_host *h, enum lc_verdict verdict) {
    h->live.malformed += verdict == LC_MALFORMED;
    h->live.foreign += verdict == LC_FOREIGN;
    h->live.forged += verdict == LC_FORGED;
    h->live.replayed += verdict == LC_REPLAYED;
}

/* n: bytes of the packet, wherever its payload lies. */
static void one_packet(lc_host *h, const lc_interface *via, const lc_arrival *arrival,
                       const uint8_t *packet, uint32_t n, const uint8_t *payload) {
    lc_header header;
    enum lc_verdict verdict = lc_wire_get(packet, n, &via->expect, &header);
    if (verdict == LC_GOOD && header.type == LC_CONTROL &&
        header.op != lc_records_check(payload, header.count))
        verdict = LC_MALFORMED;
    if (verdict == LC_GOOD && !is_from(h, via, arrival, header.sender))
        verdict = LC_FOREIGN;
    if (verdict != LC_GOOD) {
        count_refused(h, verdict);
        return;
    }
    lc_path *p = &h->paths[header.sender];
    if (lc_still(h, p))
        p->back_ns = h->now;
    p->heard_ns = h->now;
    p->unanswered_ns = 0;
    h->came_ns = arrival->came_ns && arrival->came_ns < h->now ? arrival->came_ns : h->now;
    p->rx_largest = h->came_bytes > p->rx_largest ? h->came_bytes : p->rx_largest;
    if (header.type == LC_CONTROL)
        control(h, p, &header, payload);
    else if (header.type == LC_PIECE)
        piece(h, p, &header, payload);
    else
        data(h, p, &header, packet, payload);
}

/* Nothing of a sealed datagram is believed before its tag was found right. Returns what was sealed,
 * and its length in *n; or NULL. */
static const uint8_t *opened(lc_host *h, const lc_interface *via, const lc_arrival *arrival,
                             const uint8_t *data, uint32_t *n) {
    uint16_t sender = 0;
    enum lc_verdict verdict = lc_wire_outer(data, *n, &via->expect, &sender);
    if (verdict == LC_GOOD && !is_from(h, via, arrival, sender))
        verdict = LC_FOREIGN;
    if (verdict == LC_GOOD && !h->paths[sender].seal)
        verdict = LC_FOREIGN;
    if (verdict == LC_GOOD)
        verdict = lc_seal_take(h->paths[sender].seal, data, *n, h->session, h->now, h->unsealed);
    count_refused(h, verdict);
    *n -= LC_TAG_BYTES;
    return verdict == LC_GOOD ? h->unsealed : NULL;
}

static void one_datagram(lc_host *h, const lc_interface *via, const lc_arrival *arrival,
                         const uint8_t *data, uint32_t n) {
    if (h->oob && via->link->ops->source && lc_oob_has(data, n)) {
        lc_oob_put(h->oob, via->link, arrival, data, n);
        return;
    }
    h->came_bytes = n;
    if (via->tag_bytes)
        data = opened(h, via, arrival, data, &n);
    if (!data)
        return;
    uint32_t first = (uint32_t)lc_wire_first(data, n);
    if (first < n) {
        one_packet(h, via, arrival, data, first, data + LC_HEADER_BYTES);
        data += first;
        n -= first;
    }
    if (!arrival->rest)
        one_packet(h, via, arrival, data, n, data + LC_HEADER_BYTES);
    else if (n == LC_HEADER_BYTES)
        one_packet(h, via, arrival, data, n + arrival->rest_bytes, arrival->rest);
    else
        h->live.malformed++;
}

/* What is there is taken up to a bound, so that other links and sending get their turn. */
static int receive_by(lc_host *h, const lc_interface *via) {
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    int any = 0;
    for (int turn = 0; turn < CALLS_PER_TURN; turn++) {
        int n = lc_link_receive(via->link, arrivals, LC_RECEIVE_BUFFERS);
        if (n > 0)
            lc_read_clock(h); /* nothing can have come later than this */
        for (int i = 0; i < n; i++) {
            const lc_arrival *a = &arrivals[i];
            if (a->length == 0)
                h->live.malformed++;
            for (uint32_t at = 0; at < a->length; at += a->stride) {
                uint32_t left = a->length - at;
                one_datagram(h, via, a, a->data + at, left < a->stride ? left : a->stride);
            }
        }
        any |= n > 0;
        if (n < LC_RECEIVE_BUFFERS)
            break;
    }
    return any;
}

/* To ask a link that has nothing costs a system call, while another one may be quicker than that.
 * So one on which nothing has moved for a while is asked in some of the turns. */
static int is_asked(const lc_host *h, lc_interface *via) {
    if (via->failed.code)
        return 0;
    int quiet = h->n_interfaces > 1 && !via->link->local && h->now - via->moved_ns > QUIET_NS;
    if (quiet && ++via->turns_since_asked < ASK_EVERY_TURNS)
        return 0;
    via->turns_since_asked = 0;
    return 1;
}

int lc_receive(lc_host *h) {
    int any = 0;
    for (uint16_t i = 0; i < h->n_interfaces; i++) {
        lc_interface *via = &h->interfaces[i];
        if (!is_asked(h, via) || !receive_by(h, via))
            continue;
        via->moved_ns = h->now;
        any = 1;
    }
    return any;
}

void lc_receive_all(lc_host *h) {
    int any = 1;
    for (int turn = 0; turn < MOST_TURNS && any; turn++) {
        any = 0;
        for (uint16_t i = 0; i < h->n_interfaces; i++)
            any |= !h->interfaces[i].failed.code && receive_by(h, &h->interfaces[i]);
    }
}
