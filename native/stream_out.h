/* Streams that are sent. */
#ifndef LC_STREAM_OUT_H
#define LC_STREAM_OUT_H

#include "control_out.h"

/* Lists the stream at its peer if it has something that may be sent. */
void lc_out_wake(lc_engine *e, lc_out *out);
/* Tells the end of the round if all of it is sent; touches the operation. */
void lc_out_check(lc_engine *e, lc_out *out);
/* The peer has settled the stream, or nothing is owed to it any more; touches the operation. */
void lc_out_done(lc_engine *e, lc_out *out);
/* Takes the stream out of its peer's list. */
void lc_out_drop(lc_engine *e, lc_out *out);
/* The peer keeps no eager packet of the operation any more. */
void lc_eager_over(lc_engine *e, lc_op *op, uint16_t peer);
/* One turn of sending. Returns whether anything went. May record a failure. */
int lc_send_data(lc_engine *e);

#endif
