/* The life of an operation. */
#ifndef LC_OPERATIONS_H
#define LC_OPERATIONS_H

#include "control_in.h"

/* Takes the operation up: tells those who send to this rank that they may, and lists what can be
 * sent. */
void lc_op_start(lc_engine *e, lc_op *op);
/* Lists its own data for peers that are not ready; once READY has been flushed. */
void lc_op_send_ahead(lc_engine *e, lc_op *op);
/* Ends the touched operations that are complete. Takes the engine's lock. Callers may free an
 * operation from here on. */
void lc_complete_touched(lc_engine *e);
/* Fails what is pending with the failure that was recorded, if there is one. Takes the lock. */
void lc_execute_failure(lc_engine *e);
/* The peer counts as lost altogether. */
void lc_bury(lc_engine *e, uint16_t peer);

#endif
