#include "port.h"

#include "pace.h"

static const double NOISE_S = 1e-9 * LC_NOISE_NS;
static const uint64_t EPOCH_MIN_NS = 10000000u, EPOCH_RTTS = 2;
static const double EPOCH_BYTES = 16 * 1500.0, START_BYTES = 64 * 1500.0, START_S = 0.02;
static const double LEAST_BYTES = 4 * 1500.0; /* in a round trip */
static const double LOST_START = 0.3;         /* so much lost ends a start */
static const double GAIN = 0.5;       /* share of a queue beyond the aim that an epoch takes away */
static const double CUT_MOST = 0.7;   /* an epoch sends at least so much of the rate, */
static const double SUDDEN = 0.1;     /* share lost beyond the usual that needs no test */
static const double LOST_MOST = 0.95; /* share that is taken for usual */
static const double LESS = 0.97;      /* of what was sent */
static const double EXCESS = 0.015;   /* share lost beyond the usual that chance does not explain */
static const double EVEN = 0.5;       /* of the way to what a site's hosts send at, on average, */
static const double EVEN_MOST = 2;    /* which is at most so many times what this one does */
static const uint32_t EVEN_EPOCHS = 3; /* for so long a queue says that it was too much */
static const double PUSH = 1.0 / 32;   /* and at most so much more, */
static const double RESTED = 0.9; /* who sent less than this share of what it might has rested */
static const double STEP = 0.25;  /* share of the way to what was carried that an epoch goes */
static const uint32_t LONG_EPOCHS =
    4;                              /* with as little as possible, in which a queue must shrink */
static const double CUT_SEEN = 0.5; /* by so much of what it should */
static const double CAP_STEP = 0.005, CAP_STEP_MAX = 0.125; /* growth of the bound in a window, */
static const uint32_t CAP_TWICE = 4, CAP_TWICE_MOST = 6,
                      CAP_GUESSED = 4; /* twice as much after so many, so often */
static const double CAP_SAME = 0.8;    /* a bound of so much of the one before confirms it, */
static const uint32_t CAP_SURE = 2;    /* and each such doubles CAP_TWICE, so often */
static const uint64_t ACK_MAX_NS = 10000000u; /* acknowledgements wait so long, at most */
static const uint64_t LATE_NS = 2000000u;     /* beside what threads take */
static const double BURST_PACKETS = 512;      /* over which the length of bursts is averaged, */
static const double BURST_MOST = 16;          /* and of how many packets one is at most */
static const double TOLD = 0.5;               /* share of a trial after which its packets tell */
static const double TRIAL_MIN = 1.0 / 16, TRIAL_MAX = 1;
static const double TRIAL_AIMS = 2, TRIAL_TIMES = 16; /* of the aim, and of the least trial */
static const uint32_t PATIENCE = 2, PATIENCE_MAX = 64, PATIENCE_OVERRUN = 8;

static double within(double value, double least, double most) {
    return value < least ? least : value < most ? value : most;
}

/* Seconds of queue that the port aims at. */
static double aim_s(const lc_port *port) {
    double aim = lc_pace_aim_s(port->rate);
    if (port->aim_most > 0 && aim > port->aim_most)
        aim = port->aim_most;
    double least = 3 * 1500 / port->rate; /* a few packets' time isn't a queue */
    if (least < NOISE_S)
        least = NOISE_S;
    return aim > least ? aim : least;
}

static void begin_epoch(lc_port *port, uint64_t now) {
    port->epoch_ns = now;
    port->moved = port->packets = port->taken = port->sent = port->spilled = 0;
    port->held_before = port->held; /* what is heard of now was sent a round trip ago */
    port->held = port->began = 0;
    port->peak_ns = 0;
    port->least_queue_ns = INT64_MAX;
    port->most_queue_ns = 0;
}

void lc_port_init(lc_port *port, uint64_t now) {
    *port = (lc_port){.start = START_BYTES, .patience = PATIENCE, .trial = TRIAL_MIN};
    begin_epoch(port, now);
    port->allowed = START_BYTES / START_S;
}

/* At less, nobody would find out for long that more goes through; none at all means no bound. */
double lc_port_least(const lc_port *port) {
    double rtt = port->rtt_ns ? 1e-9 * (double)port->rtt_ns : START_S;
    return LEAST_BYTES / (rtt > START_S ? rtt : START_S);
}

static void allow(lc_port *port, double bytes_per_s) {
    double least = lc_port_least(port);
    port->allowed = bytes_per_s > least ? bytes_per_s : least;
}

/* ---- a start ---- */

static void set_start(lc_port *port) {
    double rtt = port->rtt_ns ? 1e-9 * (double)port->rtt_ns : START_S;
    allow(port, 2 * port->start / rtt);
}

void lc_port_serves(lc_port *port, uint16_t n_paths) {
    if (n_paths <= 1 && port->cap <= 0)
        port->allowed = 0;
    else if (port->allowed <= 0 && port->rate > 0)
        allow(port, port->rate);
    else if (port->allowed <= 0)
        set_start(port);
}

/* A queue that ends a start: buffers hold no more because the way is long. */
static double high_s(const lc_port *port) {
    double high = 1e-9 * (double)port->rtt_ns / 8, most = 2 * lc_pace_aim_s(port->allowed);
    if (high > most)
        high = most;
    return high > 2 * NOISE_S ? high : 2 * NOISE_S;
}

/* Bytes/s that came while the queue was too long for a start: what the port carries. 0: it has been
 * for too short to tell. */
static double taken_since_high(const lc_port *port, uint64_t now) {
    uint64_t ns = now - port->high_ns;
    return ns >= 2 * ACK_MAX_NS ? 1e9 * port->high_taken / (double)ns : 0;
}

/* Doubles as long as no queue of this port stands: one that didn't hold packets back has none. */
static void start(lc_port *port, uint64_t now, double taken, double queue) {
    double high = high_s(port);
    if (((port->held || port->held_before) && queue > high) || port->lost > LOST_START) {
        double stood = taken_since_high(port, now);
        port->rate = taken > stood ? taken : stood;
        if (port->rate < lc_port_least(port))
            port->rate = lc_port_least(port);
        port->trial = TRIAL_MAX / 4;
        port->patience = 0;
        port->fresh = 1;
        allow(port, queue > high ? CUT_MOST * port->rate : port->rate);
        lc_overrun_begin(&port->overrun, now + 2 * port->rtt_ns);
        return;
    }
    if (port->held && 1e-9 * (double)port->low_ns <= high / 2) /* else it may end soon */
        port->start *= 2;
    set_start(port);
}

/* ---- the law ---- */

/* The share by which a trial begins: what it queues in an epoch is no more than twice the aim. */
static double least_trial(const lc_port *port) {
    double least = TRIAL_AIMS * aim_s(port) / (1e-9 * (double)(EPOCH_RTTS * port->rtt_ns));
    return least < TRIAL_MIN ? least : TRIAL_MIN;
}

/* None queues more than so many times that. */
static double trial_of(const lc_port *port, double share) {
    double least = least_trial(port), most = TRIAL_TIMES * least;
    share = share > least ? share : least;
    return share < most ? share : most;
}

/* What a packet that was sent while more was tried tells of it: all of it that the port doesn't
 * carry is in the queue. What delays wander is there too, so the shortest queue tells most. */
static void watch_trial(lc_port *port, const lc_port_ack *ack) {
    if (port->tried_from <= 0 || ack->sent_ns <= port->tried_ns || ack->sent_ns > port->tried_to_ns)
        return;
    double seconds = 1e-9 * (double)(ack->sent_ns - port->tried_ns);
    double queue = 1e-9 * (double)ack->queue_ns;
    if (seconds < TOLD * 1e-9 * (double)(EPOCH_RTTS * port->rtt_ns))
        return;
    double found = queue <= aim_s(port) / 2 ? port->trial : port->trial - queue / seconds;
    if (found > port->tried_found)
        port->tried_found = found;
}

/* More is tried where no queue stands. What it loses shows in its first epoch, and its queue, where
 * delays wander, later. */
static void judge_trial(lc_port *port, uint64_t now, double sent, double carried) {
    if (port->tried_from <= 0)
        return;
    if (port->tried++ == 0) {
        port->tried_to_ns = now;
        port->tried_sent = sent;
    }
    double own = port->lost - port->overrun.lost; /* by sending more, perhaps */
    double brought = carried / port->tried_from - 1;
    double found = port->tried_found;
    if (own > port->trial / (1 + port->trial) / 2)
        found = 0;
    else if (1e-9 * (double)port->low_ns <= aim_s(port) / 2)
        found = port->trial;
    else if (port->tried < 2)
        return;
    if (found < brought)
        found = brought;
    if (found > port->trial / 2) {
        double least = least_trial(port);
        double left = port->tried_sent / port->tried_from - 1; /* the rest has shown nothing */
        if (found > left && left > brought)
            found = left > least ? left : least;
        double got = port->held ? port->tried_from * (1 + found) : carried;
        if (got > port->rate)
            port->rate = got;
        if (found >= port->trial)
            port->trial = port->trial * 2 < TRIAL_MAX ? port->trial * 2 : TRIAL_MAX;
        port->patience = 0;
    } else {
        port->trial = least_trial(port);
        port->patience = port->patience < PATIENCE ? PATIENCE : port->patience * 2;
        if (port->patience > PATIENCE_MAX)
            port->patience = PATIENCE_MAX;
    }
    port->tried_from = 0;
    port->idle = 0;
}

/* A queue of this host shrinks while less is sent than goes through. One that doesn't is a longer
 * path, or another's. */
static void judge_length(lc_port *port, double times, double queue, double seconds) {
    if (times > CUT_MOST) {
        port->cuts = 0;
        return;
    }
    if (port->cuts++ == 0) {
        port->cut_from = queue;
        port->shrinks = 0;
        return;
    }
    port->shrinks += (1 - CUT_MOST) * seconds;
    if (port->cuts < LONG_EPOCHS)
        return;
    if (port->cut_from - queue < CUT_SEEN * port->shrinks)
        port->renewed++;
    port->cuts = 0;
}

/* Beneath a queue of its own a port delivers what it can, so less than was sent says that this is
 * less. Where paths hold themselves back, only a long queue tells. */
static int is_less(const lc_port *port, double carried, double sent, double queue, double aim) {
    if (!port->held)
        return queue > 4 * aim;
    if (port->evened && queue > aim) /* by what others told: it wasn't found here */
        return 1;
    return queue > aim && carried < LESS * sent;
}

/* What a full queue dropped was too much. A call shorter than an epoch begins without a queue, so
 * the least queue of the epoch doesn't tell. */
static void yield_spilled(lc_port *port, double queue, double aim) {
    if ((queue > aim && !port->began) || port->tried_from > 0 || port->overrun.testing)
        return;
    double usual = port->overrun.lost, own = port->spilled / port->moved - usual;
    if (own > EXCESS + lc_overrun_noise(&port->overrun, usual, port->packets))
        port->rate *= 1 - own;
}

/* Hosts that share what is behind it send at equal rates, whatever each has found: all wait for the
 * slowest. No epoch believes more than twice its own rate, or less than half. */
static void even_out(lc_port *port) {
    if (port->others && port->tried_from <= 0 && !port->overrun.testing) {
        double told = within(port->others_rate / port->rate, 1 / EVEN_MOST, EVEN_MOST);
        double times = 1 + EVEN * (told - 1) * port->others / (1 + port->others);
        port->rate *= times;
        port->cap *= times;
        if (times > 1)
            port->evened = EVEN_EPOCHS + 1;
    }
    port->evened -= port->evened > 0;
    port->others = 0;
}

/* Whether a queue stood at some time, though it was gone while nothing was sent. */
static int has_stood(lc_port *port, double sent, double aim) {
    int rests = sent < RESTED * port->allowed;
    int rested = rests || port->rests; /* what is heard of now was sent a round trip ago */
    port->rests = rests;
    return rested && 1e-9 * (double)port->peak_ns > aim;
}

static void cruise(lc_port *port, uint64_t now, double seconds, double carried, double queue) {
    double aim = aim_s(port), sent = port->sent / seconds;
    int stood = has_stood(port, sent, aim);
    double least = sent < port->sent_before ? sent : port->sent_before; /* a round trip ago */
    port->sent_before = sent;
    int busy = queue > aim / 2; /* the port was, all the time */
    if (port->fresh && busy) {
        port->rate = carried;
        port->fresh = 0;
    } else if (carried > port->rate || is_less(port, carried, least, queue, aim))
        port->rate += STEP * (carried - port->rate);
    if (port->rate < lc_port_least(port))
        port->rate = lc_port_least(port);
    yield_spilled(port, queue, aim);
    judge_trial(port, now, sent, carried);
    even_out(port);
    port->idle = !busy && !stood && port->held && !port->overrun.testing ? port->idle + 1 : 0;
    double times = 1 + GAIN * (aim - queue) / seconds;
    times = times < CUT_MOST ? CUT_MOST : times < 1 + PUSH ? times : 1 + PUSH;
    judge_length(port, times, queue, seconds);
    double room = port->cap > 0 ? port->cap / port->rate - 1 : TRIAL_MAX;
    if (port->tried_from <= 0 && port->idle > port->patience && room > least_trial(port) / 2) {
        port->trial = trial_of(port, port->trial);
        port->trial = port->trial < room ? port->trial : room;
        port->tried_from = port->rate;
        port->tried = 0;
        port->tried_ns = now;
        port->tried_to_ns = UINT64_MAX;
        port->tried_found = 0;
        times = 1 + port->trial;
    }
    double rate = port->rate * times;
    if (port->cap > 0 && rate > port->cap && port->tried_from <= 0)
        rate = port->cap;
    if (port->overrun.testing && rate > port->tested * LC_OVERRUN_LESS)
        rate = port->tested * LC_OVERRUN_LESS;
    allow(port, rate);
}

/* So much is lost, in one epoch and the next, that what came is taken for what the way carries. If
 * it isn't, the test shows that as much is lost at any rate. */
static void shed(lc_port *port, uint64_t now, double carried) {
    double before = port->rate, less = before * (1 - port->lost) / (1 - port->overrun.lost);
    if (port->shed_from < before)
        port->shed_from = before;
    if (less < carried)
        less = carried;
    if (port->rate > less)
        port->rate = less;
    if (port->rate < lc_port_least(port))
        port->rate = lc_port_least(port);
    port->tested = port->rate;
    port->tried_from = 0;
    port->idle = 0;
    allow(port, port->rate * LC_OVERRUN_LESS);
    lc_overrun_test(&port->overrun, now, port->lost, LC_OVERRUN_LESS * port->rate / before,
                    port->rtt_ns);
}

static void end_epoch(lc_port *port, uint64_t now, int64_t queue_ns) {
    double seconds = 1e-9 * (double)(now - port->epoch_ns);
    double taken = port->taken / seconds;
    double queue = 1e-9 * (double)queue_ns;
    port->lost = port->taken < port->moved ? 1 - port->taken / port->moved : 0;
    double carried = taken / (1 - port->overrun.lost);
    double chance = lc_overrun_noise(&port->overrun, port->lost, port->packets);
    int sudden = port->lost > port->overrun.lost + SUDDEN + chance;
    port->sudden = sudden ? port->sudden + 1 : 0;
    if (port->rate > 0 && port->sudden >= 2 && !port->overrun.testing)
        shed(port, now, carried);
    else if (port->rate > 0)
        cruise(port, now, seconds, carried, queue);
    else
        start(port, now, taken, queue);
}

/* The bound rises, faster and faster, as long as nothing is lost for it. One that was found before
 * is likely to be found again, so it stays for longer. */
static void raise_cap(lc_port *port) {
    uint32_t times = port->overrun.clean / (CAP_TWICE << port->sure);
    if (port->sure && !times)
        return;
    double step = CAP_STEP * (double)(1u << (times < CAP_TWICE_MOST ? times : CAP_TWICE_MOST));
    port->cap *= 1 + (step < CAP_STEP_MAX ? step : CAP_STEP_MAX);
    if (port->cap > 2 * port->rate)
        port->cap = 0;
}

static void set_cap(lc_port *port) {
    double most = 1e-9 * (double)port->most_queue_ns;
    port->cap = port->rate;
    if (port->shed_from > 0) /* that has been lowered, by a guess: more is soon found out */
        port->overrun.clean = CAP_TWICE * CAP_GUESSED;
    else /* of what was sent then: a queue may have lowered the rate since */
        port->cap = port->tested * (1 - port->overrun.share) / (1 - port->overrun.lost);
    if (port->cap < port->overrun.came) /* during the test */
        port->cap = port->overrun.came;
    int same = port->cap > CAP_SAME * port->cap_found && CAP_SAME * port->cap < port->cap_found;
    port->sure = !same ? 0 : port->sure < CAP_SURE ? port->sure + 1 : CAP_SURE;
    port->cap_found = port->cap;
    port->cap_lost = port->overrun.lost;
    port->shed_from = 0;
    if (port->rate > port->cap)
        port->rate = port->cap;
    if (most > 2 * NOISE_S) { /* then it was the queue that had no more room */
        port->aim_most = most / 2;
        port->cap = 0;
    } else {
        uint32_t patience = port->patience * 2 + PATIENCE_OVERRUN;
        port->patience = patience < PATIENCE_MAX ? patience : PATIENCE_MAX;
    }
    port->trial = least_trial(port);
    port->idle = 0;
}

static void obey(lc_port *port, lc_overrun_verdict verdict) {
    if (verdict == LC_OVERRUN_CLEAN && port->cap > 0) {
        raise_cap(port);
    } else if (verdict == LC_OVERRUN_TEST) {
        allow(port, port->rate * LC_OVERRUN_LESS);
        port->tested = port->rate;
        port->tried_from = 0;
    } else if (verdict == LC_OVERRUN_OWN) {
        set_cap(port);
    } else if (verdict == LC_OVERRUN_RANDOM) {
        if (port->shed_from > port->rate)
            port->rate = port->shed_from;
        port->shed_from = 0;
        if (port->overrun.lost > 2 * port->cap_lost) /* which was taken for an overrun, too */
            port->cap = 0;
    }
}

/* Nanoseconds that one takes at least. */
static uint64_t epoch_of(const lc_port *port) {
    uint64_t least = (uint64_t)(1e9 * EPOCH_BYTES / port->allowed);
    uint64_t epoch = EPOCH_RTTS * port->rtt_ns;
    if (epoch < EPOCH_MIN_NS)
        epoch = EPOCH_MIN_NS;
    return epoch > least ? epoch : least;
}

/* Between packets that acknowledgements tell of lies as much only if nothing was sent. */
static uint64_t pause_of(const lc_port *port, uint64_t rtt_ns) {
    uint64_t wait = rtt_ns / 2 < ACK_MAX_NS ? rtt_ns / 2 : ACK_MAX_NS;
    uint64_t least = (uint64_t)(1e9 * EPOCH_BYTES / port->allowed) / 2;
    return wait + LATE_NS > least ? wait + LATE_NS : least;
}

/* How long nothing was sent, as far as this acknowledgement knows: delays that wander make pauses
 * between acknowledgements, too. */
static uint64_t rest_of(lc_port *port, const lc_port_ack *ack) {
    uint64_t pause = ack->now - port->heard_ns;
    uint64_t rest = ack->sent_ns > port->told_ns ? ack->sent_ns - port->told_ns : 0;
    port->heard_ns = ack->now;
    if (!ack->sent_ns)
        return pause;
    port->told_ns += rest;
    return rest < pause ? rest : pause;
}

static void note_burst(lc_port *port, const lc_port_ack *ack) {
    double share = ack->moved / ack->packet / BURST_PACKETS;
    double burst = ack->burst < BURST_MOST ? ack->burst : BURST_MOST; /* a liar's is at most that */
    port->overrun.burst += (share < 1 ? share : 1) * (burst - port->overrun.burst);
}

void lc_port_acked(lc_port *port, const lc_port_ack *ack) {
    note_burst(port, ack);
    port->sent += ack->sent;
    port->held |= ack->held;
    if (ack->rtt_ns && !port->rtt_ns) {
        port->rtt_ns = ack->rtt_ns;
        if (port->rate <= 0)
            set_start(port);
    } else if (ack->rtt_ns) {
        port->rtt_ns = port->rtt_ns - port->rtt_ns / 16 + ack->rtt_ns / 16;
    }
    uint64_t epoch = epoch_of(port);
    uint64_t last = port->heard_ns;
    if (rest_of(port, ack) > pause_of(port, port->rtt_ns)) { /* what comes now left before it */
        if (port->moved >= EPOCH_BYTES && last - port->epoch_ns >= epoch / 2)
            end_epoch(port, last, port->low_ns);
        port->low_ns = 0;
        port->low_at_ns = ack->now;
        begin_epoch(port, ack->now);
        port->began = 1;
        lc_overrun_rested(&port->overrun, ack->now);
        return;
    }
    port->moved += ack->moved;
    port->taken += ack->taken;
    port->packets += ack->moved / ack->packet;
    if (ack->queue_ns >= 0) {
        port->low_ns += (int64_t)(ack->now - port->low_at_ns);
        port->low_at_ns = ack->now;
        if (ack->queue_ns < port->low_ns)
            port->low_ns = ack->queue_ns;
        if (ack->queue_ns < port->least_queue_ns)
            port->least_queue_ns = ack->queue_ns;
        if (port->low_ns > port->peak_ns)
            port->peak_ns = port->low_ns;
        watch_trial(port, ack);
        if (ack->queue_ns > port->most_queue_ns)
            port->most_queue_ns = ack->queue_ns;
    }
    /* What is lost while a queue stands is the queue's. */
    int stands = port->rate > 0 && 1e-9 * (double)port->low_ns > 2 * aim_s(port);
    if (stands)
        port->spilled += ack->moved - ack->taken;
    if (stands && ack->now > port->overrun.from_ns)
        lc_overrun_begin(&port->overrun, ack->now);
    else if (port->rate > 0)
        obey(port, lc_overrun_add(&port->overrun, ack->now, ack->moved, ack->taken, ack->packet,
                                  port->rtt_ns));
    port->high_taken += ack->taken;
    if (1e-9 * (double)port->low_ns <= high_s(port)) {
        port->high_ns = ack->now;
        port->high_taken = 0;
    }
    if (port->rate <= 0 && port->moved >= EPOCH_BYTES && (port->held || port->held_before) &&
        ack->now - port->high_ns > port->rtt_ns / 2 &&
        ack->now - port->epoch_ns > port->rtt_ns / 2) {
        end_epoch(port, ack->now, port->low_ns);
        begin_epoch(port, ack->now);
    }
    if (ack->now - port->epoch_ns < epoch || port->moved < EPOCH_BYTES)
        return;
    int64_t least = port->least_queue_ns == INT64_MAX ? 0 : port->least_queue_ns;
    end_epoch(port, ack->now, port->began ? port->low_ns : least); /* then it began without one */
    begin_epoch(port, ack->now);
}

int lc_port_bound(lc_port *port, const lc_port_ack *ack, double rate) {
    uint64_t pause = ack->now - port->heard_ns;
    port->heard_ns = ack->now;
    note_burst(port, ack);
    if (rate <= 0)
        return 0;
    port->rate = port->cap > 0 && port->cap < rate ? port->cap : rate;
    if (port->overrun.testing && pause > ack->rtt_ns && pause > pause_of(port, ack->rtt_ns))
        lc_overrun_rested(&port->overrun, ack->now);
    int first = port->overrun.testing && !port->overrun.again;
    lc_overrun_verdict verdict =
        lc_overrun_add(&port->overrun, ack->now, ack->moved, ack->taken, ack->packet, ack->rtt_ns);
    obey(port, verdict);
    double most = port->overrun.testing ? port->tested * LC_OVERRUN_LESS : port->cap;
    if (most > 0)
        allow(port, most);
    else
        port->allowed = 0;
    return first && verdict == LC_OVERRUN_RANDOM && port->cap <= 0;
}

lc_port_known lc_port_tell(const lc_port *port) {
    return (lc_port_known){.allowed = port->allowed,
                           .rate = port->rate,
                           .start = port->start,
                           .aim_most = port->aim_most,
                           .cap = port->cap,
                           .cap_found = port->cap_found,
                           .cap_lost = port->cap_lost,
                           .usual = port->overrun.lost,
                           .trial = port->trial,
                           .patience = port->patience,
                           .renewed = port->renewed,
                           .rtt_ns = (double)port->rtt_ns,
                           .low_ns = (double)port->low_ns};
}

void lc_port_resume(lc_port *port, const lc_port_known *known, uint64_t now) {
    *port = (lc_port){.start = known->start,
                      .aim_most = known->aim_most,
                      .cap_found = known->cap_found,
                      .cap_lost = known->cap_lost,
                      .overrun = {.lost = within(known->usual, 0, LOST_MOST)},
                      .trial = within(known->trial, 0, TRIAL_MAX),
                      .patience = (uint32_t)within(known->patience, 0, PATIENCE_MAX),
                      .renewed = (uint32_t)within(known->renewed, 0, UINT32_MAX),
                      .rtt_ns = (uint64_t)known->rtt_ns,
                      .low_ns = (int64_t)known->low_ns,
                      .low_at_ns = now,
                      .high_ns = now,
                      .heard_ns = now,
                      .told_ns = now};
    double least = lc_port_least(port);
    port->rate = known->rate > least ? known->rate : 0; /* 0: it starts */
    port->cap = known->cap > least ? known->cap : 0;
    if (port->start < START_BYTES)
        port->start = START_BYTES;
    allow(port, known->allowed);
    begin_epoch(port, now);
    port->began = 1;
    lc_overrun_begin(&port->overrun, now + port->rtt_ns);
}
