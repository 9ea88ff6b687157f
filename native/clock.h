/* Clocks, in nanoseconds. Whoever needs one is given one, so that tests can give their own. */
#ifndef LC_CLOCK_H
#define LC_CLOCK_H

#include <stdint.h>
#include <time.h>

typedef struct {
    uint64_t (*now)(void *context);
    uint64_t (*time_of_day)(void *context);
    void *context; /* of both; lives as long as whoever was given the clock */
} lc_clock;

/* Those of the system. */
extern const lc_clock lc_system_clock;

/* Monotonic: what every time in the engine is, where nothing else is said. */
static inline uint64_t lc_clock_now(const lc_clock *clock) {
    return clock->now(clock->context);
}

/* The time of day, which may be set. */
static inline uint64_t lc_clock_time_of_day(const lc_clock *clock) {
    return clock->time_of_day(clock->context);
}

/* The system's, for whoever waits in real time. */
uint64_t lc_now(void);
uint64_t lc_time_of_day(void);
/* The monotonic time after that long, an hour at most, for waits on condition variables. */
struct timespec lc_time_after(uint64_t ns);

#endif
