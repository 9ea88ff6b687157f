#include "measure.h"

static const uint64_t EPOCH_NS = 10000000000u; /* memory of the least delays */
static const double DRIFT = 1e-4;              /* of one clock against another, at most */
static const uint32_t STRANGE_MAX = 16;        /* acknowledgements */
static const double HOLD_MAX_S = 0.05;
static const int64_t BURST_NS = 2000000; /* of the peer's queue, beyond what stands there */
static const uint32_t TRAIN_MIN = 48, TRAIN_LEAST = 8;

/* Nothing was measured for so long that the clocks may have drifted by more than a queue. */
static int is_old(const lc_least *least, uint64_t now) {
    return now - least->began_ns > 2 * EPOCH_NS;
}

static void least_add(lc_least *least, uint64_t now, int64_t value) {
    if (!least->known || now - least->began_ns > EPOCH_NS) {
        least->before = least->known ? least->now : value;
        least->now = value;
        least->began_ns = now;
        least->known = 1;
    }
    if (value < least->now)
        least->now = value;
}

static int64_t least_of(const lc_least *least) {
    return least->now < least->before ? least->now : least->before;
}

int64_t lc_measure_rtt_ns(const lc_measure *path) {
    return least_of(&path->rtt);
}

int64_t lc_measure_way_ns(const lc_measure *path) {
    return 1000 * least_of(&path->way);
}

double lc_measure_rtt_s(const lc_measure *path) {
    return 1e-9 * (double)least_of(&path->rtt);
}

double lc_measure_loop_s(const lc_measure *path) {
    return lc_measure_rtt_s(path) + path->hold_s;
}

/* The rate of delivery is taken from the peer's clock over a train of packets: shorter than a round
 * trip, so that small operations on long paths tell it too, and longer than what a sleeping thread
 * or an aggregate of packets blurs. */
double lc_measure_rate(lc_measure *path, const lc_measure_ack *ack, double rate, double window) {
    uint64_t span_us = path->rtt_ns / 8000;
    if (span_us < 2000)
        span_us = 2000;
    if (span_us > 20000)
        span_us = 20000;
    /* Packets of a slow path come far apart; that is no pause of the sender. */
    double apart_us = rate > 0 ? 4e6 / rate : 1e-3 * (double)path->rtt_ns;
    double pause_us = 4 * (double)span_us > apart_us ? 4 * (double)span_us : apart_us;
    double least = window < TRAIN_MIN ? window : TRAIN_MIN;
    uint32_t gap = ack->arrived_us - path->last_us;
    uint32_t passed = ack->arrived_us - path->train_us;
    path->last_us = ack->arrived_us;
    if (!path->in_train || gap > pause_us) {
        path->in_train = 1;
        path->train_us = ack->arrived_us;
        path->train_taken = 0;
        return 0;
    }
    path->train_taken += ack->taken;
    if (passed < span_us || path->train_taken < least || path->train_taken < TRAIN_LEAST)
        return 0;
    double found = 1e6 * path->train_taken / passed;
    path->train_us = ack->arrived_us;
    path->train_taken = 0;
    return found;
}

/* After a long pause clocks have drifted, by so much at most; all who share the path begin at once,
 * perhaps, and the first packets that are heard of have met a queue. What is more than drift is
 * that, as far as the round trip has grown with it. Returns 0 if it hasn't: the path, or a clock,
 * is another. */
static int begin_again(lc_measure *path, const lc_measure_ack *ack, int64_t relative) {
    int64_t way = least_of(&path->way), longer = (int64_t)ack->rtt_ns - least_of(&path->rtt);
    int64_t drift = (int64_t)(DRIFT * 1e-3 * (double)(ack->now - path->way.began_ns));
    int64_t low = relative - (longer > 0 ? longer / 1000 : 0);
    if (low > way + drift || relative < way - drift)
        return 0;
    path->way.now = path->way.before = relative < way + drift ? relative : way + drift;
    path->rtt.now = path->rtt.before = least_of(&path->rtt);
    path->way.began_ns = path->rtt.began_ns = ack->now;
    return 1;
}

static void begin_way(lc_measure *path, uint32_t way_us) {
    path->way_first_us = way_us;
    path->way = path->watched_way = (lc_least){0};
}

/* The one-way delay against the first one, us. One way is a part of there and back: what says
 * otherwise is no measurement, and what goes on saying so is a clock that was set. */
static int64_t relative_way(lc_measure *path, const lc_measure_ack *ack) {
    uint32_t way = ack->arrived_us - ack->sent_us;
    int64_t relative = (int32_t)(way - path->way_first_us);
    if (!path->way.known || (is_old(&path->way, ack->now) && !begin_again(path, ack, relative))) {
        begin_way(path, way);
        path->rtt = (lc_least){0};
        relative = 0;
    }
    int64_t both_us = (int64_t)(path->rtt_ns + ack->rtt_ns) / 1000 + LC_NOISE_NS / 1000;
    int strange = path->way.known && relative < least_of(&path->way) - both_us;
    path->strange = strange ? path->strange + 1 : 0;
    if (path->strange >= STRANGE_MAX) {
        begin_way(path, way);
        return 0;
    }
    return strange ? least_of(&path->way) : relative;
}

int64_t lc_measure_sample(lc_measure *path, const lc_measure_ack *ack) {
    int64_t relative = relative_way(path, ack);
    path->rtt_ns = path->rtt_ns ? path->rtt_ns - path->rtt_ns / 8 + ack->rtt_ns / 8 : ack->rtt_ns;
    least_add(&path->rtt, ack->now, (int64_t)ack->rtt_ns);
    least_add(&path->way, ack->now, relative);
    if (path->watched) {
        least_add(&path->watched_way, ack->now, relative);
        least_add(&path->watched_rtt, ack->now, (int64_t)ack->rtt_ns);
    }
    int64_t queue = 1000 * (relative - least_of(&path->way));
    if (queue > (int64_t)ack->rtt_ns)
        queue = (int64_t)ack->rtt_ns;
    int64_t back = (int64_t)ack->rtt_ns - least_of(&path->rtt) - queue, most = path->back_ns;
    path->least_back_ns = back < path->least_back_ns ? back : path->least_back_ns;
    if (path->bursts && back > most + BURST_NS)
        back = most + BURST_NS;
    double hold = 1e-9 * (double)((int64_t)(ack->elapsed_ns - ack->rtt_ns) + back);
    path->hold_s -= path->hold_s / 64;
    if (hold > path->hold_s)
        path->hold_s = hold < HOLD_MAX_S ? hold : HOLD_MAX_S;
    if (queue < LC_NOISE_NS / 8)
        path->lowest_ns = ack->now;
    return queue;
}

void lc_measure_round(lc_measure *path, int bursts) {
    path->bursts = bursts;
    path->back_ns = path->least_back_ns;
    path->least_back_ns = INT64_MAX / 2;
}

void lc_measure_forget(lc_measure *path) {
    path->way.known = path->rtt.known = 0;
    path->rtt_ns = 0;
}

void lc_measure_watch(lc_measure *path) {
    path->watched = 1;
    path->watched_way = path->watched_rtt = (lc_least){0};
}

int lc_measure_watched(lc_measure *path, uint64_t now, int64_t *longer_ns) {
    path->watched = 0;
    path->lowest_ns = now;
    if (!path->watched_way.known)
        return 0;
    *longer_ns = 1000 * (path->watched_way.now - least_of(&path->way));
    path->way.now = path->way.before = path->watched_way.now;
    path->rtt.now = path->rtt.before = path->watched_rtt.now;
    path->way.began_ns = path->rtt.began_ns = now;
    return 1;
}
