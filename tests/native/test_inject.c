/* Injected faults: the rates and bursts that were asked for, and always the same ones. */
#include "check.h"
#include "inject.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 1 << 20 };

static uint64_t bits[N / 64];
static uint8_t dropped[N];

static int bit(uint32_t k) {
    return (int)(bits[k / 64] >> k % 64 & 1);
}

static uint64_t key_of(const lc_inject *inject) {
    return lc_inject_key(inject, 3, 1000, 2, 1, 0, 0);
}

/* The values that lossycoll/plan/faults.py is pinned to as well. */
static void test_known_answers(void) {
    lc_inject single = {.loss = 0.25, .burst = 1, .dup = 0.25, .reorder = 0.25, .seed = 42};
    lc_inject bursty = single;
    bursty.burst = 4;
    uint64_t key = lc_inject_key(&single, 7, 11, 3, 1, 2, 0);
    uint64_t duplicates = 0, reorders = 0;
    for (uint32_t k = 0; k < 64; k++) {
        duplicates |= (uint64_t)lc_inject_duplicates(&single, key, k) << k;
        reorders |= (uint64_t)lc_inject_reorders(&single, key, k) << k;
    }
    uint64_t lost, lost_bursty;
    lc_inject_losses(&single, key, 64, &lost);
    lc_inject_losses(&bursty, key, 64, &lost_bursty);
    uint64_t later = lc_inject_key(&single, 7, 11, 3, 1, 2, 1);
    uint64_t extremes =
        lc_inject_key(&single, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFF);
    lc_inject_losses(&single, later, 64, bits);
    printf("seed 42, rates 0.25; group 7, op 11, slot 3, sender 1, receiver 2, packets 0..63\n"
           "  key, round 0      %016llx\n  lost              %016llx\n"
           "  lost, burst 4     %016llx\n  duplicated        %016llx\n"
           "  reordered         %016llx\n  key, round 1      %016llx\n"
           "  lost, round 1     %016llx\n  key, all fields full %016llx\n",
           (unsigned long long)key, (unsigned long long)lost, (unsigned long long)lost_bursty,
           (unsigned long long)duplicates, (unsigned long long)reorders, (unsigned long long)later,
           (unsigned long long)bits[0], (unsigned long long)extremes);
    CHECK(key == 0xa34472cd387f1199);
    CHECK(lost == 0x465440d866010802);
    CHECK(lost_bursty == 0x01cc0007ddff0000);
    CHECK(duplicates == 0xd26008b0d4085e06);
    CHECK(reorders == 0x00b884a2402e5484);
    CHECK(later == 0x1985ea950922fc3d);
    CHECK(bits[0] == 0x0821204008044080);
    CHECK(extremes == 0x5603c290342858b0);
}

/* Standard error of the share of lost packets: bursts leave fewer independent draws. */
static double error_of_rate(double p, double burst) {
    double memory = burst > 1 ? 1 - 1 / burst - p / burst / (1 - p) : 0;
    return sqrt(p * (1 - p) / N * (1 + memory) / (1 - memory));
}

static void test_rate(double p, double burst) {
    lc_inject inject = {.loss = p, .burst = burst, .seed = 5};
    uint32_t lost = lc_inject_losses(&inject, key_of(&inject), N, bits), counted = 0, runs = 0;
    for (uint32_t k = 0; k < N; k++) {
        counted += (uint32_t)bit(k);
        runs += bit(k) && (k == 0 || !bit(k - 1));
    }
    CHECK(counted == lost);
    CHECK_AT(fabs(lost / (double)N - p) < 4 * error_of_rate(p, burst), "loss %g burst %g: %g", p,
             burst, lost / (double)N);
    double length = burst > 1 ? burst : 1 / (1 - p);
    CHECK_AT(fabs(lost / (double)runs - length) < 4 * length / sqrt(runs), "loss %g burst %g: %g",
             p, burst, lost / (double)runs);
}

static void test_rates(void) {
    static const double rates[] = {0.001, 0.01, 0.1, 0.3, 0.5}, bursts[] = {0, 1, 1.5, 4, 20};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        for (size_t j = 0; j < sizeof bursts / sizeof *bursts; j++)
            if (rates[i] / (1 - rates[i]) <= bursts[j] || bursts[j] <= 1)
                test_rate(rates[i], bursts[j]);
}

/* Streams are short, so the first packet of a burst chain must not be luckier than the rest. */
static void test_first_packets(double burst) {
    enum { STREAMS = 100000 };
    lc_inject inject = {.loss = 0.2, .burst = burst, .seed = 9};
    uint32_t first = 0, last = 0;
    for (uint32_t op = 0; op < STREAMS; op++) {
        uint64_t stream;
        lc_inject_losses(&inject, lc_inject_key(&inject, 0, op, 0, 0, 1, 0), 16, &stream);
        first += stream & 1;
        last += stream >> 15 & 1;
    }
    double error = sqrt(0.2 * 0.8 / STREAMS);
    CHECK(fabs(first / (double)STREAMS - 0.2) < 4 * error);
    CHECK(fabs(last / (double)STREAMS - 0.2) < 4 * error);
}

static void test_limits(void) {
    lc_inject none = {.seed = 1}, all = {.loss = 1, .burst = 8}, more = {.loss = 1.5};
    memset(bits, 0xFF, sizeof bits);
    CHECK(lc_inject_losses(&none, 1, 100, bits) == 0 && bits[0] == 0 && bits[1] == 0);
    CHECK(bits[2] == ~(uint64_t)0); /* ceil(n/64) words, not one more */
    CHECK(lc_inject_losses(&all, 1, 100, bits) == 100);
    CHECK(bits[0] == ~(uint64_t)0 && bits[1] == ((uint64_t)1 << 36) - 1);
    CHECK(lc_inject_losses(&more, 1, 3, bits) == 3 && bits[0] == 7);
    CHECK(lc_inject_losses(&all, 1, 0, bits) == 0);
    CHECK(!lc_inject_active(&none) && lc_inject_active(&all));
    lc_inject dup = {.dup = 0.1}, reorder = {.reorder = 0.1};
    CHECK(lc_inject_active(&dup) && lc_inject_active(&reorder));
    lc_inject link = lc_inject_link(&all, 0), other = lc_inject_link(&dup, 0.5);
    CHECK(!lc_inject_active(&link) && lc_inject_losses(&link, 1, 3, bits) == 0);
    CHECK(other.loss == 0.5 && other.dup == 0.1);
    for (uint32_t k = 0; k < 100; k++)
        CHECK(!lc_inject_duplicates(&none, 1, k) && !lc_inject_reorders(&none, 1, k));
}

/* The order in which packets are asked about changes nothing, and the three ways in agree. */
static void test_determinism(void) {
    lc_inject inject = {.loss = 0.3, .burst = 3, .seed = 77};
    uint64_t again[N / 64];
    uint64_t key = key_of(&inject);
    uint32_t lost = lc_inject_losses(&inject, key, 4096, bits);
    CHECK(lc_inject_losses(&inject, key, 4096, again) == lost && memcmp(bits, again, 512) == 0);
    lc_inject_losses(&inject, key, 1000, again); /* a longer stream begins like a shorter one */
    CHECK(memcmp(bits, again, 120) == 0);
    lc_inject_stream(&inject, 3, 1000, 2, 1, 0, 0, 4096, dropped);
    for (uint32_t k = 0; k < 4096; k++)
        CHECK(dropped[k] == bit(k));
}

/* Share of packets on which two streams agree; 0.5 when they know nothing of each other. */
static double agreement(uint64_t key, uint64_t other) {
    lc_inject inject = {.loss = 0.5};
    uint64_t a[1024], b[1024];
    int same = 0;
    lc_inject_losses(&inject, key, 65536, a);
    lc_inject_losses(&inject, other, 65536, b);
    for (int i = 0; i < 1024; i++)
        same += 64 - __builtin_popcountll(a[i] ^ b[i]);
    return same / 65536.0;
}

/* Every field of the key makes another stream, in which sender and receiver are not alike; seed
 * and group are not either. */
static void test_independence(void) {
    lc_inject inject = {.seed = 1}, other = {.seed = 2};
    uint64_t keys[] = {
        lc_inject_key(&inject, 1, 1, 1, 1, 2, 0), lc_inject_key(&other, 1, 1, 1, 1, 2, 0),
        lc_inject_key(&inject, 2, 1, 1, 1, 2, 0), lc_inject_key(&inject, 1, 2, 1, 1, 2, 0),
        lc_inject_key(&inject, 1, 1, 2, 1, 2, 0), lc_inject_key(&inject, 1, 1, 1, 2, 1, 0),
        lc_inject_key(&inject, 1, 1, 1, 1, 3, 0), lc_inject_key(&inject, 1, 1, 1, 1, 2, 1)};
    size_t n = sizeof keys / sizeof *keys;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            CHECK_AT(fabs(agreement(keys[i], keys[j]) - 0.5) < 5 * 0.5 / 256, "%zu %zu", i, j);
}

static void test_duplicates_and_reorders(void) {
    lc_inject inject = {.loss = 0.1, .dup = 0.1, .reorder = 0.02, .seed = 5};
    uint64_t key = key_of(&inject);
    uint32_t dup = 0, reorder = 0, lost_and_dup = 0;
    lc_inject_losses(&inject, key, N, bits);
    for (uint32_t k = 0; k < N; k++) {
        dup += (uint32_t)lc_inject_duplicates(&inject, key, k);
        reorder += (uint32_t)lc_inject_reorders(&inject, key, k);
        lost_and_dup += (uint32_t)(bit(k) && lc_inject_duplicates(&inject, key, k));
    }
    CHECK(fabs(dup / (double)N - 0.1) < 4 * error_of_rate(0.1, 1));
    CHECK(fabs(reorder / (double)N - 0.02) < 4 * error_of_rate(0.02, 1));
    CHECK(fabs(lost_and_dup / (double)N - 0.01) < 4 * error_of_rate(0.01, 1));
}

/* Packets that come late are lost as those in time are. */
static void test_one_by_one(double burst) {
    lc_inject inject = {.loss = 0.3, .burst = burst, .seed = 12}, none = {.burst = burst};
    uint64_t key = key_of(&inject);
    lc_inject_losses(&inject, key, 3000, bits);
    for (uint32_t k = 0; k < 3000; k++)
        CHECK_AT(lc_inject_loses(&inject, key, k) == bit(k), "burst %g, packet %u", burst, k);
    CHECK(!lc_inject_loses(&none, key, 5));
    uint32_t many = 0; /* forged packets have any number */
    for (uint64_t op = 0; op < 1000; op++)
        many += (uint32_t)lc_inject_loses(&inject, op, UINT32_MAX);
    CHECK_AT(many > 200 && many < 400, "%u of 1000", many);
}

int main(void) {
    test_known_answers();
    test_one_by_one(1);
    test_one_by_one(6);
    test_rates();
    test_first_packets(1);
    test_first_packets(6);
    test_limits();
    test_determinism();
    test_independence();
    test_duplicates_and_reorders();
    return check_result("inject");
}
