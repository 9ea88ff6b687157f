/* Streams that are sent. */
#ifndef LC_STREAM_OUT_H
#define LC_STREAM_OUT_H

#include "records_out.h"

/* Lists the stream at its path if it has something that may be sent. */
void lc_out_wake(lc_out *out);
/* Tells the end of the round if all of it is sent; touches the operation. */
void lc_out_check(lc_out *out);
/* Nothing comes from the peer: the operation may end without the stream, unless the peer is heard
 * again before. Touches the operation. */
void lc_out_suspend(lc_out *out);
void lc_out_resume(lc_out *out);
/* The peer has settled the stream, or nothing is owed to it any more; touches the operation. */
void lc_out_done(lc_out *out);
/* Takes the stream out of its path's list. */
void lc_out_drop(lc_out *out);
/* The peer keeps no eager packet of the operation any more. */
void lc_eager_over(lc_op *op, uint16_t peer);
/* Sends what is to be told before packets that can't carry it: READY before eager ones, which else
 * would have to wait at the peer. */
void lc_tell_before_data(lc_host *h);
/* One turn of sending. Returns whether anything went. May record a failure. */
int lc_send_data(lc_host *h);

#endif
