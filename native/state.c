#include "state.h"

static const uint64_t STARVED_NS = 250000000; /* a turn of the loop never takes this long */
static const uint64_t STILL_NS = 250000000;

lc_op *lc_find_op(lc_engine *e, uint32_t number) {
    lc_op *op = e->table[number % LC_OPS];
    return op && op->number == number ? op : NULL;
}

int lc_op_posted(const lc_engine *e, uint32_t number) {
    return (int32_t)(number - e->next_op) < 0;
}

int lc_op_failed(const lc_engine *e, uint32_t number) {
    return e->broken.code && lc_op_posted(e, number) && (int32_t)(number - e->broken_from) >= 0;
}

void lc_touch(lc_engine *e, lc_op *op) {
    if (op->touched)
        return;
    op->touched = 1;
    op->next_touched = e->touched;
    e->touched = op;
}

void lc_fail(lc_engine *e, const lc_failure *why) {
    if (!e->failing.code)
        e->failing = *why;
}

int lc_failing(const lc_engine *e) {
    return e->failing.code != 0;
}

void lc_read_clock(lc_engine *e) {
    uint64_t before = e->now;
    e->now = lc_clock_now(e->clock);
    if (e->now - before > STARVED_NS)
        e->awake_ns = e->now; /* stopped or starved: what is late may lie in the socket */
}

uint32_t lc_wire_bytes_max(const lc_engine *e) {
    return LC_HEADER_BYTES + e->config.payload_bytes;
}

int lc_still(const lc_engine *e, const lc_peer *peer) {
    return e->now - peer->heard_ns > STILL_NS + 2 * peer->pace.path.rtt_ns;
}

int lc_link_seen(lc_peer *peer, uint32_t next) {
    if ((int32_t)(next - peer->rx_next) <= 0)
        return 0;
    peer->rx_next = next;
    return 1;
}
