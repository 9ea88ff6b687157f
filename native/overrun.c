#include "overrun.h"

#include <math.h>

static const double PACKETS = 384;   /* of a window where single ones are lost, at least, */
static const uint64_t RTTS = 3;      /* and round trips */
static const double EXCESS = 0.015;  /* share lost beyond the usual that is worth a test */
static const double BURSTY = 4;      /* variance of what is lost, against single losses, at least */
static const double MOST = 4;        /* times as many packets, where chance may hide it */
static const double LOST_MOST = 0.9; /* at any rate: more is an outage */
static const double DOUBTED = 0.05;  /* share lost at any rate that is tested again, */
static const uint32_t AGAIN = 8;     /* after so many windows, and then twice as many */
static const uint32_t RESTS = 8;     /* for each of which a test begins anew */
static const double HALF = 0.5;
static const double FADES = 0.25; /* share of the way to a lower loss that a window goes */

void lc_overrun_begin(lc_overrun *o, uint64_t from_ns) {
    o->from_ns = from_ns;
    o->moved = o->taken = o->packets = 0;
}

/* Of a chain of two states, in which runs of so many packets are lost (Gilbert). */
static double variance(const lc_overrun *o, double share) {
    double found = 2 * o->burst * (1 - share) - 1;
    int own = o->lost < LC_OVERRUN_LOSSY; /* as far as is known: a queue's are runs */
    return found > BURSTY && !own ? found : BURSTY;
}

double lc_overrun_noise(const lc_overrun *o, double share, double packets) {
    double p = share > 0.002 ? share : 0.002;
    return 2 * sqrt(variance(o, p) * p * (1 - p) / packets);
}

void lc_overrun_test(lc_overrun *o, uint64_t now, double share, double less, uint64_t rtt_ns) {
    o->share = share < LOST_MOST ? share : LOST_MOST;
    o->less = less;
    o->testing = 1;
    o->clean = o->over = o->rests = 0;
    lc_overrun_begin(o, now + rtt_ns + rtt_ns / 4); /* what left before has been heard of by then */
}

/* A policer lets more pass after a rest, whatever is sent. But a window that never ends tells
 * nothing at all: where calls are short, what the test is compared with had rests in it, too. */
void lc_overrun_rested(lc_overrun *o, uint64_t now) {
    if (!o->testing || o->rests >= RESTS)
        return;
    o->rests++;
    lc_overrun_begin(o, now);
}

/* After a change of who leads a host's ranks none is known. */
static uint32_t patience(const lc_overrun *o) {
    return o->patience ? o->patience : AGAIN;
}

/* By how much the share falls when less is sent, if all beyond the usual is the sender's doing. */
static double falls(const lc_overrun *o) {
    double own = o->share - o->lost, most = (1 - o->share) * (1 / o->less - 1);
    return !o->again && own < most ? own : most;
}

/* Less was sent in the window that has ended. */
static lc_overrun_verdict judge(lc_overrun *o, double share) {
    double least = falls(o) / 2;
    int again = o->again;
    o->testing = o->again = 0;
    if (o->share - share > least) {
        if (o->lost > DOUBTED) /* some of that may have been the sender's doing, too */
            o->lost *= HALF;
        return LC_OVERRUN_OWN;
    }
    o->lost = share < LOST_MOST ? share : LOST_MOST;
    o->patience = again ? 2 * patience(o) : AGAIN;
    return LC_OVERRUN_RANDOM;
}

/* Chance must not hide what the test is for. */
static int is_over(const lc_overrun *o, double share, uint64_t now, uint64_t rtt_ns) {
    double least = PACKETS * variance(o, share) / BURSTY;
    if (o->packets < least || now - o->from_ns < RTTS * rtt_ns)
        return 0;
    return !o->testing || o->packets > MOST * least ||
           lc_overrun_noise(o, share, o->packets) < falls(o) / 2;
}

lc_overrun_verdict lc_overrun_add(lc_overrun *o, uint64_t now, double moved, double taken,
                                  double packet, uint64_t rtt_ns) {
    if (!o->from_ns)
        lc_overrun_begin(o, now);
    if (now <= o->from_ns)
        return LC_OVERRUN_NONE;
    o->moved += moved;
    o->taken += taken;
    o->packets += moved / packet;
    double share = o->taken < o->moved ? 1 - o->taken / o->moved : 0;
    if (!is_over(o, share, now, rtt_ns))
        return LC_OVERRUN_NONE;
    o->came = 1e9 * o->taken / (double)(now - o->from_ns);
    double usual = o->lost + EXCESS + lc_overrun_noise(o, share, o->packets);
    lc_overrun_begin(o, now);
    if (o->testing)
        return judge(o, share);
    o->over = share > usual ? o->over + 1 : 0;
    if (o->over >= 2) { /* one may be chance, and the next is then less */
        lc_overrun_test(o, now, share, LC_OVERRUN_LESS, rtt_ns);
        return LC_OVERRUN_TEST;
    }
    if (o->over)
        return LC_OVERRUN_NONE;
    o->clean++;
    if (share < o->lost)
        o->lost += FADES * (share - o->lost);
    if (o->lost > DOUBTED && o->clean >= patience(o)) { /* the way may have been another then */
        lc_overrun_test(o, now, o->lost, LC_OVERRUN_LESS, rtt_ns);
        o->again = 1;
        return LC_OVERRUN_TEST;
    }
    return LC_OVERRUN_CLEAN;
}
