/* Counts forks. */
#include "forks.h"

#include <pthread.h>
#include <stdatomic.h>

static atomic_uint forks;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void in_child(void) {
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

static void watch(void) {
    (void)pthread_atfork(NULL, NULL, in_child);
}

uint32_t lc_forks(void) {
    (void)pthread_once(&once, watch);
    return atomic_load_explicit(&forks, memory_order_relaxed);
}
