/* Streams that arrive. */
#ifndef LC_STREAM_IN_H
#define LC_STREAM_IN_H

#include "combine.h"

/* Takes a data or parity packet. kept: it has waited in a cell, and the link took note of it when
 * it came. */
void lc_in_take(lc_engine *e, const lc_header *h, const uint8_t *payload, int kept);
/* The link has brought a packet of data, whatever becomes of it. */
void lc_note_link(lc_engine *e, lc_peer *peer, const lc_header *h);
/* Settles what has not arrived as missing. */
void lc_give_up(lc_engine *e, lc_in *in, int cause);
/* The sender knows what was given up. */
void lc_told(lc_engine *e, lc_in *in);
/* The reorder allowance is over: asks for what is missing, or gives it up. */
void lc_round_ended(lc_engine *e, lc_in *in);
/* Draws which packets of the round injection drops. */
void lc_inject_round(lc_engine *e, lc_in *in);
/* Whether the deadline of the stream is over. */
int lc_overdue(const lc_engine *e, const lc_in *in);
/* Nothing at all has come from the peer for as long as any stream may be silent. */
int lc_path_silent(const lc_engine *e, const lc_op *op, uint16_t peer);

#endif
