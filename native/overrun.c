#include "overrun.h"

#include <math.h>

static const double PACKETS = 384;  /* of a window, at least, */
static const uint64_t RTTS = 3;     /* and round trips */
static const double EXCESS = 0.015; /* share lost beyond the usual that is worth a test */
static const double BURSTY = 4;     /* variance of what is lost, against single losses */
static const double FADES = 0.25;   /* share of the way to a lower loss that a window goes */

void lc_overrun_begin(lc_overrun *o, uint64_t from_ns) {
    o->from_ns = from_ns;
    o->moved = o->taken = 0;
}

double lc_overrun_noise(double share, double packets) {
    double p = share > 0.002 ? share : 0.002;
    return 2 * sqrt(BURSTY * p * (1 - p) / packets);
}

void lc_overrun_test(lc_overrun *o, uint64_t now, double share, uint64_t rtt_ns) {
    o->share = share;
    o->testing = 1;
    o->clean = 0;
    lc_overrun_begin(o, now + rtt_ns + rtt_ns / 4); /* what left before has been heard of by then */
}

/* Less was sent in the window that has ended. */
static lc_overrun_verdict judge(lc_overrun *o, double share) {
    double own = o->share - o->lost;
    own = own < 1 - LC_OVERRUN_LESS ? own : 1 - LC_OVERRUN_LESS;
    if (o->share - share > own / 2)
        return LC_OVERRUN_OWN;
    o->lost = share;
    return LC_OVERRUN_RANDOM;
}

lc_overrun_verdict lc_overrun_add(lc_overrun *o, uint64_t now, double moved, double taken,
                                  double packet, uint64_t rtt_ns) {
    if (!o->from_ns)
        lc_overrun_begin(o, now);
    if (now <= o->from_ns)
        return LC_OVERRUN_NONE;
    o->moved += moved;
    o->taken += taken;
    if (o->moved < PACKETS * packet || now - o->from_ns < RTTS * rtt_ns)
        return LC_OVERRUN_NONE;
    double share = o->taken < o->moved ? 1 - o->taken / o->moved : 0;
    double usual = o->lost + EXCESS + lc_overrun_noise(share, o->moved / packet);
    lc_overrun_begin(o, now);
    if (o->testing) {
        o->testing = 0;
        return judge(o, share);
    }
    if (share > usual) {
        lc_overrun_test(o, now, share, rtt_ns);
        return LC_OVERRUN_TEST;
    }
    o->clean++;
    if (share < o->lost)
        o->lost += FADES * (share - o->lost);
    return LC_OVERRUN_CLEAN;
}
