/* Counts forks, and closes what their children don't own. */
#include "forks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static atomic_uint forks;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static lc_owned all = {&all, &all, -1};

static void before_fork(void) {
    (void)pthread_mutex_lock(&lock);
}

static void in_parent(void) {
    (void)pthread_mutex_unlock(&lock);
}

static void in_child(void) {
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
    for (lc_owned *one = all.next; one != &all; one = one->next) {
        close(one->fd);
        one->fd = -1; /* the number may be another file's from now on */
    }
    (void)pthread_mutex_unlock(&lock);
}

static void watch(void) {
    (void)pthread_atfork(before_fork, in_parent, in_child);
}

uint32_t lc_forks(void) {
    (void)pthread_once(&once, watch);
    return atomic_load_explicit(&forks, memory_order_relaxed);
}

void lc_owned_open(lc_owned *owned, int fd) {
    (void)pthread_once(&once, watch);
    (void)pthread_mutex_lock(&lock);
    *owned = (lc_owned){all.next, &all, fd};
    owned->next->before = owned;
    all.next = owned;
    (void)pthread_mutex_unlock(&lock);
}

void lc_owned_close(lc_owned *owned) {
    if (!owned->next)
        return;
    (void)pthread_mutex_lock(&lock);
    owned->before->next = owned->next;
    owned->next->before = owned->before;
    if (owned->fd >= 0)
        close(owned->fd);
    (void)pthread_mutex_unlock(&lock);
    *owned = (lc_owned){.fd = -1};
}
