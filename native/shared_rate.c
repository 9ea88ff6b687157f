#include "shared_rate.h"

static const uint64_t STRETCH_NS = 20000000u, EPOCH_NS = 10000000000u;
static const uint32_t PACKETS_MIN = 48;

void lc_shared_rate_add(lc_shared_rate *shared, uint64_t now, uint32_t packets) {
    uint64_t passed = now - shared->began_ns;
    shared->taken += packets;
    if (passed < STRETCH_NS || shared->taken < PACKETS_MIN)
        return;
    double rate = 1e9 * shared->taken / (double)passed;
    if (now - shared->epoch_ns > EPOCH_NS) {
        shared->before = shared->most;
        shared->most = 0;
        shared->epoch_ns = now;
    }
    if (rate > shared->most)
        shared->most = rate;
    shared->began_ns = now;
    shared->taken = 0;
}

double lc_shared_rate_now(const lc_shared_rate *shared) {
    return shared->most > shared->before ? shared->most : shared->before;
}

double lc_shared_rate_share(const lc_shared_rate *shared, double sum, double most) {
    double rate = lc_shared_rate_now(shared);
    rate = rate > most ? rate : most;
    return rate < sum ? rate / sum : 1;
}
