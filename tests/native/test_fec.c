/* The share of parity follows the loss without wavering. */
#include "check.h"
#include "fec.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;

static double uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

enum { AUTO = 4 };

typedef struct {
    lc_fec_path path;
    uint32_t changes, least, most; /* set sizes; 0 counts as endless */
} seen;

/* So many packets go by, told of in acknowledgements of up to 64; bursts as injection makes them.
 */
static void pass(seen *s, double loss, double burst, uint32_t packets) {
    int bad = 0;
    s->changes = s->most = 0;
    s->least = UINT32_MAX;
    while (packets) {
        uint32_t sent = 1 + (uint32_t)(uniform() * 64), taken = 0;
        sent = sent < packets ? sent : packets;
        for (uint32_t k = 0; k < sent; k++) {
            double begin = burst > 1 ? loss / burst / (1 - loss) : loss;
            bad = bad && burst > 1 ? uniform() >= 1 / burst : uniform() < begin;
            taken += !bad;
        }
        packets -= sent;
        uint32_t before = s->path.size;
        lc_fec_told(&s->path, sent, taken);
        uint32_t size = lc_fec_choose(&s->path, AUTO);
        s->changes += s->path.size != before;
        size = size ? size : UINT32_MAX;
        s->least = size < s->least ? size : s->least;
        s->most = size > s->most ? size : s->most;
    }
}

static uint32_t size_of(const seen *s) {
    return s->path.size;
}

/* Once the loss is known, nine of ten packets shall come back, within what one can know of it. */
static void test_settles(void) {
    static const double losses[] = {0.001, 0.003, 0.01, 0.02};
    for (int i = 0; i < 8; i++) {
        double loss = losses[i / 2], burst = i % 2 ? 4 : 1;
        seen s = {{0}, 0, 0, 0};
        pass(&s, loss, burst, 20000);
        pass(&s, loss, burst, 200000);
        double want = 0.105 / loss;
        double within = 8192 * loss / burst < 8 ? 6 : 3; /* so few bursts are hardly known */
        CHECK_AT(s.least > want / within && s.most < want * within,
                 "loss %g burst %g: %u to %u, want %g", loss, burst, s.least, s.most, want);
        CHECK_AT(s.changes < 100, "loss %g burst %g: %u changes", loss, burst, s.changes);
    }
    for (int i = 0; i < 2; i++) {
        seen s = {{0}, 0, 0, 0};
        pass(&s, 0.1, i ? 4 : 1, 2000);
        pass(&s, 0.1, i ? 4 : 1, 100000);
        CHECK(s.least == 4 && s.most == 4 && s.changes == 0); /* no more than a quarter */
    }
}

static void test_begins_and_ends(void) {
    seen s = {{0}, 0, 0, 0};
    pass(&s, 0, 1, 100000);
    CHECK(s.most == UINT32_MAX && s.least == UINT32_MAX); /* nothing lost, nothing sent */
    pass(&s, 0.05, 1, 1000);
    CHECK_AT(size_of(&s) > 0 && size_of(&s) <= 20, "size %u", size_of(&s));
    pass(&s, 0.05, 1, 4000);
    CHECK_AT(size_of(&s) <= 8, "size %u", size_of(&s));
    pass(&s, 0, 1, 80000);
    CHECK_AT(size_of(&s) == 0, "size %u", size_of(&s));
    lc_fec_told(&s.path, 64, 63);
    CHECK_AT(lc_fec_choose(&s.path, AUTO) == 224, "size %u", size_of(&s));
    s = (seen){{0}, 0, 0, 0}; /* the very first packets aren't the measure of all */
    lc_fec_told(&s.path, 4, 3);
    CHECK_AT(lc_fec_choose(&s.path, AUTO) >= 48, "size %u", size_of(&s));
}

/* What was chosen for one call isn't more than another one allows. */
static void test_limit(void) {
    for (uint32_t i = 0; i < LC_SIZES; i++) {
        uint32_t least = lc_code_size(i);
        seen s = {{0}, 0, 0, 0};
        pass(&s, 0.1, 1, 20000);
        CHECK_AT(lc_fec_choose(&s.path, least) >= least, "least %u: %u", least, s.path.size);
        CHECK(lc_fec_half(least, 1) <= least && lc_fec_half(least, least) == least);
        CHECK(2 * lc_fec_half(least, 1) <= least || least == 1);
    }
    CHECK(lc_fec_half(224, 4) == 96 && lc_fec_half(8, 4) == 4 && lc_fec_half(0, 4) == 0);
}

/* Packets that are late by more than an acknowledgement are no loss, nor is nonsense. */
static void test_reordering(void) {
    seen s = {{0}, 0, 0, 0};
    for (int i = 0; i < 5000; i++) {
        lc_fec_told(&s.path, 64, 50);
        lc_fec_told(&s.path, 1, 15);
        CHECK_AT(lc_fec_choose(&s.path, AUTO) == 0, "turn %d: size %u", i, size_of(&s));
    }
    lc_fec_told(&s.path, 0xFFFFFFFF, 0);
    lc_fec_told(&s.path, 0x7FFFFFFF, 0x80000000);
    lc_fec_told(&s.path, 0, 0x80000001);
    CHECK(isfinite(s.path.sent) && isfinite(s.path.lost));
    pass(&s, 0, 1, 100000);
    CHECK(size_of(&s) == 0);
}

int main(void) {
    test_settles();
    test_begins_and_ends();
    test_reordering();
    test_limit();
    return check_result("fec");
}
