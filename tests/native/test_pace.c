/* The control law on simulated paths: how much of the rate it uses, how long a queue it keeps, how
 * it shares, and when it gives way. Times are the simulation's, so nothing depends on the machine.
 */
#include "check.h"
#include "pace_sim.h"
#include "shared_rate.h"

static sim_flow *flow(sim *s, int i, double rtt_ms, double loss, double burst) {
    sim_flow *f = &s->flows[i];
    f->way_ns = (uint64_t)(rtt_ms * 0.5e6);
    f->loss = loss;
    f->burst = burst;
    return f;
}

static double share(const sim *s, int i, double seconds) {
    return (double)s->flows[i].delivered * SIM_PACKET / seconds / s->bytes_per_s;
}

static double queue_loss(const sim *s, int i) {
    const sim_flow *f = &s->flows[i];
    double sent = (double)(f->delivered + f->lost_random + f->lost_queue);
    return sent > 0 ? (double)f->lost_queue / sent : 0;
}

/* Random loss costs what it takes and no more, and the queue stays short, at any loss. */
static void test_one_flow(void) {
    static const double mbits[] = {100, 1000, 10000}, rtts[] = {0.2, 20, 80};
    static const struct {
        double loss, burst;
    } losses[] = {{0, 1}, {0.001, 1}, {0.01, 1}, {0.01, 8}, {0.05, 1}, {0.05, 4}};
    for (int r = 0; r < 3; r++) {
        for (int t = 0; t < 3; t++) {
            for (int l = 0; l < 6; l++) {
                sim *s = sim_new(mbits[r] * 1e6, 0.05, 1);
                flow(s, 0, rtts[t], losses[l].loss, losses[l].burst);
                sim_measure(s, 1 + rtts[t] * 0.02, 3);
                double used = share(s, 0, 3) / (1 - losses[l].loss);
                CHECK_AT(used > 0.88, "%.0f Mbit/s, %.1f ms, loss %.3f in %.0f: used %.3f",
                         mbits[r], rtts[t], losses[l].loss, losses[l].burst, used);
                CHECK_AT(sim_queue_ms(s) < 12, "%.0f Mbit/s, %.1f ms, loss %.3f in %.0f: %.1f ms",
                         mbits[r], rtts[t], losses[l].loss, losses[l].burst, sim_queue_ms(s));
                CHECK(queue_loss(s, 0) < 0.01);
                if (losses[l].loss > 0)
                    CHECK(s->flows[0].lost_random > 0);
                sim_free(s);
            }
        }
    }
}

/* A path that holds two milliseconds of packets isn't overrun for good. */
static void test_short_buffer(void) {
    for (int t = 0; t < 2; t++) {
        sim *s = sim_new(1e9, 0.002, 1);
        flow(s, 0, t ? 80 : 20, 0.01, 1);
        sim_measure(s, 3, 4);
        CHECK_AT(share(s, 0, 4) > 0.9, "used %.3f", share(s, 0, 4));
        CHECK_AT(queue_loss(s, 0) < 0.1, "lost %.3f", queue_loss(s, 0));
        sim_free(s);
    }
}

/* The second comes two seconds after the first. */
static void test_two_share(void) {
    static const double rtts[] = {20, 80};
    for (int t = 0; t < 2; t++) {
        sim *s = sim_new(1e9, 0.05, 2);
        flow(s, 0, rtts[t], 0.001, 1);
        flow(s, 1, rtts[t], 0.001, 1)->begin_ns = s->now + 2000000000u;
        sim_measure(s, 7, 10);
        for (int i = 0; i < 2; i++)
            CHECK_AT(share(s, i, 10) > 0.38 && share(s, i, 10) < 0.62, "%.0f ms: flow %d has %.3f",
                     rtts[t], i, share(s, i, 10));
        CHECK_AT(sim_queue_ms(s) < 10, "%.1f ms", sim_queue_ms(s));
        sim_free(s);
    }
}

static void test_beside_tcp(void) {
    sim *s = sim_new(1e9, 0.02, 2);
    flow(s, 0, 20, 0, 1);
    flow(s, 1, 20, 0, 1)->law.kind = TCP_RENO;
    sim_measure(s, 5, 20);
    CHECK_AT(share(s, 1, 20) > 0.33, "TCP has %.3f", share(s, 1, 20));
    CHECK_AT(share(s, 0, 20) > 0.05, "this has %.3f", share(s, 0, 20));
    sim_free(s);
}

/* CUBIC fills a queue of several times what this law aims at. Neither starves the other, whether
 * this one sends all the time or with pauses. */
static void test_beside_cubic(void) {
    static const struct {
        double mbit, queue_s;
        uint64_t on_ms, off_ms;
    } cases[] = {{100, 0.025, 0, 0}, {100, 0.025, 100, 30}, {100, 0.1, 0, 0}, {20, 0.05, 0, 0}};
    for (int k = 0; k < 4; k++) {
        sim *s = sim_new(cases[k].mbit * 1e6, cases[k].queue_s, 2);
        sim_flow *f = flow(s, 0, 20, 0, 1);
        f->on_ns = cases[k].on_ms * 1000000;
        f->off_ns = cases[k].off_ms * 1000000;
        sim_flow *cubic = flow(s, 1, 20, 0, 1);
        cubic->law.kind = TCP_CUBIC;
        cubic->begin_ns = s->now + 5000000000u;
        sim_measure(s, 15, 25);
        CHECK_AT(share(s, 0, 25) > 0.25, "case %d: this has %.3f", k, share(s, 0, 25));
        CHECK_AT(share(s, 1, 25) > 0.25, "case %d: CUBIC has %.3f", k, share(s, 1, 25));
        sim_free(s);
    }
}

/* The queue is short again when TCP has gone. */
static void test_after_tcp(void) {
    sim *s = sim_new(1e8, 0.025, 3);
    flow(s, 0, 20, 0, 1);
    flow(s, 1, 20, 0.001, 1);
    flow(s, 2, 20, 0, 1)->law.kind = TCP_CUBIC;
    s->flows[2].end_ns = s->now + 20000000000u;
    sim_run(s, 20);
    CHECK(s->flows[0].pace.rival_window > 0 && s->flows[1].pace.rival_window > 0);
    sim_measure(s, 15, 10);
    for (int i = 0; i < 2; i++) {
        CHECK(s->flows[i].pace.rival_window == 0);
        CHECK_AT(share(s, i, 10) > 0.35, "flow %d has %.3f", i, share(s, i, 10));
    }
    CHECK_AT(sim_queue_ms(s) < 10, "%.1f ms", sim_queue_ms(s));
    sim_free(s);
}

/* Flows of this law take none of their own kind for TCP, whenever they come and pause. */
static void test_no_rival(void) {
    static const double rtts[] = {2, 20, 80};
    for (int t = 0; t < 3; t++) {
        sim *s = sim_new(1e8, 0.05, 3);
        for (int i = 0; i < 3; i++) {
            sim_flow *f = flow(s, i, rtts[t], 0.01, 1);
            f->begin_ns = s->now + (uint64_t)i * 1300000000u;
            f->on_ns = i == 1 ? 300000000 : 0;
            f->off_ns = 100000000;
        }
        for (int k = 0; k < 16; k++) {
            sim_run(s, 1);
            for (int i = 0; i < 3; i++)
                CHECK_AT(s->flows[i].pace.rival_window == 0, "%.0f ms, flow %d, %d s", rtts[t], i,
                         k + 1);
        }
        sim_free(s);
    }
}

/* Seven send to one: the queue before it stays bounded, and all get some. */
static void test_incast(void) {
    sim *s = sim_new(1e9, 0.02, 7);
    for (int i = 0; i < 7; i++)
        flow(s, i, 1.5, 0, 1);
    sim_measure(s, 2, 5);
    double sum = 0;
    for (int i = 0; i < 7; i++) {
        sum += share(s, i, 5);
        CHECK_AT(share(s, i, 5) > 0.03, "flow %d has %.3f", i, share(s, i, 5));
        CHECK_AT(queue_loss(s, i) < 0.05, "flow %d loses %.3f", i, queue_loss(s, i));
    }
    CHECK_AT(sum > 0.9, "used %.3f", sum);
    CHECK_AT(sim_queue_ms(s) < 15, "%.1f ms", sim_queue_ms(s));
    sim_free(s);
}

/* The same through 64 packets, which is less than they aim at together: without modesty a quarter
 * to a half of all is lost, for good. */
static void test_incast_into_a_short_buffer(void) {
    sim *s = sim_new(1e8, 0.0077, 7);
    double lost = 0, used = 0;
    for (int i = 0; i < 7; i++) {
        flow(s, i, 0.2, 0.01, 1);
        s->flows[i].on_ns = 300000000;
        s->flows[i].off_ns = 20000000;
    }
    sim_measure(s, 2, 8);
    for (int i = 0; i < 7; i++) {
        lost += queue_loss(s, i) / 7;
        used += share(s, i, 8);
        CHECK_AT(share(s, i, 8) > 0.03, "flow %d has %.3f", i, share(s, i, 8));
    }
    CHECK_AT(lost < 0.08, "lost %.3f", lost);
    CHECK_AT(used > 0.85, "used %.3f", used);
    sim_free(s);
}

/* The round trip grows tenfold: a longer path is no queue, and is used again within seconds. */
static void test_longer_path(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    sim_flow *f = flow(s, 0, 8, 0.01, 1);
    sim_run(s, 3);
    f->way_ns *= 10;
    sim_measure(s, 12, 4);
    CHECK_AT(share(s, 0, 4) > 0.85, "used %.3f", share(s, 0, 4));
    sim_free(s);
}

/* A quarter of the rate is left: the sender follows within a second. */
static void test_narrower_path(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    flow(s, 0, 20, 0.01, 1);
    sim_run(s, 3);
    s->bytes_per_s /= 4;
    s->queue_bytes /= 4;
    sim_measure(s, 1, 4);
    CHECK_AT(share(s, 0, 4) > 0.85, "used %.3f", share(s, 0, 4));
    CHECK_AT(queue_loss(s, 0) < 0.05, "lost %.3f", queue_loss(s, 0));
    sim_free(s);
}

/* Operations of 4 MB with pauses: the rate is found, though none is as long as a round trip. */
static void test_short_operations(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    sim_flow *f = flow(s, 0, 80, 0.01, 1);
    f->on_ns = 40000000;
    f->off_ns = 160000000;
    sim_measure(s, 6, 4);
    double used = share(s, 0, 4) / 0.2;
    CHECK_AT(used > 0.8, "used %.3f of the time in which there was something to send", used);
    sim_free(s);
}

/* Nearly all is lost: less and less is sent. */
static void test_gives_way(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    sim_flow *f = flow(s, 0, 20, 0.9, 1);
    sim_measure(s, 4, 2);
    double sent = (double)(f->delivered + f->lost_random + f->lost_queue) * SIM_PACKET / 2;
    CHECK_AT(sent < 0.1 * s->bytes_per_s, "sends %.3f of the rate", sent / s->bytes_per_s);
    CHECK(f->delivered > 0);
    sim_free(s);
}

/* An acknowledgement whose clocks make no sense changes little. */
static void test_wrong_clocks(void) {
    for (int k = 0; k < 4; k++) {
        static const uint32_t wrong[] = {0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
        sim *s = sim_new(1e9, 0.05, 1);
        flow(s, 0, 20, 0, 1);
        sim_run(s, 2);
        lc_measure_ack ack = {.now = s->now,
                              .rtt_ns = 20000000,
                              .elapsed_ns = 20000000,
                              .sent_us = (uint32_t)(s->now / 1000) - 20000,
                              .arrived_us = wrong[k],
                              .moved = 1,
                              .taken = 1};
        lc_pace_acked(&s->flows[0].pace, &ack, 1, -1);
        sim_count_anew(s);
        sim_run(s, 2);
        CHECK_AT(share(s, 0, 2) > 0.9, "%08x: used %.3f", wrong[k], share(s, 0, 2));
        sim_free(s);
    }
}

/* What is used of the path in the second after this flow has paused for so long. */
static double used_after(sim *s, uint64_t pause_ns) {
    sim_flow *f = &s->flows[0];
    f->begin_ns = s->now + pause_ns;
    sim_run(s, 0.5);
    s->now += pause_ns - 500000000u;
    sim_count_anew(s);
    sim_run(s, 1);
    return share(s, 0, 1);
}

/* In an hour the clocks of two hosts drift by more than any queue. */
static void test_pause(void) {
    static const double drifts[] = {-5e-5, 0, 5e-5};
    for (int k = 0; k < 3; k++) {
        sim *s = sim_new(1e9, 0.05, 1);
        flow(s, 0, 20, 0.001, 1)->drift = drifts[k];
        sim_run(s, 3);
        double used = used_after(s, 3600000000000u);
        CHECK_AT(used > 0.9, "drift %.0e: used %.3f", drifts[k], used);
        sim_run(s, 4);
        CHECK_AT(sim_queue_ms(s) < 3, "drift %.0e: %.1f ms", drifts[k], sim_queue_ms(s));
        sim_free(s);
    }
}

/* The first packet after a pause meets a queue, which is seen; or the path is another, or the
 * clock.
 */
static void test_queue_after_a_pause(void) {
    static const struct {
        int64_t way_ms, rtt_ms, queue_ms, most_ms;
    } cases[] = {{0, 0, 0, 1},  {10, 10, 6, 10}, {10, 20, 6, 10}, {3, 0, 0, 1},
                 {-3, 0, 0, 1}, {500, 0, 0, 1},  {-500, 0, 0, 1}, {40, 0, 0, 1}};
    for (int k = 0; k < 8; k++) {
        lc_measure path = {0};
        lc_measure_ack ack = {.now = 1000000000,
                              .rtt_ns = 20000000,
                              .elapsed_ns = 20000000,
                              .sent_us = 980000,
                              .arrived_us = 990000,
                              .moved = 1,
                              .taken = 1};
        CHECK(lc_measure_sample(&path, &ack) == 0);
        ack.now += 40000000000u;
        ack.rtt_ns += (uint64_t)cases[k].rtt_ms * 1000000;
        ack.sent_us += 40000000;
        ack.arrived_us += 40000000 + (uint32_t)(cases[k].way_ms * 1000);
        int64_t queue = lc_measure_sample(&path, &ack);
        CHECK_AT(queue >= cases[k].queue_ms * 1000000 && queue <= cases[k].most_ms * 1000000,
                 "case %d: %.1f ms", k, 1e-6 * (double)queue);
    }
}

/* What begins anew beside others takes a part of its rate and window, until something is heard. */
static void test_begins_anew(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    lc_pace *pace = &flow(s, 0, 20, 0, 1)->pace;
    sim_run(s, 2);
    double rate = pace->gate.bytes_per_s;
    uint32_t window = lc_pace_window(pace, 5000);
    CHECK(!lc_pace_rests(pace, s->now));
    s->now += 1000000000;
    CHECK(lc_pace_rests(pace, s->now));
    lc_pace_begin(pace, s->now, 0.25);
    CHECK(!lc_pace_rests(pace, s->now));
    CHECK(pace->gate.bytes_per_s < 0.3 * rate && pace->gate.bytes_per_s > 0.2 * rate);
    CHECK(lc_pace_window(pace, 5000) < 0.3 * window && lc_pace_window(pace, 5000) > 0.2 * window);
    sim_measure(s, 0.2, 0.5);
    CHECK_AT(share(s, 0, 0.5) > 0.9, "used %.3f", share(s, 0, 0.5));
    sim_free(s);
}

/* The rate of a port that three paths share: of what was held back, whatever pauses there are. */
static void test_shared_rate(void) {
    lc_shared_rate shared = {0};
    CHECK(lc_shared_rate_begin(&shared, 1000) == 1000); /* of the only one that is known */
    CHECK(isinf(lc_shared_rate_bound(&shared, 1000)));
    uint64_t now = 1000000000;
    for (int k = 0; k < 2000; k++)
        lc_shared_rate_add(&shared, now += 1000000, 2, 20000000, 1);
    CHECK(lc_shared_rate_now(&shared) > 1900 && lc_shared_rate_now(&shared) < 2200);
    CHECK(lc_shared_rate_begin(&shared, 1000) == lc_shared_rate_now(&shared));
    CHECK(lc_shared_rate_begin(&shared, 5000) == 5000);
    CHECK(lc_shared_rate_bound(&shared, 1000) <= 1.25 * lc_shared_rate_now(&shared));
    CHECK(lc_shared_rate_bound(&shared, 5000) == 5000);
    for (int k = 0; k < 30000; k++) /* who has no more to send says nothing of the port */
        lc_shared_rate_add(&shared, now += 1000000, 1, 20000000, 0);
    CHECK(lc_shared_rate_now(&shared) > 1900);
    now += 3600000000000u; /* it is known after a pause */
    for (int k = 0; k < 100; k++)
        lc_shared_rate_add(&shared, now += 1000000, 1, 20000000, 1);
    CHECK(lc_shared_rate_now(&shared) > 1900);
    for (int k = 0; k < 22000; k++)
        lc_shared_rate_add(&shared, now += 1000000, 1, 20000000, 1);
    CHECK(lc_shared_rate_now(&shared) < 1200);
    for (int k = 0; k < 100; k++) /* times so short that they say nothing */
        lc_shared_rate_add(&shared, now += k % 10 ? 1000000 : 50000000, 10, 20000000, 1);
    CHECK(isinf(lc_shared_rate_bound(&shared, 500)));
}

/* More is tried while more comes of it, and later now and then. */
static void test_shared_rate_is_tried(void) {
    lc_shared_rate shared = {0};
    uint64_t now = 1000000000;
    double grown = 0;
    for (uint32_t packets = 1; packets <= 64; packets *= 2)
        for (int k = 0; k < 100; k++)
            lc_shared_rate_add(&shared, now += 1000000, packets, 20000000, 1);
    grown = lc_shared_rate_bound(&shared, 0) / lc_shared_rate_now(&shared);
    CHECK_AT(grown > 1.2 && lc_shared_rate_now(&shared) > 60000, "%.2f", grown);
    int ahead = 0, stretches = 2000;
    for (int k = 0; k < 40 * stretches; k++) {
        lc_shared_rate_add(&shared, now += 1000000, 64, 20000000, 1);
        ahead += lc_shared_rate_bound(&shared, 0) > 1.2 * lc_shared_rate_now(&shared);
    }
    CHECK_AT(ahead > 0 && ahead < 40 * stretches / 20, "%d", ahead);
}

/* A path at a share of its rate keeps the rate that it knows; at all of it, it is used at once. */
static void test_shares(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    lc_pace *pace = &flow(s, 0, 20, 0, 1)->pace;
    sim_run(s, 2);
    double rate = pace->rate;
    s->share = 0.2;
    sim_run(s, 4);
    CHECK_AT(pace->gate.bytes_per_s < 0.3 * rate * pace->packet_bytes, "%.0f",
             pace->gate.bytes_per_s);
    CHECK_AT(pace->rate > 0.85 * rate, "%.2f of the rate", pace->rate / rate);
    s->share = 1;
    sim_measure(s, 0.1, 0.3);
    CHECK_AT(share(s, 0, 0.3) > 0.85, "used %.3f", share(s, 0, 0.3));
    sim_free(s);
}

/* However small the share, some packets a round trip go, so that it is found out when it grows. */
static void test_hardly_a_share(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    lc_pace *pace = &flow(s, 0, 20, 0, 1)->pace;
    sim_run(s, 2);
    s->share = 1e-9;
    sim_run(s, 1);
    double rtt = lc_measure_rtt_s(&pace->measure);
    double packets = pace->gate.bytes_per_s / pace->packet_bytes * rtt;
    CHECK_AT(packets > 3.9 && packets < 4.1, "%.2f packets a round trip", packets);
    sim_free(s);
}

/* Others of this host have four times as much, and the far end no more: what is tried ends. */
static void test_far_end_is_slow(void) {
    sim *s = sim_new(20e6, 0.002, 3);
    s->share = 4;
    for (int i = 0; i < 3; i++)
        flow(s, i, 20, 0.01, 1);
    sim_measure(s, 4, 8);
    uint64_t delivered = 0, lost = 0;
    for (int i = 0; i < 3; i++) {
        delivered += s->flows[i].delivered;
        lost += s->flows[i].lost_queue;
    }
    double dropped = (double)lost / (double)(lost + delivered);
    CHECK_AT(dropped < 0.2, "dropped %.3f", dropped);
    sim_free(s);
}

/* The share is now less than all of the rate and now more, so hardly any round tells of it; and the
 * path carries less than half of what it did. */
static void test_shares_that_change(void) {
    sim *s = sim_new(1e8, 0.003, 1);
    lc_pace *pace = &flow(s, 0, 20, 0.01, 1)->pace;
    sim_run(s, 3);
    CHECK_AT(pace->rate > 8000, "%.0f packets/s", pace->rate);
    s->bytes_per_s = 45e6 / 8;
    for (int k = 0; k < 800; k++) {
        s->share = k % 2 ? 0.8 : 1.2;
        sim_run(s, 0.005);
    }
    CHECK_AT(pace->rate < 5000, "%.0f packets/s", pace->rate);
    sim_free(s);
}

/* A clock that is set, or was wrong in the first packet: the queue is seen again. */
static void test_set_clocks(void) {
    for (int k = 0; k < 4; k++) {
        uint32_t step = k % 2 ? 5000000u : (uint32_t)-5000000;
        sim *s = sim_new(1e9, 0.05, 1);
        sim_flow *f = flow(s, 0, 20, 0, 1);
        sim_run(s, k / 2 ? 3 : 0.022);
        f->clock_us += step;
        sim_measure(s, 12, 4);
        CHECK_AT(share(s, 0, 4) > 0.9, "case %d: used %.3f", k, share(s, 0, 4));
        CHECK_AT(sim_queue_ms(s) < 3, "case %d: %.1f ms", k, sim_queue_ms(s));
        sim_free(s);
    }
}

/* A window of a few packets, whatever brought it there, can grow again. */
static void test_grows_again(void) {
    sim *s = sim_new(1e6, 0.5, 1);
    flow(s, 0, 20, 0, 1);
    sim_run(s, 10);
    CHECK(lc_pace_window(&s->flows[0].pace, 2000) < 16);
    s->bytes_per_s *= 1000;
    s->queue_bytes *= 100;
    sim_measure(s, 10, 4);
    CHECK_AT(share(s, 0, 4) > 0.9, "after 1 Mbit/s: used %.3f", share(s, 0, 4));
    sim_free(s);

    s = sim_new(1e9, 0.05, 1);
    flow(s, 0, 20, 0.95, 1);
    sim_run(s, 5);
    s->flows[0].loss = 0;
    sim_measure(s, 5, 4);
    CHECK_AT(share(s, 0, 4) > 0.9, "after 95%% loss: used %.3f", share(s, 0, 4));
    sim_free(s);
}

/* A start in which nearly all is lost: it has found no rate, and goes on when the path is better.
 */
static void test_start_amid_loss(void) {
    static const double mbits[] = {20, 1000}, rtts[] = {2, 20, 80};
    for (int r = 0; r < 2; r++) {
        for (int t = 0; t < 3; t++) {
            sim *s = sim_new(mbits[r] * 1e6, 0.05, 1);
            flow(s, 0, rtts[t], 0.95, 1);
            sim_run(s, 5);
            s->flows[0].loss = 0.1;
            sim_measure(s, 5, 4);
            double used = share(s, 0, 4) / 0.9;
            CHECK_AT(used > 0.9, "%.0f Mbit/s, %.0f ms: used %.3f", mbits[r], rtts[t], used);
            sim_free(s);
        }
    }
}

/* A host sends each of three others a burst at once, more than its port holds, and then pauses:
 * what is left of a burst, over the time until the next, is no rate. */
static void test_bursts_with_pauses(void) {
    for (int l = 0; l < 3; l++) {
        double loss = 0.05 * l, sum = 0;
        sim *s = sim_new(2e7, 0.025, 3);
        for (int i = 0; i < 3; i++) {
            flow(s, i, 2, loss, 1);
            s->flows[i].on_ns = 1000000;
            s->flows[i].off_ns = 299000000;
        }
        sim_run(s, 6);
        double lost = queue_loss(s, 0) + queue_loss(s, 1) + queue_loss(s, 2);
        CHECK_AT(lost > 1, "bursts fit: %.2f lost", lost / 3);
        for (int i = 0; i < 3; i++)
            s->flows[i].on_ns = 0;
        sim_measure(s, 1, 3);
        for (int i = 0; i < 3; i++) {
            sum += share(s, i, 3);
            CHECK_AT(share(s, i, 3) > 0.1, "loss %.2f: flow %d has %.3f", loss, i, share(s, i, 3));
        }
        CHECK_AT(sum > 0.9 * (1 - loss), "loss %.2f: used %.3f", loss, sum);
        sim_free(s);
    }
}

/* Packets that come 120 ms apart tell a rate, too. */
static void test_slow_path(void) {
    sim *s = sim_new(1e5, 60, 1);
    flow(s, 0, 20, 0, 1);
    sim_measure(s, 60, 60);
    CHECK_AT(share(s, 0, 60) > 0.95, "used %.3f", share(s, 0, 60));
    CHECK_AT(sim_queue_ms(s) < 1000, "%.1f ms", sim_queue_ms(s));
    sim_free(s);
}

/* Less than a packet would fill the path, and rounds of less than the rate come, too. */
static void test_slow_lossy_path(void) {
    sim *s = sim_new(5e4, 10, 1);
    flow(s, 0, 20, 0.4, 1);
    sim_measure(s, 100, 60);
    CHECK_AT(share(s, 0, 60) > 0.4, "used %.3f", share(s, 0, 60));
    sim_free(s);
}

/* A peer with a small socket buffer, far away: what is on the way is not in the buffer. */
static void test_small_peer_window(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    flow(s, 0, 80, 0.001, 1)->peer_window = 20;
    sim_measure(s, 6, 4);
    CHECK_AT(share(s, 0, 4) > 0.6, "used %.3f", share(s, 0, 4));
    sim_free(s);
}

/* Half of the packets come 3 ms late: neither loss nor a queue. */
static void test_reordering(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    sim_flow *f = flow(s, 0, 20, 0.001, 1);
    f->late = 0.5;
    f->late_ns = 3000000;
    sim_measure(s, 3, 4);
    CHECK_AT(share(s, 0, 4) > 0.9, "used %.3f", share(s, 0, 4));
    CHECK_AT(sim_queue_ms(s) < 5, "%.1f ms", sim_queue_ms(s));
    sim_free(s);
}

static void test_same_host_is_not_held(void) {
    lc_pace pace;
    lc_pace_init(&pace, 0, 0, SIM_PACKET);
    CHECK(lc_pace_window(&pace, 5000) < 5000);
    pace.same_host = 1;
    CHECK(lc_pace_window(&pace, 5000) == 5000);
}

/* A packet as large as a run may be goes alone, however slow the path. */
static void test_room_is_not_more_than_asked(void) {
    lc_pace pace;
    lc_pace_init(&pace, 0, 0, 60000);
    lc_measure_ack ack = {.now = 20000000, .rtt_ns = 20000000, .moved = 1, .taken = 1};
    lc_pace_acked(&pace, &ack, 1, -1);
    pace.gate.bytes_per_s = 1e6;
    CHECK(lc_pace_room(&pace, 2000000000, 1, 60000) == 1);
    CHECK(lc_pace_room(&pace, 2000000000, 9, 60000) == 2);
}

/* Asking takes nothing, and any rate and any time are numbers. */
static void test_rate(void) {
    lc_rate rate;
    lc_rate_init(&rate, 1e6, 0);
    for (int k = 0; k < 3; k++)
        CHECK(lc_rate_room(&rate, 1000000000, 100, 1000) == 65);
    lc_rate_spend(&rate, 1000000000, 65, 1000);
    CHECK(lc_rate_room(&rate, 1000000000, 100, 1000) == 0);
    uint64_t delay = lc_rate_delay(&rate, 1000000000, 1000);
    CHECK(delay > 0 && lc_rate_room(&rate, 1000000000 + delay, 100, 1000) == 1);
    CHECK(lc_rate_room(&rate, UINT64_MAX, 100, 1000) == 65);
    lc_rate_init(&rate, 1e-300, 0);
    CHECK(lc_rate_room(&rate, 1000000000, 100, 1000) == 0);
    CHECK(lc_rate_delay(&rate, 1000000000, 1000) > 1000000000);
    lc_rate_init(&rate, 1e300, 0);
    CHECK(lc_rate_room(&rate, 1000000000, UINT32_MAX, 1) == UINT32_MAX);
}

static uint32_t any(sim *s) {
    static const uint32_t edges[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    double u = sim_random(s);
    return u < 0.5 ? edges[(int)(u * 10)] : (uint32_t)(sim_random(s) * 4294967295.0);
}

/* What is known of a path in packets is as many bytes, whatever their size. */
static void test_packets_of_another_size(void) {
    lc_pace pace;
    lc_pace_init(&pace, 1000000000u, 0, 1452);
    pace.rate = 5000;
    double window = pace.window * 1452, rate = lc_pace_rate(&pace);
    lc_pace_sized(&pace, 484);
    CHECK_AT(fabs(pace.window * 484 / window - 1) < 1e-9, "%.1f", pace.window);
    CHECK_AT(fabs(lc_pace_rate(&pace) / rate - 1) < 1e-9, "%.1f", pace.rate);
    lc_pace_sized(&pace, 480); /* about the same */
    CHECK_AT(pace.packet_bytes > 483, "%.0f", pace.packet_bytes);
}

/* Acknowledgements of any content: windows and rates stay numbers, and some packet may always go
 * within seconds. What a peer can say is bounded as in the engine. */
static void test_hostile_acks(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    lc_pace *pace = &s->flows[0].pace;
    for (int k = 0; k < 20000; k++) {
        s->now += 1000 + any(s) % 50000000;
        uint32_t moved = any(s) % 5000;
        lc_measure_ack ack = {.now = s->now,
                              .rtt_ns = any(s) % 3 ? (uint64_t)(any(s) % 60000000) * 1000 + 1 : 0,
                              .elapsed_ns = (uint64_t)any(s) * 1000,
                              .sent_us = any(s),
                              .arrived_us = any(s),
                              .moved = moved,
                              .taken = moved ? any(s) % (moved + 1) : 0};
        if (any(s) % 2)
            lc_pace_limited(pace);
        lc_pace_acked(pace, &ack, 1, -1);
        uint32_t window = lc_pace_window(pace, 1 + any(s) % 5000);
        double numbers = pace->window + pace->rate + pace->measure.hold_s + pace->gate.tokens;
        int good = isfinite(numbers) && window >= 1 && pace->loss <= 0.5 && pace->rate >= 0 &&
                   lc_pace_queue(pace) < 60000001000u;
        CHECK_AT(good, "acknowledgement %d", k);
        if (!good)
            break;
        CHECK(lc_pace_room(pace, s->now, 7, SIM_PACKET) <= 7);
        CHECK_AT(lc_pace_delay(pace, s->now, SIM_PACKET) < 3600000000000u,
                 "acknowledgement %d: %.0f s", k,
                 1e-9 * (double)lc_pace_delay(pace, s->now, SIM_PACKET));
    }
    sim_free(s);
}

int main(void) {
    test_one_flow();
    test_short_buffer();
    test_two_share();
    test_beside_tcp();
    test_beside_cubic();
    test_after_tcp();
    test_no_rival();
    test_incast();
    test_incast_into_a_short_buffer();
    test_longer_path();
    test_narrower_path();
    test_short_operations();
    test_gives_way();
    test_wrong_clocks();
    test_pause();
    test_queue_after_a_pause();
    test_begins_anew();
    test_shared_rate();
    test_shared_rate_is_tried();
    test_shares();
    test_hardly_a_share();
    test_far_end_is_slow();
    test_shares_that_change();
    test_set_clocks();
    test_grows_again();
    test_start_amid_loss();
    test_bursts_with_pauses();
    test_slow_path();
    test_slow_lossy_path();
    test_small_peer_window();
    test_reordering();
    test_same_host_is_not_held();
    test_room_is_not_more_than_asked();
    test_rate();
    test_packets_of_another_size();
    test_hostile_acks();
    return check_result("test_pace");
}
