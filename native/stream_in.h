/* Streams that arrive. */
#ifndef LC_STREAM_IN_H
#define LC_STREAM_IN_H

#include "combine.h"

/* Takes a data or parity packet from a member. kept: it has waited in a cell, and the path took
 * note of it when it came. */
void lc_in_take(lc_group *g, uint16_t peer, const lc_header *header, const uint8_t *payload,
                int kept);
/* The same of a stream that is known. */
void lc_in_take_into(lc_in *in, const lc_header *header, const uint8_t *payload);
/* The path has brought a packet of data, whatever becomes of it. */
void lc_note_packet(lc_host *h, lc_path *p, const lc_header *header);
/* Data of the group has come from the member, if only late: the link isn't dead. */
void lc_note_fertile(lc_member *m);
/* FIN says the stream's code word. Returns 0 if it can't be. */
int lc_in_learn(lc_in *in, uint64_t word);
/* Settles what has not arrived as missing; touches the operation. */
void lc_give_up(lc_in *in, int cause);
/* The sender knows what was given up; touches the operation. */
void lc_told(lc_in *in);
/* The reorder allowance is over: asks for what is missing, or gives it up. */
void lc_round_ended(lc_in *in);
/* Draws which packets of the round injection drops. */
void lc_inject_round(lc_in *in);
/* Whether the deadline of the stream is over. */
int lc_overdue(const lc_in *in);

#endif
