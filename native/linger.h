/* Operations that end for their callers before they end here. A rank that has all that it is to get
 * has nothing to wait for, and one that only sends has that from the start: what is small and may
 * have to be sent again is copied, and the caller has its buffers back. The operation lingers in
 * the group's table, as any other, until its streams need it no more. What fails it then fails the
 * group, and so the caller's next call. */
#ifndef LC_LINGER_H
#define LC_LINGER_H

#include "state.h"

enum {
    LC_LINGERING = 64,           /* operations of a group that linger */
    LC_LINGERING_BYTES = 1 << 20 /* that they have copied */
};

/* Whether it waits for nothing but to be sent and heard of, and the group has room for its copy. */
int lc_may_linger(const lc_op *op);
/* Of such an operation, no packet of which is in a batch: copies what it still owes. From then on
 * it doesn't need its caller's memory. */
void lc_linger(lc_op *op);
/* Whether it is over for its caller, and nothing else. */
int lc_is_lingering(const lc_op *op);
/* The loop has no more use for it: gives its room back. Nothing happens to one that doesn't. */
void lc_linger_over(lc_op *op);
/* How many of a group linger, and the number of the first, if *oldest isn't NULL and there is one.
 * From any thread. */
uint32_t lc_lingering(const lc_group *g, uint32_t *oldest);
/* Whether all of its packets have been handed to the link: what remains are answers. */
int lc_linger_sent(const lc_op *op);

#endif
