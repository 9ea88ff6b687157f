/* The system's clocks, in nanoseconds. */
#ifndef LC_CLOCK_H
#define LC_CLOCK_H

#include <stdint.h>

/* The monotonic one: what every time in the engine is, where nothing else is said. */
uint64_t lc_now(void);
/* The time of day, which may be set. */
uint64_t lc_time_of_day(void);

#endif
