#include "rate.h"

#include <math.h>

static const double RUN_BYTES = 65536; /* one offloaded run */
static const double SAVED_S = 0.002;   /* of sending may be saved up */
static const double DELAY_MAX_S = 1e6;
static const double LEVEL_LEAST = 4096, LEVELS = 12; /* of each doubling */

void lc_rate_init(lc_rate *rate, double bytes_per_s, uint64_t now) {
    *rate = (lc_rate){.bytes_per_s = bytes_per_s, .burst_bytes = RUN_BYTES, .filled_ns = now};
}

static double tokens_at(const lc_rate *rate, uint64_t now) {
    double most = rate->bytes_per_s * SAVED_S;
    if (most < rate->burst_bytes)
        most = rate->burst_bytes;
    double tokens = rate->tokens + rate->bytes_per_s * 1e-9 * (double)(now - rate->filled_ns);
    return tokens < most ? tokens : most;
}

static void fill(lc_rate *rate, uint64_t now) {
    rate->tokens = rate->bytes_per_s > 0 ? tokens_at(rate, now) : 0;
    rate->filled_ns = now;
}

void lc_rate_set(lc_rate *rate, double bytes_per_s, double burst_bytes, uint64_t now) {
    fill(rate, now);
    rate->bytes_per_s = bytes_per_s;
    rate->burst_bytes = burst_bytes;
}

uint32_t lc_rate_room(const lc_rate *rate, uint64_t now, uint32_t want, uint32_t packet_bytes) {
    if (rate->bytes_per_s <= 0)
        return want;
    double room = tokens_at(rate, now) / packet_bytes;
    if (room < 0)
        return 0; /* what may not wait has gone ahead of it */
    return room < want ? (uint32_t)room : want;
}

void lc_rate_spend(lc_rate *rate, uint64_t now, uint32_t packets, uint32_t packet_bytes) {
    if (rate->bytes_per_s <= 0)
        return;
    fill(rate, now);
    rate->tokens -= (double)packets * packet_bytes;
}

uint64_t lc_rate_delay(const lc_rate *rate, uint64_t now, uint32_t packet_bytes) {
    if (rate->bytes_per_s <= 0)
        return 0;
    double short_of = packet_bytes - tokens_at(rate, now);
    if (short_of <= 0)
        return 0;
    double delay_s = short_of / rate->bytes_per_s;
    return (uint64_t)((delay_s < DELAY_MAX_S ? delay_s : DELAY_MAX_S) * 1e9) + 1;
}

uint8_t lc_rate_level(double bytes_per_s) {
    if (bytes_per_s <= 0)
        return 0;
    double level = 1.5 + LEVELS * log2(bytes_per_s / LEVEL_LEAST);
    return (uint8_t)(level < 1 ? 1 : level < UINT8_MAX ? level : UINT8_MAX);
}

double lc_rate_of_level(uint8_t level) {
    return level ? LEVEL_LEAST * exp2((level - 1) / LEVELS) : 0;
}
