/* What happens when nothing arrives. */
#ifndef LC_TIMERS_H
#define LC_TIMERS_H

#include "datagrams.h"

/* Looks at every timer and sets tick_ns. */
void lc_tick(lc_engine *e);

#endif
