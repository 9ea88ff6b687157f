/* Data that comes: eager packets wait until both ends are known to mean the same operation. */
#include "eager.h"

/* Whether an eager packet has come too early. Until both are known to mean the same by the
 * operation, a packet of the peer's may be of another one. */
static int must_wait(lc_engine *e, const lc_header *h) {
    const lc_op *op = lc_find_op(e, h->op);
    if (op)
        return !op->peers[h->sender].agreed;
    return !lc_op_posted(e, h->op) && h->op - e->next_op < LC_OPS;
}

void lc_data_arrived(lc_engine *e, const lc_header *h, const uint8_t *payload) {
    lc_peer *peer = &e->peers[h->sender];
    if (!h->eager) {
        lc_agree(e, h->op, h->sender); /* who sends it has seen that both do */
    } else if (must_wait(e, h)) {
        lc_note_link(e, peer, h);
        if (lc_waiting_has(&peer->waiting, h)) {
            e->live.repeated++;
        } else if (peer->waiting.n < e->eager &&
                   lc_cells_keep(&e->cells, &peer->waiting, h, payload)) {
            e->live.eager_kept++;
        } else {
            peer->rx_taken--; /* it has come, but to nothing */
            e->live.eager_dropped++;
        }
        return;
    }
    lc_in_take(e, h, payload, 0);
}

void lc_agree(lc_engine *e, uint32_t number, uint16_t peer) {
    lc_op *op = lc_find_op(e, number);
    if (!op || op->peers[peer].agreed)
        return;
    op->peers[peer].agreed = 1;
    lc_take_waiting(e, peer);
}

void lc_take_waiting(lc_engine *e, uint16_t peer) {
    lc_cell *cell = e->peers[peer].waiting.first;
    e->peers[peer].waiting = (lc_waiting){0};
    while (cell) {
        lc_cell *next = cell->next;
        if (must_wait(e, &cell->header)) {
            lc_waiting_add(&e->peers[peer].waiting, cell);
        } else {
            lc_in_take(e, &cell->header, cell->payload, 1);
            lc_cells_free(&e->cells, cell);
        }
        cell = next;
    }
}

void lc_drop_waiting(lc_engine *e, uint16_t peer) {
    lc_waiting *waiting = &e->peers[peer].waiting;
    while (waiting->first) {
        lc_cell *next = waiting->first->next;
        lc_cells_free(&e->cells, waiting->first);
        waiting->first = next;
    }
    *waiting = (lc_waiting){0};
}
