/* Eager packets: sent before the peer was heard to have posted their operation, so that no way of
 * the path is spent on asking. Where the receiver is late they wait here, in cells of memory that
 * was set aside for them; each sender knows its share of the cells and sends no more than that. */
#ifndef LC_CELLS_H
#define LC_CELLS_H

#include "wire.h"

typedef struct lc_cell {
    struct lc_cell *next;
    lc_header header;
    uint8_t payload[];
} lc_cell;

/* Cells are used again, the latest first: memory that was never needed is never touched. */
typedef struct {
    uint8_t *memory;
    size_t cell_bytes;
    uint32_t n_cells;
    uint32_t fresh; /* cells from here on were never used */
    lc_cell *free;
} lc_cells;

/* A peer's packets, in the order in which they came. */
typedef struct {
    lc_cell *first, *last;
    uint32_t n;
} lc_waiting;

/* Makes as many cells as memory allows; 0 bytes: none. Returns 0 if there is no memory. */
int lc_cells_make(lc_cells *cells, uint64_t bytes, uint16_t payload_bytes);
void lc_cells_drop(lc_cells *cells);
/* The bytes of a cell for so much payload, and cells in memory that is somebody else's. */
size_t lc_cell_bytes(uint32_t payload_bytes);
lc_cells lc_cells_of(void *memory, uint32_t n, uint32_t payload_bytes);
/* A copy, in no list. NULL if every cell is in use. */
lc_cell *lc_cells_put(lc_cells *cells, const lc_header *h, const uint8_t *payload);
/* Keeps a copy at the end of the list. Returns 0 if every cell is in use. */
int lc_cells_keep(lc_cells *cells, lc_waiting *list, const lc_header *h, const uint8_t *payload);
void lc_cells_free(lc_cells *cells, lc_cell *cell);
/* Whether the packet is the one that came last: networks that double packets do so at once. */
int lc_waiting_has(const lc_waiting *list, const lc_header *h);
void lc_waiting_add(lc_waiting *list, lc_cell *cell);

#endif
