/* What keeps a link from sending, and may end by itself: it is tried again, later and later, and is
 * told of once, and once more when it is over. */
#ifndef LC_TROUBLE_H
#define LC_TROUBLE_H

#include "backoff.h"
#include "lossycoll.h"

typedef struct {
    lc_backoff again; /* the next try */
    uint64_t since_ns;
    int sys_errno; /* 0: there is none */
} lc_trouble;

static const uint64_t LC_TROUBLE_FIRST_NS = 1000000, LC_TROUBLE_MOST_NS = 100000000;

static inline int lc_trouble_holds(const lc_trouble *t, uint64_t now) {
    return lc_backoff_holds(&t->again, now);
}

/* Sending has failed. Returns whether that is news, with the event. */
static inline int lc_trouble_begins(lc_trouble *t, int error, uint64_t now, lc_event *event) {
    int is_new = t->sys_errno != error;
    if (!t->again.until_ns)
        t->since_ns = now;
    t->sys_errno = error;
    lc_backoff_failed(&t->again, now, LC_TROUBLE_FIRST_NS, LC_TROUBLE_MOST_NS);
    *event = (lc_event){.kind = LC_EVENT_FAILING, .sys_errno = error, .peer = -1};
    return is_new;
}

/* Sending works. Returns whether that is news, with the event. */
static inline int lc_trouble_ends(lc_trouble *t, uint64_t now, lc_event *event) {
    if (!t->again.until_ns)
        return 0;
    *event = (lc_event){.kind = LC_EVENT_WORKS,
                        .sys_errno = t->sys_errno,
                        .peer = -1,
                        .waited_ns = now - t->since_ns};
    *t = (lc_trouble){.sys_errno = 0};
    return 1;
}

#endif
