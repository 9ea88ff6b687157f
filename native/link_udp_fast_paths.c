/* The UDP link's fast paths: which are in use, what becomes of one that is refused, and what is
 * told of that. */
#include "link_udp.h"

#include <errno.h>

static const uint64_t SECOND = 1000000000;

void lc_udp_note(lc_udp *u, lc_event event) {
    if (u->events_in - u->events_out < LC_UDP_EVENTS)
        u->events[u->events_in++ % LC_UDP_EVENTS] = event;
}

static void set_active(lc_udp *u, uint32_t path, int on) {
    uint32_t active = on ? u->active | (path & u->offered) : u->active & ~path;
    __atomic_store_n(&u->active, active, __ATOMIC_RELAXED);
}

int lc_udp_batches(lc_udp *u) {
    if (u->batching.until_ns && !lc_backoff_holds(&u->batching, lc_clock_now(u->link.clock))) {
        u->batching.until_ns = 0;
        set_active(u, LC_MMSG, 1);
    }
    return (u->active & LC_MMSG) != 0;
}

void lc_udp_refuse_batching(lc_udp *u) {
    lc_backoff_failed(&u->batching, lc_clock_now(u->link.clock), 60 * SECOND, 3600 * SECOND);
    set_active(u, LC_MMSG, 0);
    u->stats.refused++;
    lc_udp_note(
        u, (lc_event){
               .kind = LC_EVENT_REFUSED, .sys_errno = ENOSYS, .peer = -1, .fast_path = LC_MMSG});
}

int lc_udp_segments(const lc_udp *u, uint16_t peer) {
    const lc_backoff *b = &u->peers[peer].segment;
    return (u->offered & LC_GSO) && !u->peers[peer].singly &&
           !(b->until_ns && lc_backoff_holds(b, lc_clock_now(u->link.clock)));
}

/* The peer's packets go as one no more, or again. */
static void count_refused(lc_udp *u, int more) {
    u->n_refused += (uint32_t)more;
    set_active(u, LC_GSO, u->n_refused == 0);
}

void lc_udp_refuse_segments(lc_udp *u, uint16_t peer, int error) {
    lc_backoff *b = &u->peers[peer].segment;
    if (!b->until_ns)
        count_refused(u, 1);
    lc_backoff_failed(b, lc_clock_now(u->link.clock), SECOND, 300 * SECOND);
    u->stats.refused++;
    lc_udp_note(
        u, (lc_event){
               .kind = LC_EVENT_REFUSED, .sys_errno = error, .peer = peer, .fast_path = LC_GSO});
}

void lc_udp_segments_again(lc_udp *u, lc_udp_peer *peer) {
    if (!peer->segment.until_ns)
        return;
    lc_backoff_worked(&peer->segment);
    if (!peer->singly)
        count_refused(u, -1);
}

void lc_udp_go_singly(lc_link *link, uint16_t peer, int on) {
    lc_udp *u = lc_udp_of(link);
    lc_udp_peer *p = &u->peers[peer];
    if (p->singly == on)
        return;
    p->singly = on;
    if (!p->segment.until_ns)
        count_refused(u, on ? 1 : -1);
}
