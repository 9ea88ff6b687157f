/* Datagrams in: aggregates are cut into packets, headers are checked, seeded faults are applied. */
#include "datagrams.h"

#include <string.h>

enum { CALLS_PER_TURN = 4 };

void lc_release_held(lc_engine *e, lc_peer *peer) {
    if (!peer->held_bytes)
        return;
    lc_header h;
    uint32_t n = peer->held_bytes;
    peer->held_bytes = 0;
    e->came_ns = e->now;
    if (lc_wire_get(peer->held, n, &e->expect, &h) == LC_GOOD)
        lc_data_arrived(e, &h, peer->held + LC_HEADER_BYTES);
}

static uint64_t fault_key(const lc_engine *e, const lc_header *h) {
    return lc_inject_key(&e->config.inject, e->config.group, h->op, h->slot, h->sender, h->receiver,
                         h->round);
}

/* Late and repeated packets, as a bad network makes them. */
static void deliver_faulty(lc_engine *e, const lc_header *h, const uint8_t *packet, uint32_t n) {
    lc_peer *peer = &e->peers[h->sender];
    uint64_t key = fault_key(e, h);
    if (peer->held && !peer->held_bytes && lc_inject_reorders(&e->config.inject, key, h->packet)) {
        memcpy(peer->held, packet, n);
        peer->held_bytes = n;
        e->live.packets_reordered++;
        return;
    }
    lc_data_arrived(e, h, packet + LC_HEADER_BYTES);
    if (lc_inject_duplicates(&e->config.inject, key, h->packet)) {
        e->live.packets_duplicated++;
        lc_data_arrived(e, h, packet + LC_HEADER_BYTES);
    }
    lc_release_held(e, peer);
}

static void one_packet(lc_engine *e, const lc_arrival *arrival, const uint8_t *packet, uint32_t n,
                       int faulty) {
    lc_header h;
    enum lc_verdict verdict = lc_wire_get(packet, n, &e->expect, &h);
    if (verdict == LC_GOOD && !lc_link_is_from(e->link, arrival, h.sender))
        verdict = LC_FOREIGN;
    if (verdict != LC_GOOD) {
        if (verdict == LC_MALFORMED)
            e->live.malformed++;
        else
            e->live.foreign++;
        return;
    }
    lc_peer *peer = &e->peers[h.sender];
    if (peer->dead) {
        e->live.stale++;
        return;
    }
    if (lc_still(e, peer))
        peer->back_ns = e->now;
    peer->heard_ns = e->now;
    e->came_ns = arrival->came_ns && arrival->came_ns < e->now ? arrival->came_ns : e->now;
    if (h.type == LC_CONTROL) {
        lc_release_held(e, peer);
        lc_control_arrived(e, &h, packet + LC_HEADER_BYTES);
    } else if (faulty) {
        deliver_faulty(e, &h, packet, n);
    } else {
        lc_data_arrived(e, &h, packet + LC_HEADER_BYTES);
    }
}

/* Takes what is there, up to a bound, so that sending gets its turn. Returns whether anything was.
 */
int lc_receive(lc_engine *e) {
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    int faulty = e->config.inject.dup > 0 || e->config.inject.reorder > 0;
    int any = 0;
    for (int turn = 0; turn < CALLS_PER_TURN && !lc_failing(e); turn++) {
        int n = lc_link_receive(e->link, arrivals, LC_RECEIVE_BUFFERS);
        if (n > 0)
            lc_read_clock(e); /* nothing can have come later than this */
        for (int i = 0; i < n; i++) {
            const lc_arrival *a = &arrivals[i];
            if (a->length == 0)
                e->live.malformed++;
            for (uint32_t at = 0; at < a->length && !lc_failing(e); at += a->stride) {
                uint32_t left = a->length - at;
                one_packet(e, a, a->data + at, left < a->stride ? left : a->stride, faulty);
            }
        }
        any |= n > 0;
        if (n < LC_RECEIVE_BUFFERS)
            break;
    }
    return any;
}
