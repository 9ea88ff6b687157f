/* What is chosen for whom, within what is allowed, and kept while estimates waver. The model itself
 * is compared with Python's (tests/runtime/engine/test_recovery.py). */
#include "check.h"
#include "recovery.h"

#include <math.h>
#include <string.h>

/* 4 MiB over 1 Gbit/s and 20 ms, 1% wanted. */
static lc_recovery_ask far_stream(void) {
    return (lc_recovery_ask){.loss = 0.05,
                             .burst = 1,
                             .rtt_s = 0.02,
                             .reorder_s = 0.001,
                             .rate = 125e6,
                             .row_rate = 30e9,
                             .packets = 2979,
                             .packet_bytes = 1448,
                             .max_missing = 0.01F,
                             .choose = LC_CHOOSE_PARITY | LC_CHOOSE_ROUNDS,
                             .most = 64};
}

static double share_of(lc_recovery means, uint32_t n) {
    return (double)lc_shape_of(means.code, n).parity / n;
}

static void test_far_and_near(void) {
    lc_recovery_ask ask = far_stream();
    lc_recovery means = lc_recovery_choose(&ask);
    CHECK(means.code && !means.rounds && means.expected <= 0.01 && means.expected > 0.004);
    CHECK(means.seconds < 0.15 * (2979 * 1448 / 125e6 + 0.01));
    ask.loss = 0.2;
    means = lc_recovery_choose(&ask);
    CHECK(means.code && !means.rounds && means.expected <= 0.01);
    CHECK_AT(share_of(means, 2979) < 0.36, "%f", share_of(means, 2979));
    ask.burst = 8;
    means = lc_recovery_choose(&ask);
    CHECK(means.code && share_of(means, 2979) < 0.42);

    ask = far_stream(); /* a rack, 100 MiB */
    ask.rtt_s = 0.0002;
    ask.rate = 1.25e9;
    ask.row_rate = 8e9;
    ask.packets = 74500;
    means = lc_recovery_choose(&ask);
    CHECK(!means.code && means.rounds == 1);
    ask.packets = 2979; /* slow arithmetic, of which an XOR needs none */
    ask.row_rate = 0.5e9;
    means = lc_recovery_choose(&ask);
    CHECK(lc_code_m(means.code) == 1 && lc_code_k(means.code) == 4);
}

static void test_nothing(void) {
    lc_recovery_ask ask = far_stream();
    const double losses[] = {0, 1e-5, 0.005, 0.01, 0.0109, NAN, -1};
    for (unsigned i = 0; i < sizeof losses / sizeof losses[0]; i++) {
        ask.loss = losses[i];
        lc_recovery means = lc_recovery_choose(&ask);
        CHECK_AT(!means.code && !means.rounds && means.seconds == 0, "loss %f", losses[i]);
    }
    ask.loss = 0.0111;
    CHECK(lc_recovery_choose(&ask).code);
    ask.packets = 0;
    CHECK(!lc_recovery_choose(&ask).code);
}

/* Nothing that is allowed reaches what is wanted: the best there is, and the truth about it. */
static void test_not_to_be_met(void) {
    lc_recovery_ask ask = far_stream();
    ask.loss = 0.9;
    lc_recovery means = lc_recovery_choose(&ask);
    CHECK(!means.code && means.rounds == 3 && fabs(means.expected - 0.6561) < 1e-6);
    ask.loss = 1;
    means = lc_recovery_choose(&ask);
    CHECK(means.expected > 0.9 && isfinite(means.seconds));
    ask.loss = 0.3;
    ask.choose = 0;
    means = lc_recovery_choose(&ask);
    CHECK(!means.code && !means.rounds && fabs(means.expected - 0.3) < 1e-12);
    ask.choose = LC_CHOOSE_PARITY;
    ask.loss = 0.05;
    ask.most = 4;
    ask.max_missing = 0.001F;
    means = lc_recovery_choose(&ask);
    CHECK(means.code && share_of(means, ask.packets) <= 4 / 64.0 && means.expected > 0.01);
}

static void test_single_packet(void) {
    lc_recovery_ask ask = far_stream();
    ask.packets = 1;
    for (int i = 1; i < 100; i++) {
        ask.loss = i / 100.0;
        lc_recovery means = lc_recovery_choose(&ask);
        CHECK(lc_shape_of(means.code, 1).parity <= 1 && means.expected <= ask.loss);
    }
}

/* Whatever is asked, what is chosen is what packets can say, and within the limits. */
static void test_limits(void) {
    uint64_t state = 1;
    for (int trial = 0; trial < 1500; trial++) {
        uint32_t drawn[6];
        for (int i = 0; i < 6; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            drawn[i] = (uint32_t)(state >> 33);
        }
        lc_recovery_ask ask = far_stream();
        ask.loss = drawn[0] % 1000 / 999.0;
        ask.burst = drawn[1] % 100 / 5.0;
        ask.packets = 1 + drawn[2] % (1u << drawn[3] % 13);
        ask.most = drawn[3] % 65;
        ask.choose = drawn[4] % 4;
        ask.rounds = drawn[4] % 3;
        ask.max_missing = (float)(drawn[5] % 100) / 500 - 0.01F;
        lc_recovery means = lc_recovery_choose(&ask);
        CHECK(lc_code_valid(means.code) && means.rounds <= LC_RECOVERY_ROUNDS);
        CHECK(means.expected >= 0 && means.expected <= ask.loss && means.seconds >= 0);
        CHECK_AT(share_of(means, ask.packets) <= ask.most / 64.0 + 1e-9, "%f of %u, most %u",
                 share_of(means, ask.packets), ask.packets, ask.most);
        CHECK(ask.choose & LC_CHOOSE_PARITY || !means.code);
        CHECK(ask.choose & LC_CHOOSE_ROUNDS || means.rounds == ask.rounds);
    }
}

static void test_last_is_kept(void) {
    lc_recovery_ask ask = far_stream();
    lc_recovery first = lc_recovery_choose(&ask);
    ask.has_last = 1;
    ask.last = first;
    ask.loss = 0.052;
    lc_recovery means = lc_recovery_choose(&ask);
    CHECK(means.code == first.code && means.expected > first.expected);
    ask.loss = 0.1; /* no longer enough */
    means = lc_recovery_choose(&ask);
    CHECK(means.code != first.code && means.expected <= 0.01);
    ask.loss = 0.02; /* far too much */
    means = lc_recovery_choose(&ask);
    CHECK(share_of(means, ask.packets) < share_of(first, ask.packets) / 1.5);
    ask.last = (lc_recovery){.code = 0x3FF}; /* no code */
    CHECK(lc_recovery_choose(&ask).code == means.code);
    ask.last = (lc_recovery){0};
    ask.loss = 0.012;
    CHECK(!lc_recovery_choose(&ask).code);
    ask.has_last = 0;
    CHECK(lc_recovery_choose(&ask).code);
}

static void test_memo(void) {
    static lc_recovery_memo memo;
    lc_recovery_ask ask = far_stream();
    lc_recovery first = lc_recovery_recall(&memo, &ask), direct = lc_recovery_choose(&ask);
    CHECK(first.code == direct.code && first.expected == direct.expected);
    ask.loss = 0.0545;
    CHECK(lc_recovery_recall(&memo, &ask).expected == first.expected); /* as it was */
    ask.loss = 0.0556;
    CHECK(lc_recovery_recall(&memo, &ask).expected != first.expected);
    lc_recovery now = lc_recovery_recall(&memo, &ask);
    ask.rate *= 1.9; /* rates swing as a path is probed */
    CHECK(lc_recovery_recall(&memo, &ask).seconds == now.seconds);
    ask.rate *= 1.1;
    CHECK(lc_recovery_recall(&memo, &ask).seconds < now.seconds);
    ask.packets = 85; /* beside the other */
    lc_recovery small = lc_recovery_recall(&memo, &ask);
    CHECK(small.code != first.code);
    ask.max_missing = 0.03F;
    CHECK(lc_recovery_recall(&memo, &ask).expected > small.expected);
    ask.loss = 0;
    CHECK(!lc_recovery_recall(&memo, &ask).code);
    for (uint32_t n = 1; n < 400; n++) { /* more streams than are kept */
        ask = far_stream();
        ask.packets = n;
        ask.loss = 0.08;
        direct = lc_recovery_choose(&ask);
        lc_recovery found = lc_recovery_recall(&memo, &ask);
        CHECK_AT(found.code == direct.code && found.rounds == direct.rounds, "%u packets", n);
    }
}

int main(void) {
    test_far_and_near();
    test_nothing();
    test_not_to_be_met();
    test_single_packet();
    test_limits();
    test_last_is_kept();
    test_memo();
    return check_result("recovery");
}
