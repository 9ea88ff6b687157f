/* Data that comes: eager packets wait until both ends are known to mean the same operation. */
#include "eager.h"

#include "message.h"

/* Whether an eager packet has come too early. Until both are known to mean the same by the
 * operation, a packet of the peer's may be of another one. */
static int must_wait(const lc_group *g, uint16_t peer, const lc_header *header) {
    const lc_op *op = lc_find_op(g, header->op);
    if (op)
        return !op->peers[peer].agreed;
    if (g->broken.code) /* no operation of it begins any more */
        return 0;
    return !lc_op_posted(g, header->op) && header->op - g->next_op < LC_OPS;
}

static void keep(lc_group *g, lc_path *p, const lc_header *header, const uint8_t *payload) {
    lc_interface *via = p->interface;
    lc_note_packet(g->host, p, header);
    if (lc_waiting_has(&p->waiting, header)) {
        g->live.repeated++;
    } else if (p->waiting.n < via->eager && header->length <= via->cell_payload &&
               lc_cells_keep(&via->cells, &p->waiting, header, payload)) {
        g->live.eager_kept++;
    } else {
        lc_link_lost(p, header->link_seq);
        g->live.eager_dropped++;
    }
}

void lc_data_arrived(lc_group *g, uint16_t peer, const lc_header *header, const uint8_t *payload) {
    if (header->slot == LC_SLOT_MESSAGE) {
        lc_message_data(g, peer, header, payload);
        return;
    }
    if (!header->eager) {
        lc_agree(g, header->op, peer); /* who sends it has seen that both do */
    } else if (must_wait(g, peer, header)) {
        keep(g, g->members[peer].path, header, payload);
        return;
    }
    lc_in_take(g, peer, header, payload, 0);
}

void lc_agree(lc_group *g, uint32_t number, uint16_t peer) {
    lc_op *op = lc_find_op(g, number);
    if (!op || op->peers[peer].agreed)
        return;
    op->peers[peer].agreed = 1;
    lc_take_waiting(g, peer);
}

/* The list is taken apart and put together again without the cells that `drop` or time frees, so
 * that what is done with a packet may keep others. */
static void go_through(lc_group *g, uint16_t peer, int drop) {
    lc_path *p = g->members[peer].path;
    lc_cell *cell = p->waiting.first;
    p->waiting = (lc_waiting){0};
    while (cell) {
        lc_cell *next = cell->next;
        int ours = cell->header.group == g->config.number;
        if (!ours || (!drop && must_wait(g, peer, &cell->header))) {
            lc_waiting_add(&p->waiting, cell);
        } else {
            if (!drop)
                lc_in_take(g, peer, &cell->header, cell->payload, 1);
            lc_cells_free(&p->interface->cells, cell);
        }
        cell = next;
    }
}

void lc_take_waiting(lc_group *g, uint16_t peer) {
    go_through(g, peer, 0);
}

void lc_drop_waiting(lc_group *g, uint16_t peer) {
    go_through(g, peer, 1);
}
