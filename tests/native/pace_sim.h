/* A path for lc_pace in the time of a simulation: flows share one bottleneck with a drop-tail
 * queue; each has its delay and its random loss. Nothing of it depends on the machine. */
#ifndef LC_PACE_SIM_H
#define LC_PACE_SIM_H

#include "pace.h"
#include "tcp_law.h"

#include <stdlib.h>
#include <string.h>

enum { SIM_FLOWS = 8, SIM_QUEUE = 1 << 16, SIM_LINE = 1 << 16, SIM_STEP_NS = 20000 };
enum { SIM_PACKET = 1500, SIM_RUN = 40, SIM_ACK_PACKETS = 64, SIM_ACK_NS = 1000000 };

typedef struct {
    uint64_t at_ns, sent_ns;
    uint32_t seq;
    uint16_t flow;
} sim_packet;

typedef struct {
    uint64_t at_ns, sent_ns, arrived_ns;
    uint32_t seen, taken;
} sim_ack;

typedef struct {
    /* what the test sets */
    uint64_t begin_ns, end_ns; /* it has data to send in this time */
    uint64_t way_ns;           /* one way, without queue */
    double loss, burst;        /* random loss, mean length of a run of it */
    uint32_t peer_window;      /* packets */
    uint64_t on_ns, off_ns;    /* sends this long, then pauses; 0: always sends */
    double drift;              /* the receiver's clock gains so much, seconds per second */
    uint32_t clock_us;         /* and is ahead by this */
    double late;               /* share of packets that are overtaken by those of late_ns */
    uint64_t late_ns;
    tcp_law law; /* kind 0: lc_pace */
    /* results */
    uint64_t delivered, lost_random, lost_queue;
    /* state */
    lc_pace pace;
    uint32_t next, acked, seen_at, taken, acked_taken;
    uint64_t ack_ns, sent_ns, arrived_ns;
    uint32_t unacked;
    uint64_t heard_ns; /* when an acknowledgement last came */
    int in_burst;
    sim_packet line[SIM_LINE]; /* past the bottleneck, on the way to the receiver */
    uint32_t line_in, line_out;
    sim_packet late_line[SIM_LINE]; /* the same, of packets that are overtaken */
    uint32_t late_in, late_out;
    sim_ack acks[SIM_LINE];
    uint32_t acks_in, acks_out;
} sim_flow;

typedef struct {
    double bytes_per_s;
    uint64_t queue_bytes; /* room of the bottleneck */
    sim_flow *flows;
    int n;
    uint64_t now, random;
    double share; /* of its rate that each flow may use beside others of its host */
    double credit;
    sim_packet queue[SIM_QUEUE];
    uint32_t in, out;
    double queue_s_sum; /* queueing delay, summed over steps */
    uint64_t steps;
} sim;

static double sim_random(sim *s) {
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(s->random >> 11) / 9007199254740992.0;
}

static sim *sim_new(double bits_per_s, double queue_s, int n) {
    sim *s = calloc(1, sizeof *s);
    s->bytes_per_s = bits_per_s / 8;
    s->queue_bytes = (uint64_t)(s->bytes_per_s * queue_s);
    s->flows = calloc((size_t)n, sizeof *s->flows);
    s->n = n;
    s->now = 1000000000u;
    s->random = 7;
    s->share = 1;
    for (int i = 0; i < n; i++) {
        sim_flow *f = &s->flows[i];
        f->end_ns = UINT64_MAX;
        f->peer_window = 2000;
        f->burst = 1;
        f->clock_us = 12345678u;
        f->law = tcp_law_new(0);
        lc_pace_init(&f->pace, s->now, (uint64_t)i * 1000000u, SIM_PACKET);
    }
    return s;
}

static void sim_free(sim *s) {
    free(s->flows);
    free(s);
}

static int sim_loses(sim *s, sim_flow *f) {
    if (f->loss <= 0)
        return 0;
    double leave = 1 / f->burst;
    double enter = f->loss * leave / (1 - f->loss);
    if (f->burst <= 1)
        return sim_random(s) < f->loss;
    f->in_burst = f->in_burst ? sim_random(s) >= leave : sim_random(s) < enter;
    return f->in_burst;
}

static int sim_active(const sim *s, const sim_flow *f) {
    if (s->now < f->begin_ns || s->now >= f->end_ns)
        return 0;
    return !f->on_ns || (s->now - f->begin_ns) % (f->on_ns + f->off_ns) < f->on_ns;
}

/* The receiver says how much came of all that was sent, without an echo. */
static void sim_told(sim *s, sim_flow *f) {
    lc_measure_ack ack = {
        .now = s->now, .moved = f->next - f->acked, .taken = f->taken - f->acked_taken};
    f->acked = f->next;
    f->acked_taken = f->taken;
    f->heard_ns = s->now;
    if (!f->law.kind)
        lc_pace_acked(&f->pace, &ack, s->share, -1);
}

static void sim_send(sim *s, int number) {
    sim_flow *f = &s->flows[number];
    if (!sim_active(s, f))
        return;
    for (;;) {
        uint32_t flying = f->next - f->acked;
        uint32_t window =
            f->law.kind ? (uint32_t)f->law.cwnd : lc_pace_window(&f->pace, f->peer_window);
        uint32_t most = flying < window ? window - flying : 0;
        if (most > SIM_RUN)
            most = SIM_RUN;
        if (!f->law.kind && most)
            most = lc_pace_room(&f->pace, s->now, most, SIM_PACKET);
        if (!most) {
            if (!f->law.kind)
                lc_pace_limited(&f->pace);
            if (flying >= window && s->now - f->heard_ns > 2 * f->way_ns + 100000000) {
                sim_told(s, f); /* what is left of it was lost, and a probe has told so */
            }
            return;
        }
        if (!f->law.kind)
            lc_pace_spend(&f->pace, s->now, most, SIM_PACKET);
        if (!flying)
            f->heard_ns = s->now;
        for (uint32_t k = 0; k < most; k++) {
            uint64_t queued = (uint64_t)(s->in - s->out) * SIM_PACKET;
            uint32_t seq = f->next++;
            if (queued + SIM_PACKET > s->queue_bytes || s->in - s->out >= SIM_QUEUE)
                f->lost_queue++;
            else
                s->queue[s->in++ % SIM_QUEUE] = (sim_packet){0, s->now, seq, (uint16_t)number};
        }
    }
}

static void sim_serve(sim *s) {
    s->credit += s->bytes_per_s * SIM_STEP_NS * 1e-9;
    while (s->out != s->in && s->credit >= SIM_PACKET) {
        sim_packet p = s->queue[s->out++ % SIM_QUEUE];
        sim_flow *f = &s->flows[p.flow];
        s->credit -= SIM_PACKET;
        p.at_ns = s->now + f->way_ns;
        if (sim_loses(s, f))
            f->lost_random++;
        else if (f->late > 0 && sim_random(s) < f->late)
            f->late_line[f->late_in++ % SIM_LINE] =
                (sim_packet){p.at_ns + f->late_ns, p.sent_ns, p.seq, p.flow};
        else
            f->line[f->line_in++ % SIM_LINE] = p;
    }
    if (s->out == s->in && s->credit > SIM_PACKET)
        s->credit = SIM_PACKET;
    s->queue_s_sum += (s->in - s->out) * (double)SIM_PACKET / s->bytes_per_s;
    s->steps++;
}

static void sim_take(sim *s, sim_flow *f, sim_packet p) {
    f->taken++;
    f->delivered++;
    if ((int32_t)(p.seq + 1 - f->seen_at) <= 0)
        return;
    f->unacked += p.seq + 1 - f->seen_at;
    f->seen_at = p.seq + 1;
    f->sent_ns = p.sent_ns;
    f->arrived_ns = s->now;
}

static void sim_receive(sim *s, sim_flow *f) {
    while (f->line_out != f->line_in && f->line[f->line_out % SIM_LINE].at_ns <= s->now)
        sim_take(s, f, f->line[f->line_out++ % SIM_LINE]);
    while (f->late_out != f->late_in && f->late_line[f->late_out % SIM_LINE].at_ns <= s->now)
        sim_take(s, f, f->late_line[f->late_out++ % SIM_LINE]);
    if (f->unacked >= SIM_ACK_PACKETS || (f->unacked && s->now - f->ack_ns >= SIM_ACK_NS)) {
        f->acks[f->acks_in++ % SIM_LINE] =
            (sim_ack){s->now + f->way_ns, f->sent_ns, f->arrived_ns, f->seen_at, f->taken};
        f->unacked = 0;
        f->ack_ns = s->now;
    }
}

static void sim_acked(sim *s, sim_flow *f) {
    while (f->acks_out != f->acks_in && f->acks[f->acks_out % SIM_LINE].at_ns <= s->now) {
        sim_ack a = f->acks[f->acks_out++ % SIM_LINE];
        f->heard_ns = s->now;
        if ((int32_t)(a.seen - f->acked) < 0)
            continue;
        uint32_t moved = a.seen - f->acked;
        uint32_t taken = a.taken - f->acked_taken;
        if (!f->law.kind && taken > moved)
            taken = moved;
        f->acked = a.seen;
        f->acked_taken = a.taken;
        if (f->law.kind) {
            tcp_law_acked(&f->law, s->now, 2 * f->way_ns, moved, taken < moved);
            continue;
        }
        uint64_t here_ns = (uint64_t)((double)a.arrived_ns * (1 + f->drift));
        lc_measure_ack ack = {.now = s->now,
                              .rtt_ns = s->now - a.sent_ns,
                              .elapsed_ns = s->now - a.sent_ns,
                              .sent_us = (uint32_t)(a.sent_ns / 1000),
                              .arrived_us = (uint32_t)(here_ns / 1000) + f->clock_us,
                              .moved = moved,
                              .taken = taken};
        f->pace.alone = s->n == 1;
        lc_pace_acked(&f->pace, &ack, s->share, -1);
    }
}

static void sim_run(sim *s, double seconds) {
    uint64_t end = s->now + (uint64_t)(seconds * 1e9);
    while (s->now < end) {
        s->now += SIM_STEP_NS;
        for (int i = 0; i < s->n; i++) {
            int k = (int)((s->steps + (uint64_t)i) % (uint64_t)s->n);
            sim_acked(s, &s->flows[k]);
            sim_send(s, k);
        }
        sim_serve(s);
        for (int i = 0; i < s->n; i++)
            sim_receive(s, &s->flows[i]);
    }
}

/* Forgets what was counted, so that a test can look at what comes after the start. */
static void sim_count_anew(sim *s) {
    s->queue_s_sum = 0;
    s->steps = 0;
    for (int i = 0; i < s->n; i++)
        s->flows[i].delivered = s->flows[i].lost_queue = s->flows[i].lost_random = 0;
}

/* Counts what happens in the time after the start. */
static void sim_measure(sim *s, double start_s, double counted_s) {
    sim_run(s, start_s);
    sim_count_anew(s);
    sim_run(s, counted_s);
}

static double sim_queue_ms(const sim *s) {
    return s->steps ? 1e3 * s->queue_s_sum / (double)s->steps : 0;
}

#endif
