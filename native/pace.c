#include "pace.h"

#include <math.h>

enum { WINDOW_MIN = 4, WINDOW_START = 64, WINDOW_MAX = 1 << 20, PATIENCE = 3, PATIENCE_MAX = 48 };

static const uint64_t RTO_MIN_NS = 5000000u, RTO_START_NS = 20000000u;
static const uint64_t RTO_NOISE_NS = 20000000u; /* of a long round trip, beside a part of it */

/* A round trip below this is one machine or one rack: windows alone hold it, and a timer is too
 * coarse to pace it. What is shorter than the clocks' noise isn't taken for a queue. */
static const uint64_t PACED_RTT_NS = 1000000u;
static const uint64_t ROUND_MIN_NS = 2000000u;

/* Queue that one flow aims at: QUEUE_ONE / sqrt(bytes/s) seconds, 1 ms at 1 Gbit/s. With the root,
 * flows that share a queue share the rate alike, whatever they began with. */
static const double QUEUE_ONE = 11.2;
static const double RUN_S = 0.001, RUN_MIN = 2; /* a run of packets, seconds and packets */
static const double BURST_PACKETS = 4;
static const double STEP = 0.5;     /* share of the way to the aim that a round goes */
static const double CUT_MOST = 0.7; /* a round keeps at least so much of the window */
static const double AHEAD = 1.1;    /* paced so much above the rate where a queue shows room */
static const double TRIAL = 1.25;   /* and so much to try whether more gets through, */
static const double FAR_TRIAL = 2;  /* or so much where others of this host do that much better */
static const uint32_t FAR_PATIENCE = 8;
static const double FAR_TRIES = 6, FAR_PER_S = 0.2; /* each may overrun a far end that is slow */
static const double FOUND = 1.1;                    /* a trial that brings so much has found more */
static const double CEILING = 1.3;                  /* window against the rate of delivery */
static const double GROWN = 1.25;    /* a start goes on as long as a round brings so much more */
static const uint32_t TAKEN_MIN = 8; /* packets without which a round says nothing */
static const double CALM = 0.95; /* paced so in a round that tells random loss from an overrun */
static const double CALM_LOSS = 0.01;
static const uint32_t CALM_EVERY = LC_PACE_ROUNDS - 2;
static const uint64_t DIP_EVERY_NS = 5000000000u, DIP_MIN_NS = 10000000u;
static const double LONGER = 4; /* aims by which a path must grow to begin anew */
/* Lost beyond what is lost anyway: the buffer may be too short for the aims of all who share it. */
static const double EXCESS = 0.06, MODEST_CUT = 0.9, MODEST_STEP = 0.5, MODEST_MIN = 1.0 / 16;
static const double MODEST_GROWTH = 0.2; /* per second */
static const double FOLLOWED = 0.8;      /* loss that falls to so much was an overrun */
static const uint32_t MODEST_ROUNDS = 16;
static const double BURSTY = 16; /* variance of the packets lost, against single losses */
/* More than this is an overrun, whatever the queue says. */
static const double LOSS_TOLERANCE = 0.6;
static const uint32_t LOST_MIN = 64;

static const double SIZED = 0.02; /* packets whose sizes differ by less are alike */

/* Beside TCP: a window that grows by a packet a round and keeps so much of itself after a loss. */
static const double RIVAL_STEP = 1, RIVAL_KEPT = 0.7;
static const int64_t RIVAL_NS = 3 * LC_NOISE_NS; /* of queue in a dip are another's */
static const uint32_t RIVAL_TOLD = 2;            /* dips with it, more than without, tell */
static const uint32_t RIVAL_SEEN = 3; /* dips without it, at most, tell that it has gone */
static const uint32_t RIVAL_DIPS = 6; /* for which the way before is remembered */

/* ---- the law ---- */

double lc_pace_aim_s(double bytes_per_s) {
    double aim = bytes_per_s > 0 ? QUEUE_ONE / sqrt(bytes_per_s) : 0;
    return aim > 1e-9 * (double)LC_NOISE_NS ? aim : 1e-9 * (double)LC_NOISE_NS;
}

/* Seconds of queue that this flow aims at. */
static double aim_s(const lc_pace *pace, double packets_per_s) {
    return pace->modest * lc_pace_aim_s(packets_per_s * pace->packet_bytes);
}

void lc_pace_init(lc_pace *pace, uint64_t now, uint64_t clock_ns, uint32_t packet_bytes) {
    *pace = (lc_pace){.window = WINDOW_START,
                      .packet_bytes = packet_bytes,
                      .round_ns = now,
                      .clock_ns = clock_ns,
                      .patience = PATIENCE,
                      .modest = 1,
                      .share = 1,
                      .far_tries = FAR_TRIES,
                      .least_share = 1,
                      .least_before = 1,
                      .most_before = 1,
                      .least_queue_ns = INT64_MAX};
}

/* Packets/s that must go out for the rate of delivery. What is lost even in calm rounds is random
 * and doesn't mean less; what isn't, or comes with a long queue, was an overrun. */
static double send_rate(const lc_pace *pace) {
    if (pace->calm)
        return CALM * pace->rate;
    return pace->high_rounds ? pace->rate : pace->rate / (1 - pace->loss);
}

void lc_pace_sized(lc_pace *pace, double packet_bytes) {
    double times = pace->packet_bytes / packet_bytes;
    if (fabs(times - 1) < SIZED)
        return;
    pace->packet_bytes = packet_bytes;
    pace->window *= times;
    pace->window_before *= times;
    pace->rival_window *= times;
    pace->rate *= times;
    pace->best_rate *= times;
    pace->tried_from *= times;
    for (int i = 0; i < LC_PACE_ROUNDS; i++)
        pace->rates[i] *= times;
}

/* Seconds until what goes out is heard of, without a queue that is for this law to shorten. */
static double loop_s(const lc_pace *pace) {
    return lc_measure_loop_s(&pace->measure) + 1e-9 * (double)pace->common_ns;
}

/* What keeps the path busy, with this flow's part of the queue. */
static double full_window(const lc_pace *pace) {
    double rate = send_rate(pace);
    return rate * (loop_s(pace) + aim_s(pace, rate));
}

/* More goes out for one round; what comes of it shows in the next two. */
static int trying(const lc_pace *pace) {
    return pace->tried_from > 0 && pace->trial_rounds == 0;
}

/* Whether twice as much is tried: small steps, which noise hides, don't bring a path to its share
 * whose start ended too soon. */
static int tries_far(const lc_pace *pace) {
    return pace->share >= FAR_TRIAL && pace->far_tries >= 1;
}

/* By its port, or by itself. */
static int is_paced(const lc_pace *pace) {
    return pace->by_port || (!pace->same_host && pace->measure.rtt.known &&
                             lc_measure_rtt_ns(&pace->measure) >= (int64_t)PACED_RTT_NS);
}

static void set_gate(lc_pace *pace, uint64_t now) {
    double rtt = lc_measure_rtt_s(&pace->measure);
    if (pace->by_port || !is_paced(pace)) {
        lc_rate_init(&pace->gate, 0, now);
        return;
    }
    double rate = 2 * pace->window / rtt;
    if (pace->cruising)
        rate = send_rate(pace) * (pace->calm               ? 1
                                  : trying(pace)           ? pace->trial
                                  : pace->idle_rounds == 0 ? AHEAD
                                                           : 1);
    double beside = 1e9 * pace->rival_window / (double)pace->measure.rtt_ns;
    if (rate < beside)
        rate = beside;
    if (pace->cruising && pace->share < 1)
        rate *= pace->share;
    /* The least window is for a round that says something within some round trips. At less it may
     * take seconds, and a rate that was taken for too low is never found out. */
    double least = WINDOW_MIN / rtt;
    if (rate < least)
        rate = least;
    lc_rate_set(&pace->gate, rate * pace->packet_bytes, BURST_PACKETS * pace->packet_bytes, now);
}

/* What a path delivers at a share of its rate would have been more at all of it. Where the share
 * was all of it for a part of the time, nobody knows how much more: such rounds tell nothing,
 * unless there are no others for long. Returns whether this one tells of the rate. */
static int allow_for_share(lc_pace *pace) {
    double least = pace->least_share < pace->least_before ? pace->least_share : pace->least_before;
    double most = pace->most_share > pace->most_before ? pace->most_share : pace->most_before;
    if (!pace->cruising || least >= 1 || pace->best_rate >= pace->rate) {
        pace->untold = 0;
        return 1;
    }
    if (most >= 1 && pace->untold++ < LC_PACE_ROUNDS)
        return 0;
    pace->best_rate /= most >= 1 ? least : most;
    if (pace->best_rate > pace->rate)
        pace->best_rate = pace->rate;
    return 1;
}

static void keep_rate(lc_pace *pace) {
    if (pace->best_rate <= 0 || (!pace->limited && pace->best_rate <= pace->rate))
        return;
    if (!allow_for_share(pace))
        return;
    uint32_t i = pace->n_rounds++ % LC_PACE_ROUNDS;
    pace->rates[i] = pace->best_rate;
    pace->losses[i] = pace->taken < pace->moved ? 1 - (double)pace->taken / pace->moved : 0;
    uint32_t n = pace->n_rounds < LC_PACE_ROUNDS ? pace->n_rounds : LC_PACE_ROUNDS;
    pace->rate = 0;
    pace->loss = 0.5;
    for (i = 0; i < n; i++) {
        pace->rate = pace->rates[i] > pace->rate ? pace->rates[i] : pace->rate;
        pace->loss = pace->losses[i] < pace->loss ? pace->losses[i] : pace->loss;
    }
}

static void judge_trial(lc_pace *pace);

static void start_cruising(lc_pace *pace) {
    keep_rate(pace);
    if (pace->rate <= 0)
        return;
    pace->cruising = 1;
    if (pace->by_port && pace->tried_from > 0) {
        pace->trial_rounds = 3;
        judge_trial(pace);
    }
    if (full_window(pace) < pace->window)
        pace->window = full_window(pace);
}

static void start(lc_pace *pace, double rate_before) {
    if (!pace->limited)
        return;
    pace->window *= 2;
    if (rate_before > 0)
        pace->flat_rounds = pace->rate < GROWN * rate_before ? pace->flat_rounds + 1 : 0;
    if (pace->flat_rounds >= 3 && !pace->by_port)
        start_cruising(pace);
}

/* More is tried where no queue stands; a path with a short buffer would else be overrun for good.
 */
static void judge_trial(lc_pace *pace) {
    if (pace->tried_from <= 0)
        return;
    if (++pace->trial_rounds == 1 && pace->window > full_window(pace))
        pace->window = full_window(pace);
    if (pace->trial_rounds < 3)
        return;
    if (pace->rate >= FOUND * pace->tried_from)
        pace->patience = 1;
    else
        pace->patience = pace->patience * 2 < PATIENCE_MAX ? pace->patience * 2 : PATIENCE_MAX;
    pace->tried_from = 0;
    pace->idle_rounds = 0;
}

/* The port paces, and nothing says that the way beyond it carries less. */
static void start_again(lc_pace *pace) {
    pace->cruising = 0;
    pace->tried_from = pace->rate;
    pace->flat_rounds = 0;
    pace->high_ns = 0;
    pace->calm = 0;
    pace->idle_rounds = 0;
}

static void cruise(lc_pace *pace, double queue) {
    double loop = loop_s(pace);
    int was_calm = pace->calm;
    pace->calm = 0;
    double aim = aim_s(pace, send_rate(pace));
    double before = pace->window;
    double full = full_window(pace);
    double want = before * loop / (loop + queue) + send_rate(pace) * aim;
    if (queue < aim / 2 && want < full)
        want = full;
    if (queue < 1e-9 * (double)LC_NOISE_NS && want < before)
        want = before;
    if (was_calm)
        want = before; /* its queue was this law's doing */
    if (want < before || pace->limited)
        pace->window += STEP * (want - before);
    if (pace->window < CUT_MOST * before)
        pace->window = CUT_MOST * before;
    judge_trial(pace);
    pace->idle_rounds = queue < aim / 3 && pace->limited ? pace->idle_rounds + 1 : 0;
    if (!pace->high_rounds)
        pace->window_before = before;
    pace->high_rounds = queue > 4 * aim ? pace->high_rounds + 1 : 0;
    if (pace->high_rounds >= 4)
        pace->patience = PATIENCE; /* a trial's queue is gone by now: the path has changed */
    int far = tries_far(pace);
    uint32_t patience = far && pace->patience > FAR_PATIENCE ? FAR_PATIENCE : pace->patience;
    if (pace->by_port && pace->idle_rounds >= patience) {
        start_again(pace);
        return;
    }
    if (pace->tried_from <= 0 && pace->idle_rounds >= patience) {
        pace->tried_from = pace->rate;
        pace->trial_rounds = 0;
        pace->trial = far ? FAR_TRIAL : TRIAL;
        pace->far_tries -= far;
        pace->window = pace->trial * (pace->window > full ? pace->window : full);
    }
    double most = trying(pace) && pace->trial > CEILING ? pace->trial : CEILING;
    if (pace->window > most * full)
        pace->window = most * full;
    pace->calm = ++pace->rounds % CALM_EVERY == 0 && pace->loss > CALM_LOSS;
}

static uint32_t lost_of(const lc_pace *pace) {
    return pace->moved > pace->taken ? pace->moved - pace->taken : 0;
}

/* To a queue this law gives way, and TCP, which fills whatever there is, would leave it next to
 * nothing. So beside TCP as much is in flight as TCP would have. */
static void keep_up(lc_pace *pace) {
    if (!pace->rival_window)
        return;
    if (lost_of(pace) > 0)
        pace->rival_window *= RIVAL_KEPT;
    else if (pace->limited)
        pace->rival_window += RIVAL_STEP;
    if (pace->rival_window < WINDOW_MIN)
        pace->rival_window = WINDOW_MIN;
    if (pace->rival_window > WINDOW_MAX)
        pace->rival_window = WINDOW_MAX;
}

/* After a dip: all senders of this law had lowered their windows, to a few packets at least, and a
 * queue that stood all the same, for the way and for the round trip, is of somebody who doesn't.
 * Some of them may not have dipped, so it takes two dips to tell. A longer path looks alike; it is
 * used whatever this window is. */
static void judge_rival(lc_pace *pace, int64_t way_ns, int64_t rtt_ns) {
    if (pace->rival_dips == 0 || pace->rival_dips > RIVAL_DIPS) {
        pace->rival_way_ns = way_ns;
        pace->rival_rtt_ns = rtt_ns;
        pace->rival_dips = 0;
    }
    pace->rival_dips++;
    int64_t queue = lc_measure_way_ns(&pace->measure) - pace->rival_way_ns;
    int64_t both = lc_measure_rtt_ns(&pace->measure) - pace->rival_rtt_ns;
    double few_ns =
        (pace->rate > 0 ? 1e9 * WINDOW_MIN / pace->rate : 0) - (double)pace->rival_rtt_ns;
    if ((double)(queue < both ? queue : both) > (double)RIVAL_NS + (few_ns > 0 ? few_ns : 0))
        pace->rival_seen += pace->rival_seen < RIVAL_SEEN;
    else
        pace->rival_seen -= pace->rival_seen > 0;
    if (pace->rival_seen == 0)
        pace->rival_window = pace->rival_dips = 0;
    else if (pace->rival_seen >= RIVAL_TOLD && !pace->rival_window)
        pace->rival_window = pace->window;
}

/* The least delay is only seen while no queue stands. Where that has not been for long, all senders
 * lower their windows at the same moment of the day, and what is still there then is the path. */
static void dip(lc_pace *pace, uint64_t now) {
    if (pace->dip_ns) {
        if (now < pace->dip_ns)
            return;
        pace->dip_ns = 0;
        int64_t longer_ns, way_ns = lc_measure_way_ns(&pace->measure);
        int64_t rtt_ns = lc_measure_rtt_ns(&pace->measure);
        if (lc_measure_watched(&pace->measure, now, &longer_ns)) {
            judge_rival(pace, way_ns, rtt_ns);
            /* What passed for a queue was a longer path, and the window was cut for nothing. */
            if (longer_ns > LONGER * 1e9 * aim_s(pace, send_rate(pace))) {
                pace->cruising = 0;
                if (pace->high_rounds && pace->window < pace->window_before)
                    pace->window = pace->window_before;
            }
            pace->flat_rounds = 0;
            pace->high_ns = 0;
        }
        return;
    }
    uint64_t length = 2 * (pace->measure.rtt_ns > DIP_MIN_NS ? pace->measure.rtt_ns : DIP_MIN_NS);
    if (!pace->cruising || now - pace->measure.lowest_ns < DIP_EVERY_NS / 2 ||
        (now + pace->clock_ns) % DIP_EVERY_NS > length)
        return;
    pace->dip_ns = now + length;
    lc_measure_watch(&pace->measure);
}

static double few_loss(const lc_pace *pace) {
    return pace->few_moved > 0 ? pace->few_lost / pace->few_moved : 0;
}

/* Less has been aimed at. Loss that follows was an overrun; what doesn't is the path's own. */
static void judge_modesty(lc_pace *pace) {
    double loss = few_loss(pace);
    if (loss > FOLLOWED * pace->loss_from) {
        pace->base_loss = loss;
        pace->modest = 1;
    }
    pace->modest_from = 0;
}

/* A buffer that is shorter than what its senders aim at is full for good, drops what comes, and its
 * queue looks short to each of them. All see the loss, and all aim at less. */
static void be_modest(lc_pace *pace, uint64_t now) {
    pace->few_lost += lost_of(pace) - pace->few_lost / MODEST_ROUNDS;
    pace->few_moved += pace->moved - pace->few_moved / MODEST_ROUNDS;
    double loss = few_loss(pace);
    if (pace->modest_from > 0) {
        if (pace->modest > MODEST_STEP * pace->modest_from)
            pace->modest *= MODEST_CUT;
        else if (pace->modest_rounds++ == MODEST_ROUNDS)
            judge_modesty(pace);
        return;
    }
    if (pace->base_loss > loss)
        pace->base_loss += (loss - pace->base_loss) / MODEST_ROUNDS;
    double noise = sqrt(BURSTY * pace->few_lost);
    double usual = (pace->base_loss + EXCESS) * pace->few_moved + noise;
    if (pace->few_lost > usual && pace->modest > MODEST_MIN) {
        pace->modest_from = pace->modest;
        pace->loss_from = loss;
        pace->modest_rounds = 0;
    } else {
        pace->modest *= 1 + MODEST_GROWTH * 1e-9 * (double)(now - pace->round_ns);
        pace->modest = pace->modest < 1 ? pace->modest : 1;
    }
}

/* Gives way to a loss that can't be random. Before any train has told the rate, what is left of a
 * burst doesn't tell it either: over a round with a pause in it, that may be a packet per second.
 * What came through is what the path has room for, and the start goes on from there. */
static void cut(lc_pace *pace) {
    if (!pace->cruising) {
        start_cruising(pace);
        if (!pace->cruising && pace->taken < pace->window)
            pace->window = pace->taken;
        return;
    }
    pace->window *= CUT_MOST;
    pace->rate *= CUT_MOST;
    for (uint32_t i = 0; i < LC_PACE_ROUNDS; i++)
        pace->rates[i] *= CUT_MOST;
}

/* A window of a few packets takes several round trips to say something. */
static int round_over(const lc_pace *pace, uint64_t now) {
    uint64_t least = pace->measure.rtt_ns > ROUND_MIN_NS ? pace->measure.rtt_ns : ROUND_MIN_NS;
    return now - pace->round_ns >= least && (pace->taken >= TAKEN_MIN || lost_of(pace) > LOST_MIN);
}

static void end_round(lc_pace *pace, uint64_t now) {
    uint32_t lost = lost_of(pace);
    if (lost > LOST_MIN && lost > LOSS_TOLERANCE * pace->moved)
        cut(pace);
    else if (pace->taken >= TAKEN_MIN && pace->least_queue_ns != INT64_MAX && !pace->dip_ns) {
        double before = pace->rate;
        keep_rate(pace);
        be_modest(pace, now);
        keep_up(pace);
        if (pace->cruising)
            cruise(pace, 1e-9 * (double)pace->least_queue_ns);
        else
            start(pace, before);
    }
    if (pace->window < WINDOW_MIN)
        pace->window = WINDOW_MIN;
    if (pace->window > WINDOW_MAX)
        pace->window = WINDOW_MAX;
    pace->far_tries += FAR_PER_S * 1e-9 * (double)(now - pace->round_ns);
    pace->far_tries = pace->far_tries < FAR_TRIES ? pace->far_tries : FAR_TRIES;
    pace->round_ns = now;
    lc_measure_round(&pace->measure, pace->alone && !is_paced(pace));
    pace->least_queue_ns = INT64_MAX;
    pace->best_rate = 0;
    pace->moved = pace->taken = 0;
    pace->limited = 0;
    pace->least_before = pace->least_share;
    pace->most_before = pace->most_share;
    pace->least_share = 1;
    pace->most_share = 0;
}

static int has_lasted(const lc_pace *pace, const lc_measure_ack *ack) {
    int32_t peer_us = (int32_t)(ack->arrived_us - pace->high_us);
    return ack->now - pace->high_ns > ROUND_MIN_NS ||
           (pace->alone && !pace->by_port && peer_us > (int32_t)(3 * ROUND_MIN_NS / 1000));
}

/* A lone path's by the peer's clock, too: acknowledgements that waited behind what the peer itself
 * sends come all at once. */
static void watch_start(lc_pace *pace, const lc_measure_ack *ack, int64_t queue) {
    int64_t high = lc_measure_rtt_ns(&pace->measure) / 8;
    if (high < 2 * LC_NOISE_NS)
        high = 2 * LC_NOISE_NS;
    if (queue <= high)
        pace->high_ns = 0;
    else if (!pace->high_ns) {
        pace->high_ns = ack->now;
        pace->high_us = ack->arrived_us;
    } else if (has_lasted(pace, ack))
        start_cruising(pace);
}

int lc_pace_rests(const lc_pace *pace, uint64_t now) {
    return !pace->same_host && pace->cruising && now - pace->heard_ns > pace->measure.rtt_ns &&
           lc_measure_rtt_ns(&pace->measure) >= (int64_t)PACED_RTT_NS;
}

void lc_pace_start(lc_pace *pace) {
    pace->cruising = 0;
    pace->flat_rounds = 0;
    pace->high_ns = 0;
}

void lc_pace_begin(lc_pace *pace, uint64_t now, double share) {
    pace->heard_ns = now; /* from here on that is waited for */
    pace->share = share;
    if (share < 1 && pace->window > share * full_window(pace))
        pace->window = share * full_window(pace);
    set_gate(pace, now);
}

void lc_pace_acked(lc_pace *pace, const lc_measure_ack *ack, double share, int64_t common_ns) {
    pace->by_port = common_ns >= 0;
    pace->common_ns = common_ns > 0 ? common_ns : 0;
    pace->heard_ns = ack->now;
    pace->share = share;
    pace->least_share = share < pace->least_share ? share : pace->least_share;
    pace->most_share = share > pace->most_share ? share : pace->most_share;
    pace->moved += ack->moved;
    pace->taken += ack->taken;
    if (ack->rtt_ns) {
        pace->queue_ns = lc_measure_sample(&pace->measure, ack);
        int64_t queue = pace->queue_ns - pace->common_ns;
        queue = queue > 0 ? queue : 0;
        double rate = lc_measure_rate(&pace->measure, ack, pace->rate, pace->window);
        pace->best_rate = rate > pace->best_rate ? rate : pace->best_rate;
        pace->least_queue_ns = queue < pace->least_queue_ns ? queue : pace->least_queue_ns;
        if (!pace->cruising)
            watch_start(pace, ack, queue);
        dip(pace, ack->now);
    }
    if (round_over(pace, ack->now))
        end_round(pace, ack->now);
    set_gate(pace, ack->now);
}

void lc_pace_limited(lc_pace *pace) {
    pace->limited = 1;
}

uint32_t lc_pace_window(const lc_pace *pace, uint32_t peer_window) {
    if (pace->same_host)
        return peer_window;
    double room = peer_window;
    double window = pace->window > pace->rival_window ? pace->window : pace->rival_window;
    if (pace->calm && full_window(pace) < window)
        window = full_window(pace);
    if (pace->dip_ns)
        window = send_rate(pace) * lc_measure_rtt_s(&pace->measure) / 2;
    if (window < WINDOW_MIN)
        window = WINDOW_MIN; /* without a packet on its way nothing would ever be heard */
    if (pace->measure.rtt.known && lc_measure_rtt_ns(&pace->measure) > (int64_t)PACED_RTT_NS)
        room += send_rate(pace) * 1e-9 *
                (double)(lc_measure_rtt_ns(&pace->measure) - (int64_t)PACED_RTT_NS);
    return (uint32_t)(window < room ? window : room);
}

/* A run is a millisecond of sending at most: a long one stands in the way of others. */
uint32_t lc_pace_room(const lc_pace *pace, uint64_t now, uint32_t want, uint32_t packet_bytes) {
    double run = pace->gate.bytes_per_s * RUN_S / packet_bytes;
    if (run < RUN_MIN)
        run = RUN_MIN;
    if (pace->gate.bytes_per_s > 0 && run < want)
        want = (uint32_t)run;
    return lc_rate_room(&pace->gate, now, want, packet_bytes);
}

void lc_pace_spend(lc_pace *pace, uint64_t now, uint32_t packets, uint32_t packet_bytes) {
    lc_rate_spend(&pace->gate, now, packets, packet_bytes);
}

uint64_t lc_pace_delay(const lc_pace *pace, uint64_t now, uint32_t packet_bytes) {
    return lc_rate_delay(&pace->gate, now, packet_bytes);
}

double lc_pace_rate(const lc_pace *pace) {
    return pace->rate / (1 - pace->loss) * pace->packet_bytes;
}

uint64_t lc_pace_queue(const lc_pace *pace) {
    return pace->least_queue_ns == INT64_MAX ? 0 : (uint64_t)pace->least_queue_ns;
}

uint64_t lc_pace_rto(const lc_pace *pace) {
    if (!pace->measure.rtt_ns)
        return RTO_START_NS;
    uint64_t rtt = pace->measure.rtt_ns, more = rtt / 2 + RTO_NOISE_NS;
    return rtt + (3 * rtt < more ? 3 * rtt : more) + RTO_MIN_NS;
}
