/* The progress loop. */
#ifndef LC_LOOP_H
#define LC_LOOP_H

#include "state.h"

/* One turn, by who holds `driving`. Returns whether anything moved. */
int lc_turn(lc_engine *e);
/* After a turn in which nothing moved: how long until there is something to do, if nothing comes
 * until then. */
uint64_t lc_idle_ns(const lc_engine *e);
/* Fails what is pending as closed, by who holds `driving`. */
void lc_last_turn(lc_engine *e);
/* The progress thread; argument: the engine. */
void *lc_progress(void *argument);
/* Wakes the thread if it sleeps. From any thread. */
void lc_nudge(lc_engine *e);
/* While the thread sleeps, a caller does its work until the operation has ended, nothing comes any
 * more, or longest_ns have passed: so none has to wake the other, twice an operation, and packets
 * wake none. Takes `driving`; if the thread has it, it only wakes that. */
void lc_drive(lc_engine *e, const lc_op *op, uint64_t longest_ns);

#endif
