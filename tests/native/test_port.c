/* The law of a port that is paced as one, and how it tells an overrun from random loss. Time is the
 * simulation's: one path, of which every millisecond says what came. */
#include <math.h>

#include "check.h"
#include "uplink.h"

enum { PACKET = 1452, STEP_NS = 1000000, RTT_STEPS = 20 };

typedef struct {
    double bytes_per_s, queue_s; /* of the uplink; what waits longer is dropped */
    double loss;                 /* share of what leaves that never comes */
    double bucket_s;        /* of a policer, which drops what is more: nothing queues; 0: none */
    uint64_t on_ns, off_ns; /* it sends for so long, then rests; 0: it never rests */
    double waits, tokens;   /* bytes */
    double owed;            /* packets to be lost, less those that were */
    uint64_t now;
    struct {
        double moved, taken;
        int64_t queue_ns;
    } way[RTT_STEPS];
    double moved, taken; /* bytes so far */
    lc_uplink port;
} uplink;

static void forward(uplink *u, int slot) {
    double room = u->bucket_s > 0 ? u->tokens : u->bytes_per_s * u->queue_s - u->waits;
    double sent = 0, came = 0;
    while (lc_uplink_room(&u->port, u->now, 1, PACKET, 1)) {
        lc_uplink_spend(&u->port, u->now, PACKET);
        sent += PACKET;
        if (room < PACKET)
            continue;
        room -= PACKET;
        u->tokens -= PACKET;
        u->waits += PACKET;
        u->owed += u->loss;
        if (u->owed >= 1)
            u->owed -= 1;
        else
            came += PACKET;
    }
    u->way[slot].moved = sent;
    u->way[slot].taken = came;
    u->way[slot].queue_ns = u->bucket_s > 0 ? 0 : (int64_t)(1e9 * u->waits / u->bytes_per_s);
}

static void pass(uplink *u, double seconds) {
    u->moved = u->taken = 0;
    uint64_t end = u->now + (uint64_t)(seconds * 1e9);
    for (; u->now < end; u->now += STEP_NS) {
        int slot = (int)(u->now / STEP_NS % RTT_STEPS);
        if (u->way[slot].moved > 0)
            lc_uplink_acked(&u->port, &(lc_port_ack){.now = u->now,
                                                     .sent_ns = u->now - RTT_STEPS * STEP_NS,
                                                     .rtt_ns = (uint64_t)RTT_STEPS * STEP_NS,
                                                     .queue_ns = u->way[slot].queue_ns,
                                                     .moved = u->way[slot].moved,
                                                     .taken = u->way[slot].taken,
                                                     .packet = PACKET});
        u->moved += u->way[slot].moved;
        u->taken += u->way[slot].taken;
        double carried = u->bytes_per_s * 1e-9 * STEP_NS;
        u->waits = u->waits > carried ? u->waits - carried : 0;
        u->tokens = fmin(u->tokens + carried, u->bytes_per_s * u->bucket_s);
        u->way[slot].moved = u->way[slot].taken = 0;
        if (!u->on_ns || u->now % (u->on_ns + u->off_ns) < u->on_ns)
            forward(u, slot);
    }
}

static uplink begin(double mbit) {
    uplink u = {.bytes_per_s = mbit * 125000, .queue_s = 0.025, .now = 1000000000u};
    lc_uplink_init(&u.port, u.now);
    return u;
}

static double used(const uplink *u, double seconds) {
    return u->taken / seconds / u->bytes_per_s;
}

static void check(const uplink *u, double seconds, double most_lost, const char *what) {
    double lost = 1 - u->taken / u->moved;
    CHECK_AT(used(u, seconds) > 0.88 * (1 - u->loss), "%s: %.2f used", what, used(u, seconds));
    CHECK_AT(lost < most_lost, "%s: %.3f lost", what, lost);
}

static void test_clean(void) {
    for (double mbit = 20; mbit <= 1000; mbit *= 7) {
        uplink u = begin(mbit);
        pass(&u, 2);
        pass(&u, 5);
        check(&u, 5, 0.001, "clean");
    }
}

static void test_changes(void) {
    static const double times[] = {10, 0.1};
    for (int i = 0; i < 2; i++) {
        uplink u = begin(50);
        pass(&u, 2);
        u.bytes_per_s *= times[i];
        pass(&u, 2);
        pass(&u, 5);
        check(&u, 5, 0.02, "another rate");
    }
}

/* What is lost at any rate doesn't make it less, and what a policer drops does. */
static void test_random_loss(void) {
    for (double loss = 0.01; loss < 0.11; loss *= 3) {
        uplink u = begin(100);
        u.loss = loss;
        pass(&u, 5);
        pass(&u, 10);
        check(&u, 10, loss + 0.005, "random");
    }
}

static void test_policer(void) {
    uplink u = begin(100);
    u.bucket_s = 0.005;
    pass(&u, 1);
    CHECK(u.moved > 1.1 * u.taken); /* it is met */
    pass(&u, 5);
    pass(&u, 10);
    check(&u, 10, 0.08, "policed");
}

/* It fills while less is sent, and then lets a call through at any rate: a bound that was found
 * twice stays for longer. */
static void test_long_bucket(void) {
    uplink u = begin(100);
    u.bucket_s = 0.1;
    pass(&u, 5);
    CHECK(u.port.law.cap_found > 0); /* it is met */
    pass(&u, 20);
    check(&u, 20, 0.03, "a bucket of 100 ms");
}

/* Each call fills two round trips and begins without a queue, which hides the one at its end. A
 * rate that is too high is found all the same, and isn't tried again for that queue. */
static void test_calls(void) {
    uplink u = begin(100);
    pass(&u, 2);
    u.on_ns = 50 * STEP_NS;
    u.off_ns = 15 * STEP_NS;
    u.queue_s = 0.01;
    pass(&u, 2);
    double right = u.port.law.rate;
    u.port.law.rate *= 1.3;
    pass(&u, 0.5);
    CHECK(u.moved > 1.001 * u.taken); /* it loses for it */
    pass(&u, 2.5);
    pass(&u, 5);
    double lost = 1 - u.taken / u.moved;
    CHECK_AT(lost < 0.005, "%.3f lost in calls, at %.2f", lost, u.port.law.rate / right);
    CHECK_AT(u.port.law.rate > 0.9 * right, "%.2f of the rate", u.port.law.rate / right);
}

/* A short outage doesn't cost calls that are shorter than any test their rate for ever. */
static void test_an_outage_between_short_calls(void) {
    uplink u = begin(100);
    pass(&u, 2);
    u.on_ns = 25 * STEP_NS;
    u.off_ns = 75 * STEP_NS;
    pass(&u, 3);
    pass(&u, 5);
    double before = u.taken;
    u.loss = 0.7;
    pass(&u, 0.5);
    CHECK(u.moved > 2 * u.taken);
    u.loss = 0;
    pass(&u, 10);
    pass(&u, 5);
    CHECK_AT(!u.port.law.overrun.testing || u.port.law.overrun.again, "it still tests");
    CHECK_AT(u.taken > 0.9 * before, "%.2f of before", u.taken / before);
}

/* Paths that hold themselves back leave the port's rate as it is: when they no longer do, it sends
 * no more than before. */
static void test_slow_paths(void) {
    uint64_t now = 1000000000u, rtt = (uint64_t)RTT_STEPS * STEP_NS;
    lc_uplink p;
    lc_uplink_init(&p, now);
    p.law.rate = 5e6;
    for (int i = 0; i < 400; i++) {
        now += STEP_NS;
        lc_uplink_spend(&p, now, 2 * PACKET);
        lc_uplink_acked(&p, &(lc_port_ack){.now = now,
                                           .sent_ns = now - rtt,
                                           .rtt_ns = rtt,
                                           .moved = PACKET,
                                           .taken = PACKET,
                                           .packet = PACKET});
    }
    CHECK_AT(p.law.rate <= 5e6, "%.0f", p.law.rate);
    CHECK_AT(p.gate.bytes_per_s < 1.05 * 5e6, "%.0f", p.gate.bytes_per_s);
}

/* Delays that wander look like a queue. What is too much for a port makes a longer one. */
static double rate_after_trial(int64_t queue_ns) {
    uint64_t begin = 1000000000u, rtt = (uint64_t)RTT_STEPS * STEP_NS;
    lc_uplink p;
    lc_uplink_init(&p, begin);
    p.law.rtt_ns = rtt;
    p.law.heard_ns = p.law.tried_ns = begin;
    p.law.tried_to_ns = UINT64_MAX;
    p.law.rate = p.law.tried_from = 5e6;
    p.law.trial = 0.25;
    for (uint64_t now = begin; now <= begin + 4 * rtt; now += STEP_NS) {
        p.law.held = 1;
        lc_uplink_acked(&p, &(lc_port_ack){.now = now,
                                           .sent_ns = now - rtt,
                                           .rtt_ns = rtt,
                                           .queue_ns = queue_ns,
                                           .moved = 5e-3 * STEP_NS,
                                           .taken = 5e-3 * STEP_NS,
                                           .packet = PACKET});
    }
    CHECK(p.law.tried_from <= 0 || p.law.tried_ns > begin); /* it has been judged */
    return p.law.rate;
}

static void test_delays_that_wander(void) {
    double found = rate_after_trial(3000000), none = rate_after_trial(10000000);
    CHECK_AT(found > 5.5e6, "%.0f", found);
    CHECK_AT(none < 5.2e6, "%.0f", none);
}

/* Bursts that nothing held back meet the queues of others: that ends no start. */
static void test_small_calls(void) {
    uint64_t now = 1000000000u, rtt = (uint64_t)RTT_STEPS * STEP_NS;
    for (int held = 0; held < 2; held++) {
        lc_uplink p;
        lc_uplink_init(&p, now);
        for (int i = 0; i < 400; i++) {
            now += STEP_NS;
            p.law.held |= held;
            lc_uplink_acked(&p, &(lc_port_ack){.now = now,
                                               .sent_ns = now - rtt,
                                               .rtt_ns = rtt,
                                               .queue_ns = 6000000,
                                               .moved = 3 * PACKET,
                                               .taken = 3 * PACKET,
                                               .packet = PACKET});
        }
        CHECK_AT((p.law.rate > 0) == held, "held %d: %.0f", held, p.law.rate);
    }
}

/* A way that had random loss gets a policer in its place: what was taken for random is doubted. */
static void test_random_loss_that_ends(void) {
    uplink u = begin(100);
    u.loss = 0.2;
    pass(&u, 5);
    CHECK_AT(u.port.law.overrun.lost > 0.1, "%.2f", u.port.law.overrun.lost);
    u.loss = 0;
    u.bucket_s = 0.005;
    pass(&u, 20);
    pass(&u, 10);
    check(&u, 10, 0.1, "policed after random loss");
}

static lc_overrun_verdict window(lc_overrun *o, uint64_t *now, int most, double share) {
    lc_overrun_verdict last = LC_OVERRUN_NONE;
    for (int i = 0; i < most && last == LC_OVERRUN_NONE; i++)
        last = lc_overrun_add(o, *now += 1000000, PACKET, PACKET * (1 - share), PACKET, 20000000);
    return last;
}

/* One window with more loss may be chance. */
static void test_two_windows(void) {
    lc_overrun o = {0};
    uint64_t now = 1000000000u;
    CHECK(window(&o, &now, 385, 0) == LC_OVERRUN_CLEAN);
    CHECK(window(&o, &now, 385, 0.2) == LC_OVERRUN_NONE && !o.testing);
    CHECK(window(&o, &now, 385, 0) == LC_OVERRUN_CLEAN && !o.testing);
    CHECK(window(&o, &now, 385, 0.2) == LC_OVERRUN_NONE);
    CHECK(window(&o, &now, 385, 0.2) == LC_OVERRUN_TEST && o.testing);
    now += 25000000;
    CHECK(window(&o, &now, 2000, 0.1) == LC_OVERRUN_OWN);
}

/* Where packets are lost in bursts, shares differ by more for chance, so windows are longer. */
static void test_windows_of_bursts(void) {
    lc_overrun single = {.lost = 0.1, .burst = 1}, bursty = {.lost = 0.1, .burst = 8};
    uint64_t now = 1000000000u;
    CHECK(window(&single, &now, 385, 0.1) == LC_OVERRUN_CLEAN);
    CHECK(window(&bursty, &now, 1200, 0.1) == LC_OVERRUN_NONE);
    CHECK(window(&bursty, &now, 100, 0.1) == LC_OVERRUN_CLEAN);
    double noise = lc_overrun_noise(&single, 0.1, 1000);
    CHECK_AT(lc_overrun_noise(&bursty, 0.1, 1000) > 1.5 * noise, "%.3f", noise);
}

/* Loss that is known, be it from another rank, is tested again seldom, and ever more so. */
static void test_patience(void) {
    lc_overrun o = {.lost = 0.1};
    uint64_t now = 1000000000u;
    int tests = 0, last = -1;
    for (int i = 0; i < 400; i++) {
        if (window(&o, &now, 2000, 0.1) != LC_OVERRUN_TEST)
            continue;
        CHECK_AT(i - last >= 8, "%d windows", i - last);
        last = i;
        tests++;
        now += 25000000;
        CHECK(window(&o, &now, 2000, 0.1) == LC_OVERRUN_RANDOM);
    }
    CHECK_AT(tests >= 3 && tests < 10, "%d tests", tests);
}

/* A path that has the port for itself sends at 1.5 times what the network lets through, unless it
 * is bounded. Returns its rate after some seconds, as a share of that. */
static double alone(double carries, double lost, uint64_t rtt) {
    uint64_t now = 1000000000u;
    double law = 15e6, rate = law;
    lc_uplink p;
    lc_uplink_init(&p, now);
    lc_uplink_serves(&p, 1, now);
    CHECK(lc_uplink_room(&p, now, 64, PACKET, 1) == 64); /* nothing holds a start back */
    for (int i = 0; i < 10000; i++) {
        double gate = p.gate.bytes_per_s, moved = rate * 1e-9 * STEP_NS;
        lc_uplink_bound(&p,
                        &(lc_port_ack){.now = now += STEP_NS,
                                       .rtt_ns = rtt,
                                       .queue_ns = -1,
                                       .moved = moved,
                                       .taken = fmin(moved, carries * 1e-9 * STEP_NS) * (1 - lost),
                                       .packet = PACKET},
                        law);
        rate = gate > 0 && gate < law ? gate : law;
    }
    return rate / carries;
}

static void test_alone(void) {
    /* One of them lies below the time between two acknowledgements. */
    for (uint64_t rtt = (uint64_t)RTT_STEPS * STEP_NS; rtt > 100000; rtt /= 8) {
        double policed = alone(10e6, 0, rtt), random = alone(15e6, 0.05, rtt);
        double clean = alone(15e6, 0, rtt);
        CHECK_AT(policed > 0.88 && policed < 1.12, "%.2f", policed);
        CHECK_AT(random > 0.99, "%.2f", random);
        CHECK_AT(clean > 0.99, "%.2f", clean);
    }
}

/* Hosts that share what is behind the port tell their rates every epoch, as `told` says. */
static void pass_beside(uplink *u, double seconds, uint32_t others, double told) {
    for (int i = 0; i < 50 * seconds; i++) {
        lc_uplink_shared(&u->port, others, told);
        pass(u, 0.02);
    }
}

static void test_what_other_hosts_tell(void) {
    uplink u = begin(50);
    pass(&u, 5);
    double before = u.port.law.rate;
    CHECK(lc_uplink_used(&u.port, u.now) == before);
    CHECK(lc_uplink_used(&u.port, u.now + 2000000000u) == 0); /* it has sent nothing for long */
    pass_beside(&u, 1, 3, before / 2);
    double between = u.port.law.rate;
    CHECK_AT(between < 0.8 * before && between > 0.4 * before, "%.0f of %.0f", between, before);
    pass(&u, 5);
    CHECK_AT(u.port.law.rate > 0.95 * before, "%.0f of %.0f", u.port.law.rate, before);
    lc_uplink_shared(&u.port, 1000, 1e12);
    pass(&u, 0.06); /* an epoch and a part of the next */
    CHECK_AT(u.port.law.rate < 1.6 * before, "%.0f of %.0f", u.port.law.rate, before);
    pass_beside(&u, 5, 1000, 1e12); /* a liar costs its site packets, and not the port's law */
    CHECK_AT(u.port.law.rate < 3 * before, "%.0f of %.0f", u.port.law.rate, before);
    pass(&u, 2);
    pass(&u, 5);
    check(&u, 5, 0.01, "after a liar");
}

static void test_levels(void) {
    CHECK(lc_rate_level(0) == 0 && lc_rate_of_level(0) == 0);
    CHECK(lc_rate_level(1) == 1 && lc_rate_level(1e30) == UINT8_MAX);
    for (double rate = 5000; rate < 8e9; rate *= 1.01) {
        double told = lc_rate_of_level(lc_rate_level(rate));
        CHECK_AT(told < 1.03 * rate && told > rate / 1.03, "%.0f becomes %.0f", rate, told);
    }
}

int main(void) {
    test_levels();
    test_what_other_hosts_tell();
    test_alone();
    test_clean();
    test_changes();
    test_random_loss();
    test_policer();
    test_long_bucket();
    test_small_calls();
    test_calls();
    test_slow_paths();
    test_delays_that_wander();
    test_random_loss_that_ends();
    test_two_windows();
    test_an_outage_between_short_calls();
    test_windows_of_bursts();
    test_patience();
    return check_result("test_port");
}
