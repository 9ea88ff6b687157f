#include "state.h"

#include "payload.h"

static const uint64_t STARVED_NS = 250000000; /* a turn of the loop never takes this long */
static const uint64_t STILL_NS = 250000000;
static const double OWN_PORT = 0.75; /* who sends this share of it to other sites is held by it */

lc_group *lc_find_group(const lc_host *h, uint32_t number) {
    lc_group *g = h->bucket[number % LC_GROUPS];
    while (g && g->config.number != number)
        g = g->next_in_bucket;
    return g;
}

int lc_group_gone(const lc_host *h, uint32_t number) {
    for (uint32_t i = 0; i < LC_GONE && i < h->n_gone; i++)
        if (h->gone[i] == number)
            return 1;
    return 0;
}

lc_op *lc_find_op(const lc_group *g, uint32_t number) {
    lc_op *op = g->table[number % LC_OPS];
    return op && op->number == number ? op : NULL;
}

int lc_op_posted(const lc_group *g, uint32_t number) {
    return (int32_t)(number - g->next_op) < 0;
}

int lc_op_failed(const lc_group *g, uint32_t number) {
    return g->broken.code && lc_op_posted(g, number) && (int32_t)(number - g->broken_from) >= 0;
}

int lc_names(const lc_stream_name *name, uint32_t group, uint32_t op, uint16_t slot) {
    return name->group == group && name->op == op && name->slot == slot;
}

void lc_count_packets(lc_stats *t, const lc_report *r) {
    t->packets_sent += r->packets_sent;
    t->packets_resent += r->packets_resent;
    t->resent_reliable += r->resent_reliable;
    t->nan_groups += r->nan_groups;
    t->bytes_sent += r->bytes_sent;
    t->parity_sent += r->parity_sent;
    t->parity_received += r->parity_received;
    t->packets_recovered += r->packets_recovered;
    t->packets_received += r->packets_received;
    t->bytes_received += r->bytes_received;
    t->order_kept += r->order_kept;
}

void lc_show_counts(lc_peer_stats *to, const lc_member *m) {
    to->packets_sent = m->packets_sent;
    to->packets_received = m->packets_received;
    to->packets_missing = m->packets_missing;
    to->offered = m->offered;
    to->delivered = m->delivered;
}

void lc_touch(lc_op *op) {
    lc_host *h = op->group->host;
    if (op->touched)
        return;
    op->touched = 1;
    op->next_touched = h->touched;
    h->touched = op;
}

void lc_fail(lc_group *g, const lc_failure *why) {
    if (!g->failing.code)
        g->failing = *why;
    g->host->failing = 1;
}

int lc_group_uses(const lc_group *g, const lc_interface *via) {
    for (uint16_t i = 0; i < g->config.size; i++)
        if (g->members[i].path && g->members[i].path->interface == via)
            return 1;
    return 0;
}

void lc_read_clock(lc_host *h) {
    uint64_t before = h->now;
    h->now = lc_clock_now(h->clock);
    if (h->now - before > STARVED_NS)
        h->awake_ns = h->now; /* stopped or starved: what is late may lie in the socket */
}

/* The first packet is as large as any. */
int lc_may_go_ahead(const lc_op_slot *s, const lc_path *p) {
    const lc_interface *via = p->interface;
    return via->eager && (s->packet_bytes <= via->cell_payload || !s->n_packets ||
                          lc_payload_bytes(s, 0) <= via->cell_payload);
}

uint64_t lc_answer_ns(const lc_path *p) {
    return STILL_NS + 2 * p->pace.measure.rtt_ns;
}

int lc_still(const lc_host *h, const lc_path *p) {
    return h->now - p->heard_ns > lc_answer_ns(p);
}

uint32_t lc_window_room(const lc_path *p, uint32_t packet_bytes) {
    /* The peer counts packets; each piece takes as much room there. */
    uint32_t pieces = lc_size_pieces(&p->size, packet_bytes, lc_head_bytes(p->interface));
    uint32_t lets = p->tx_window > pieces ? p->tx_window / pieces : 1;
    uint32_t window = lc_pace_window(&p->pace, lets), flying = lc_units_flying(p);
    return flying < window ? (window - flying) / lc_units(p->interface, packet_bytes) : 0;
}

void lc_link_lost(lc_path *p, uint32_t link_seq) {
    p->rx_taken--;
    lc_runs_missed(&p->rx_runs, link_seq, link_seq + 1);
}

void lc_note_empty(lc_emptiness *e, uint64_t packets, uint64_t now) {
    if (!e->packets)
        e->since_ns = now;
    e->times = e->packets ? e->times + 1 : 1;
    e->packets += packets;
}

int lc_link_seen(lc_path *p, uint32_t next, int came) {
    uint32_t missed = next - (uint32_t)came;
    if ((int32_t)(next - p->rx_next) <= 0)
        return 0;
    if (missed != p->rx_next)
        lc_runs_missed(&p->rx_runs, p->rx_next, missed);
    if (came)
        p->rx_empty.packets = 0;
    else
        lc_note_empty(&p->rx_empty, next - p->rx_next, p->heard_ns);
    p->rx_next = next;
    return 1;
}

uint8_t lc_far_level(const lc_interface *via, uint64_t now) {
    double near = lc_uplink_used(&via->exits[LC_NEAR].uplink, now);
    double far = lc_uplink_used(&via->exits[LC_FAR].uplink, now);
    uint8_t level = lc_rate_level(far);
    return (near > 0 && far > OWN_PORT * near) || level == UINT8_MAX ? 0 : level;
}
