/* The progress loop. */
#ifndef LC_LOOP_H
#define LC_LOOP_H

#include "state.h"

/* One turn, by who holds `driving`. Returns whether anything moved. */
int lc_turn(lc_host *h);
/* After a turn in which nothing moved: how long until there is something to do, if nothing comes
 * until then. */
uint64_t lc_idle_ns(const lc_host *h);
/* The progress thread; argument: the host. */
void *lc_progress(void *argument);
/* Wakes who drives if it sleeps. From any thread, after it has set `attention`. */
void lc_nudge(lc_host *h);
/* While the thread sleeps, a caller does its work until the operation has ended, or longest_ns have
 * passed: so none has to wake the other, twice an operation, and packets wake only who waits for
 * them. Takes `driving`; if another has it, it only wakes that one. */
void lc_drive(lc_host *h, const lc_op *op, uint64_t longest_ns);

/* A caller takes one turn, for what it has left in the inbox: what goes at once need wake nobody.
 * If the thread stands by, it takes over within a few milliseconds, without being woken. */
void lc_kick(lc_host *h);

#endif
