/* What happens when nothing arrives. */
#ifndef LC_TIMERS_H
#define LC_TIMERS_H

#include "datagrams.h"

/* Looks at every timer and sets tick_ns. May record failures. */
void lc_tick(lc_host *h);

#endif
