#include "shared_rate.h"

#include <math.h>

static const uint64_t STRETCH_MIN_NS = 20000000u, EPOCH_NS = 10000000000u;
static const uint32_t STRETCH_RTTS = 2, PACKETS_MIN = 48;
static const uint64_t PAUSE = 4;  /* a stretch over this without a packet ends it */
static const double GROWN = 1.05; /* a stretch that brings so many times more */
static const double AHEAD = 1.25; /* lets so much more be tried, */
static const uint32_t TRIED = 2;  /* for so many stretches; */
static const uint32_t EVERY = 32; /* so does each such stretch */
static const uint32_t UNTOLD = 3; /* times too short to tell: the rate may be another by now */

/* What an application leaves unsent says nothing of the path. */
static void take(lc_shared_rate *shared, uint64_t until) {
    double rate = 1e9 * shared->taken / (double)(until - shared->began_ns);
    double known = lc_shared_rate_now(shared);
    shared->untold = 0;
    if (!shared->held && rate <= known)
        return;
    if (until - shared->epoch_ns > EPOCH_NS) {
        shared->before = shared->most;
        shared->most = 0;
        shared->epoch_ns = until;
    }
    shared->flat = rate > GROWN * known ? 0 : shared->flat + 1;
    if (rate > shared->most)
        shared->most = rate;
}

static void begin(lc_shared_rate *shared, uint64_t now) {
    shared->began_ns = now;
    shared->taken = 0;
    shared->held = 0;
}

void lc_shared_rate_add(lc_shared_rate *shared, uint64_t now, uint32_t packets, uint64_t rtt_ns,
                        int held) {
    uint64_t stretch = STRETCH_RTTS * rtt_ns;
    if (stretch < STRETCH_MIN_NS)
        stretch = STRETCH_MIN_NS;
    uint64_t last = shared->heard_ns;
    shared->heard_ns = now;
    if (now - last > stretch / PAUSE) {
        if (shared->taken >= PACKETS_MIN && last - shared->began_ns >= stretch / 2)
            take(shared, last);
        else
            shared->untold++;
        begin(shared, now); /* what has come by now left before */
        return;
    }
    shared->taken += packets;
    shared->held |= held;
    if (now - shared->began_ns < stretch || shared->taken < PACKETS_MIN)
        return;
    take(shared, now);
    begin(shared, now);
}

double lc_shared_rate_now(const lc_shared_rate *shared) {
    return shared->most > shared->before ? shared->most : shared->before;
}

double lc_shared_rate_begin(const lc_shared_rate *shared, double most) {
    double rate = lc_shared_rate_now(shared);
    return rate > most ? rate : most;
}

double lc_shared_rate_bound(const lc_shared_rate *shared, double most) {
    double rate = lc_shared_rate_now(shared);
    if (rate <= 0 || shared->untold >= UNTOLD)
        return INFINITY;
    if (shared->flat < TRIED || shared->flat % EVERY == 0)
        rate *= AHEAD;
    return rate > most ? rate : most;
}
