/* Contributions that wait for those of lower ranks; see rank_order.h. */
#include "rank_order.h"

size_t lc_order_keep(lc_rank_order *o, uint32_t source, const lc_header *h,
                     const uint8_t *payload) {
    uint32_t before = o->cells.fresh;
    /* There is a cell for each packet that can come early. */
    o->kept[(size_t)source * o->n_packets + h->packet] = lc_cells_put(&o->cells, h, payload);
    return (o->cells.fresh - before) * o->cells.cell_bytes;
}

lc_cell *lc_order_kept(const lc_rank_order *o, uint32_t source, uint32_t k) {
    return o->kept[(size_t)source * o->n_packets + k];
}

int lc_order_is_next(const lc_rank_order *o, uint32_t source, uint32_t k) {
    const lc_addends *a = &o->addends[k];
    return a->next == source && (a->own || source != o->own_at || !o->fed);
}
