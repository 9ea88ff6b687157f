/* The turns of an end by io_uring, without liburing. */
#ifndef RAW_RING_H
#define RAW_RING_H

#include "raw_end.h"

void ring_open(struct end *end);
/* One turn: what has come is taken, what may go goes. Returns whether anything happened. */
int ring_turn(struct end *end);

#endif
