/* Where a loop sleeps: on all of its links at once, until something wakes it. */
#ifndef LC_WAITER_H
#define LC_WAITER_H

#include "link.h"

typedef struct {
    int wake_fd; /* an eventfd */
} lc_waiter;

/* What a sleep is to end for. */
typedef struct {
    struct pollfd fds[1 + LC_LINKS * LC_LINK_DESCRIPTORS]; /* the first is the waiter's */
    int n_fds;
    uint64_t longest_ns;
} lc_sleep;

/* Returns 0 with errno set if the system has no descriptor left. */
int lc_waiter_open(lc_waiter *waiter);
void lc_waiter_close(lc_waiter *waiter);
/* A sleep that ends after longest_ns, or when the waiter is woken. */
void lc_sleep_begin(lc_sleep *sleep, uint64_t longest_ns);
/* It ends as well when the link has something, takes packets again, or wants to be asked. blocked:
 * the link has taken fewer packets than asked. For LC_LINKS links at most, by who drives, right
 * before it sleeps. */
void lc_sleep_on(lc_sleep *sleep, lc_link *link, int blocked);
/* Sleeps; other threads may use the links meanwhile. One thread at a time. Returns whether
 * lc_waiter_wake was called. */
int lc_waiter_sleep(lc_waiter *waiter, lc_sleep *sleep);
/* From any thread. A wake before the sleep isn't lost. */
void lc_waiter_wake(lc_waiter *waiter);

#endif
