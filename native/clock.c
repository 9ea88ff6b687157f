#define _GNU_SOURCE
#include "clock.h"

#include <stddef.h>

static uint64_t read_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t lc_now(void) {
    return read_clock(CLOCK_MONOTONIC);
}

uint64_t lc_time_of_day(void) {
    return read_clock(CLOCK_REALTIME);
}

struct timespec lc_time_after(uint64_t ns) {
    const uint64_t second = 1000000000u, most = 3600 * second;
    uint64_t at = lc_now() + (ns < most ? ns : most);
    return (struct timespec){(time_t)(at / second), (long)(at % second)};
}

static uint64_t system_now(void *context) {
    (void)context;
    return lc_now();
}

static uint64_t system_time_of_day(void *context) {
    (void)context;
    return lc_time_of_day();
}

const lc_clock lc_system_clock = {system_now, system_time_of_day, NULL};
