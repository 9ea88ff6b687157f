/* When to try again what has failed: later and later, until it works. */
#ifndef LC_BACKOFF_H
#define LC_BACKOFF_H

#include <stdint.h>

typedef struct {
    uint64_t until_ns; /* not before; 0: it works */
    uint32_t tries;    /* failures in a row */
} lc_backoff;

static inline int lc_backoff_holds(const lc_backoff *b, uint64_t now) {
    return b->until_ns && now < b->until_ns;
}

/* It has failed again. The first wait is first_ns, and each is twice the one before, up to most_ns.
 */
static inline void lc_backoff_failed(lc_backoff *b, uint64_t now, uint64_t first_ns,
                                     uint64_t most_ns) {
    uint64_t wait = b->tries < 32 ? first_ns << b->tries : most_ns;
    b->until_ns = now + (wait < most_ns ? wait : most_ns);
    b->tries++;
}

static inline void lc_backoff_worked(lc_backoff *b) {
    *b = (lc_backoff){0, 0};
}

#endif
