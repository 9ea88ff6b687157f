/* The life of an operation. */
#ifndef LC_OPERATIONS_H
#define LC_OPERATIONS_H

#include "records_in.h"

/* Takes the operation up: tells those who send to this member that they may, and lists what can be
 * sent. Touches it. */
void lc_op_start(lc_op *op);
/* Ends the touched operations that are complete. Takes the host's lock. Callers may free an
 * operation from here on. */
void lc_complete_touched(lc_host *h);
/* Fails what is pending in groups with a recorded failure. Takes the lock. */
void lc_execute_failures(lc_host *h);
/* The member counts as lost altogether. Touches operations. */
void lc_member_lost(lc_group *g, uint16_t peer);
/* The member has left in order. Touches operations. */
void lc_left(lc_group *g, uint16_t peer);

#endif
