/* Control records out. */
#ifndef LC_RECORDS_OUT_H
#define LC_RECORDS_OUT_H

#include "state.h"

/* Queues a record for a member. A full list drops it: every record is repeated by a timer. */
void lc_tell(lc_group *g, uint16_t peer, const lc_record *record);
void lc_tell_call(lc_op *op, uint16_t peer, uint8_t kind);
void lc_tell_fin(lc_out *out);
/* What is missing of a stream, or was given up; the second goes on where the first stopped for want
 * of room (in->tell_next). */
void lc_tell_missing(lc_in *in);
void lc_tell_more(lc_in *in);
/* Queues a record about a group (0: about the path) that may not be here. */
void lc_tell_path(lc_path *p, uint32_t group, const lc_record *record);
void lc_tell_probe(lc_path *p);
/* The same, but it can wait a little for a packet that it can ride with. */
void lc_tell_soon(lc_group *g, uint16_t peer, const lc_record *record);
void lc_tell_ready_soon(lc_op *op, uint16_t peer);
/* When records may go out again to a peer from which nothing has come since earlier ones; 0, or
 * past: at once. A process that is stopped or starved doesn't read: what is repeated to it piles up
 * in its socket buffer, and takes the room that the window promises to data. */
uint64_t lc_tell_again_ns(const lc_host *h, const lc_path *p);
/* When the path's records go out, if no packet takes them along before; 0, or past: at once. */
uint64_t lc_held_until_ns(const lc_host *h, const lc_path *p);
/* The bytes of all that is to be told to the process, as one packet; 0: nothing is. */
uint32_t lc_control_bytes(const lc_path *p);
/* Writes a control packet that goes in the datagram of another one, which follows it. Returns its
 * bytes: at most lc_control_bytes, and 0 if there is nothing to be told. */
uint32_t lc_control_ahead(lc_host *h, lc_path *p, uint8_t *to);
/* Sends what is queued, as far as the links take it; the rest stays. May record failures. */
void lc_send_control(lc_host *h);
/* The same of one link. */
void lc_send_control_by(lc_host *h, lc_interface *via);

#endif
