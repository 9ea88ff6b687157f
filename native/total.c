#include "total.h"

static const uint64_t STRETCH_NS = 20000000u, EPOCH_NS = 10000000000u;
static const uint32_t PACKETS_MIN = 48;

void lc_total_add(lc_total *total, uint64_t now, uint32_t packets) {
    uint64_t passed = now - total->began_ns;
    total->taken += packets;
    if (passed < STRETCH_NS || total->taken < PACKETS_MIN)
        return;
    double rate = 1e9 * total->taken / (double)passed;
    if (now - total->epoch_ns > EPOCH_NS) {
        total->before = total->most;
        total->most = 0;
        total->epoch_ns = now;
    }
    if (rate > total->most)
        total->most = rate;
    total->began_ns = now;
    total->taken = 0;
}

double lc_total_rate(const lc_total *total) {
    return total->most > total->before ? total->most : total->before;
}

double lc_total_share(const lc_total *total, double sum, double most) {
    double rate = lc_total_rate(total);
    rate = rate > most ? rate : most;
    return rate < sum ? rate / sum : 1;
}
