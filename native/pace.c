#include "pace.h"

enum { WINDOW_MIN = 4, WINDOW_START = 256, WINDOW_MAX = 1 << 20 };

static const uint64_t EPOCH_NS = 10000000000u; /* memory of the least round trip */
static const uint64_t QUEUE_NS = 100000000u;   /* a standing queue of this is too long */
static const uint64_t RTO_MIN_NS = 5000000u, RTO_MAX_NS = 200000000u, RTO_START_NS = 20000000u;
static const double LOSS_TOLERANCE = 0.6, CUT = 0.7;

void lc_pace_init(lc_pace *pace, uint64_t now) {
    *pace = (lc_pace){.window = WINDOW_START, .epoch_ns = now};
}

uint32_t lc_pace_window(const lc_pace *pace, uint32_t peer_window) {
    uint32_t own = (uint32_t)pace->window;
    return own < peer_window ? own : peer_window;
}

static void sample_rtt(lc_pace *pace, uint64_t now, uint64_t rtt_ns) {
    pace->rtt_ns = pace->rtt_ns ? pace->rtt_ns - pace->rtt_ns / 8 + rtt_ns / 8 : rtt_ns;
    if (now - pace->epoch_ns > EPOCH_NS) {
        pace->rtt_min_ns = pace->epoch_min_ns;
        pace->epoch_min_ns = 0;
        pace->epoch_ns = now;
    }
    if (!pace->epoch_min_ns || rtt_ns < pace->epoch_min_ns)
        pace->epoch_min_ns = rtt_ns;
    if (!pace->rtt_min_ns || rtt_ns < pace->rtt_min_ns)
        pace->rtt_min_ns = rtt_ns;
}

void lc_pace_acked(lc_pace *pace, uint64_t now, uint64_t rtt_ns, uint32_t acked, uint32_t lost) {
    if (rtt_ns)
        sample_rtt(pace, now, rtt_ns);
    pace->acked += acked;
    pace->lost += lost;
    uint64_t patience = pace->rtt_ns > 1000000u ? pace->rtt_ns : 1000000u;
    if (now - pace->changed_ns < patience)
        return;
    int queue = pace->rtt_ns > pace->rtt_min_ns * 2 + QUEUE_NS;
    int loss = pace->lost > 64 && pace->lost > LOSS_TOLERANCE * (pace->lost + pace->acked);
    if (queue || loss)
        pace->window *= CUT;
    else
        pace->window +=
            pace->acked; /* doubles in a round trip, as long as nothing speaks against it */
    if (pace->window < WINDOW_MIN)
        pace->window = WINDOW_MIN;
    if (pace->window > WINDOW_MAX)
        pace->window = WINDOW_MAX;
    pace->acked = pace->lost = 0;
    pace->changed_ns = now;
}

uint64_t lc_pace_rto(const lc_pace *pace) {
    if (!pace->rtt_ns)
        return RTO_START_NS;
    uint64_t rto = 4 * pace->rtt_ns + RTO_MIN_NS;
    return rto < RTO_MAX_NS + pace->rtt_ns * 2 ? rto : RTO_MAX_NS + pace->rtt_ns * 2;
}

void lc_rate_init(lc_rate *rate, double bytes_per_s, uint64_t now) {
    *rate = (lc_rate){.bytes_per_s = bytes_per_s, .filled_ns = now};
}

/* Two milliseconds of sending, or one offloaded run, may be saved up. */
static double depth(const lc_rate *rate) {
    double most = rate->bytes_per_s * 0.002;
    return most > 65536 ? most : 65536;
}

static double tokens_at(const lc_rate *rate, uint64_t now) {
    double t = rate->tokens + rate->bytes_per_s * 1e-9 * (double)(now - rate->filled_ns);
    return t < depth(rate) ? t : depth(rate);
}

uint32_t lc_rate_take(lc_rate *rate, uint64_t now, uint32_t want, uint32_t packet_bytes) {
    if (rate->bytes_per_s <= 0)
        return want;
    rate->tokens = tokens_at(rate, now);
    rate->filled_ns = now;
    uint32_t may = (uint32_t)(rate->tokens / packet_bytes);
    if (may > want)
        may = want;
    rate->tokens -= (double)may * packet_bytes;
    return may;
}

uint64_t lc_rate_delay(const lc_rate *rate, uint64_t now, uint32_t packet_bytes) {
    if (rate->bytes_per_s <= 0)
        return 0;
    double short_of = packet_bytes - tokens_at(rate, now);
    return short_of <= 0 ? 0 : (uint64_t)(short_of / rate->bytes_per_s * 1e9) + 1;
}
