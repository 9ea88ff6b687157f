/* Control records out. */
#ifndef LC_CONTROL_OUT_H
#define LC_CONTROL_OUT_H

#include "state.h"

/* Queues a record for the peer. A full list drops it: every record is repeated by a timer. */
void lc_tell(lc_engine *e, uint16_t peer, const lc_record *record);
void lc_tell_call(lc_engine *e, lc_op *op, uint16_t peer, uint8_t kind);
void lc_tell_fin(lc_engine *e, lc_out *out);
void lc_tell_missing(lc_engine *e, lc_in *in);
void lc_tell_probe(lc_engine *e, uint16_t peer);
/* Sends what is queued, as far as the link takes it; the rest stays. May record a failure. */
void lc_send_control(lc_engine *e);

#endif
