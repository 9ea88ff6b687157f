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
    LC_OVERRUN_TEST,  /* more is lost than usual: send LC_OVERRUN_LESS of the rate */
    LC_OVERRUN_OWN,   /* the test has ended: less was lost, so what was too much was */
    LC_OVERRUN_RANDOM /* the test has ended: so much is lost at any rate */
} lc_overrun_verdict;

#define LC_OVERRUN_LESS  0.9
#define LC_OVERRUN_LOSSY 0.005 /* share lost at any rate of a path that isn't clean */

typedef struct {
    double lost;  /* share that is lost at any rate */
    double share; /* that was lost before the latest test */
    double came;  /* bytes/s in the latest window */
    double less;  /* and the share of that rate that is sent since */
    double burst; /* packets that are lost in a row, on average */
    int testing;
    int again;         /* what is lost at any rate is tested once more */
    uint32_t patience; /* clean windows before that */
    uint32_t over;     /* windows in a row with a loss beyond the usual */
    uint32_t clean;    /* windows in a row without a loss beyond the usual */
    uint32_t rests;    /* in which nothing was sent, during the test */
    /* state */
    uint64_t from_ns;             /* the window's begin; packets before it left at another rate */
    double moved, taken, packets; /* in the window */
} lc_overrun;

/* Bytes that peers have seen or missed, and those that came; packet: bytes of one. */
lc_overrun_verdict lc_overrun_add(lc_overrun *o, uint64_t now, double moved, double taken,
                                  double packet, uint64_t rtt_ns);
/* Such a share has been lost, and `less` of the rate is sent from now on. */
void lc_overrun_test(lc_overrun *o, uint64_t now, double share, double less, uint64_t rtt_ns);
/* By how much a share of so many packets may differ by chance. */
double lc_overrun_noise(const lc_overrun *o, double share, double packets);
/* Nothing was sent for a while. */
void lc_overrun_rested(lc_overrun *o, uint64_t now);
/* Begins a window: what comes up to from_ns was sent otherwise, and doesn't count. */
void lc_overrun_begin(lc_overrun *o, uint64_t from_ns);

#endif
