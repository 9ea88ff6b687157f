/* Where a loop sleeps: on all of its links at once, until something wakes it. */
#ifndef LC_WAITER_H
#define LC_WAITER_H

#include "link.h"

enum { LC_WAITER_LINKS = 8 };

typedef struct {
    int wake_fd; /* an eventfd */
} lc_waiter;

/* Returns 0 with errno set if the system has no descriptor left. */
int lc_waiter_open(lc_waiter *waiter);
void lc_waiter_close(lc_waiter *waiter);
/* Sleeps until a link has something, takes packets again, or wants to be asked; lc_waiter_wake is
 * called; or timeout_ns pass. Bit i of blocked: links[i] has taken fewer packets than asked. With
 * no links only the last two count. One thread at a time. Returns whether it was woken. */
int lc_waiter_sleep(lc_waiter *waiter, lc_link *const *links, int n_links, uint32_t blocked,
                    uint64_t timeout_ns);
/* From any thread. A wake before the sleep isn't lost. */
void lc_waiter_wake(lc_waiter *waiter);

#endif
