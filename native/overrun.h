/* Whether loss is the path's own or the sender's doing.
 *
 * A queue shows in the delay. A policer, or a buffer too short to show, only drops: the share lost
 * then follows the rate of sending, which random loss doesn't. So where more is lost than usual,
 * less is sent for a while, and the two shares are compared. */
#ifndef LC_OVERRUN_H
#define LC_OVERRUN_H

#include <stdint.h>

typedef enum {
    LC_OVERRUN_NONE,  /* nothing new */
    LC_OVERRUN_CLEAN, /* a window has ended without a loss beyond the usual */
    LC_OVERRUN_TEST,  /* more is lost than usual: send LC_OVERRUN_LESS of what was delivered */
    LC_OVERRUN_OWN,   /* the test has ended: no more than `delivered` goes through */
    LC_OVERRUN_RANDOM /* the test has ended: so much is lost at any rate */
} lc_overrun_verdict;

#define LC_OVERRUN_LESS 0.9

typedef struct {
    double lost;      /* share that is lost at any rate */
    double delivered; /* per second, in the last window that ended before a test */
    int testing;
    int clean; /* windows in a row without a loss beyond the usual */
    /* state */
    double share;        /* that was lost before the test */
    uint64_t from_ns;    /* the window's begin; packets before it left at another rate */
    double moved, taken; /* in the window */
} lc_overrun;

/* So many units that the peer has seen or missed, and of those that came; with packets_bytes for a
 * packet in the same unit, and the path's round trip. */
lc_overrun_verdict lc_overrun_add(lc_overrun *o, uint64_t now, double moved, double taken,
                                  double packet, uint64_t rtt_ns);
/* Sending has paused: what comes now doesn't belong to what came before. */
void lc_overrun_pause(lc_overrun *o, uint64_t now);

#endif
