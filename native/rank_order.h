/* Sums in the order of ranks, whatever comes first: how far each packet of a sum is, and the
 * contributions that have come before those of lower ranks. docs/engine-reference.md has the rule.
 *
 * The memory is laid out with the operation (op.c), for the most that can come early. Only the
 * driving thread calls these. */
#ifndef LC_RANK_ORDER_H
#define LC_RANK_ORDER_H

#include "cells.h"

/* One packet of a sum. */
typedef struct {
    uint16_t next; /* the first source that is neither added nor given up */
    uint8_t own;   /* the own contribution has had its turn: it is added, or what comes next adds it
                      in passing, where nothing was before it */
    uint8_t begun; /* something has been added */
} lc_addends;

typedef struct {
    lc_addends *addends; /* by packet */
    lc_cell **kept;      /* by source, then by packet: those that are beyond next and have come */
    lc_cells cells;
    uint64_t *fed;   /* a bit per packet that the feeder has settled; NULL: the own contribution is
                        there from the start, or has no turn */
    uint32_t own_at; /* the own contribution stands before this source; LC_NO_TURN: it has none */
    uint32_t n_packets;
} lc_rank_order;

enum { LC_NO_TURN = 0x10000 };

/* Keeps a packet of a source until its turn. Returns the bytes of memory that no packet has used
 * before it. */
size_t lc_order_keep(lc_rank_order *o, uint32_t source, const lc_header *h, const uint8_t *payload);
/* The packet of the source that is next. It is given back by lc_cells_free. */
lc_cell *lc_order_kept(const lc_rank_order *o, uint32_t source, uint32_t k);
/* Whether packet k of the source can be added at once. */
int lc_order_is_next(const lc_rank_order *o, uint32_t source, uint32_t k);

#endif
