/* Reduces: adds a packet that arrived to its slot, or copies it, and finishes packets all of whose
 * sources have settled. */
#ifndef LC_COMBINE_H
#define LC_COMBINE_H

#include "stream_out.h"

/* Adds a packet that has come to its slot. */
void lc_combine(lc_op_slot *s, uint16_t peer, const lc_header *h, const uint8_t *payload);
/* One more source of packet k has settled; with the last, the packet is finished and handed on. */
void lc_source_settled(lc_op_slot *s, uint32_t k);
/* Puts in place what `missing` says, once. All that comes has settled; and in place the operation
 * is at its end: a result that was given up early (its sender has died) stands where the own
 * contribution may still be read from. */
void lc_fill_missing(lc_op *op);
/* Whether there is anything to be put in place. */
int lc_lacks_fill(const lc_op *op);
/* The mean over a single rank. */
void lc_finish_alone(lc_op_slot *s);

#endif
