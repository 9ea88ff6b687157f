/* Parity brings back what is missing, and its share follows the loss without wavering. */
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

/* ---- sets ---- */

static void test_sizes(void) {
    CHECK(lc_fec_size(0) == 0 && lc_fec_size(1) == 1);
    for (uint32_t code = 1; code < LC_FEC_CODES; code++) {
        uint32_t size = lc_fec_size(code);
        CHECK(size > lc_fec_size(code - 1));
        CHECK(lc_fec_parity(code, 0) == 0 && lc_fec_parity(code, 1) == 1);
        CHECK(lc_fec_parity(code, size) == 1 && lc_fec_parity(code, size + 1) == 2);
        CHECK(lc_fec_parity(code, 0x3FFFFFFF) <= 0x3FFFFFFF);
    }
    for (uint32_t code = LC_FEC_CODES; code < 300; code++)
        CHECK(lc_fec_size(code) == 0 && lc_fec_parity(code, 1000) == 0);
    CHECK(lc_fec_size(0xFFFFFFFF) == 0);
}

enum { MOST = 40, BYTES = 52 };

/* Sent and received as the engine does, with one packet of each set missing in turn. */
static void test_sets(uint8_t code, uint32_t n) {
    static uint8_t sums[2][MOST * BYTES], payload[MOST][BYTES];
    uint16_t counts[2][MOST] = {{0}}, left[2][MOST];
    uint64_t came = 0;
    lc_parity p[2];
    for (int i = 0; i < 2; i++) {
        p[i] = (lc_parity){.sums = sums[i],
                           .counts = counts[i],
                           .left = left[i],
                           .came = &came,
                           .most = lc_fec_parity(code, n)};
        CHECK(lc_parity_fits(&p[i], code, n));
        CHECK(code == 1 || !lc_parity_fits(&p[i], 1, n) || p[i].most == n);
        lc_parity_begin(&p[i], code, n, BYTES);
        CHECK(lc_parity_fits(&p[i], code, n) && !lc_parity_fits(&p[i], code - 1u, n));
    }
    uint32_t sets = p[0].sets, members = 0;
    for (uint32_t j = 0; j < sets; j++) {
        members += left[0][j];
        CHECK(left[0][j] >= 1 && left[0][j] <= lc_fec_size(code));
    }
    CHECK_AT(members == n, "%u of %u", members, n);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t bytes = k + 1 < n ? BYTES : BYTES - 11;
        for (uint32_t i = 0; i < BYTES; i++)
            payload[k][i] = i < bytes ? (uint8_t)(uniform() * 256) : 0;
        lc_parity_add(&p[0], k % sets, payload[k], bytes, BYTES, (uint16_t)(k % 5 + 1));
        if (k % sets != k) /* the first of each set is lost */
            lc_parity_add(&p[1], k % sets, payload[k], bytes, BYTES, (uint16_t)(k % 5 + 1));
    }
    for (uint32_t j = 0; j < sets; j++) {
        lc_parity_add(&p[1], j, sums[0] + j * BYTES, BYTES, BYTES, counts[0][j]);
        CHECK_AT(memcmp(sums[1] + j * BYTES, payload[j], BYTES) == 0, "code %u, packet %u of %u",
                 code, j, n);
        CHECK(counts[1][j] == j % 5 + 1);
    }
}

/* ---- how much ---- */

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
        uint8_t before = s->path.code;
        lc_fec_told(&s->path, sent, taken);
        uint32_t size = lc_fec_size(lc_fec_choose(&s->path, AUTO));
        s->changes += s->path.code != before;
        size = size ? size : UINT32_MAX;
        s->least = size < s->least ? size : s->least;
        s->most = size > s->most ? size : s->most;
    }
}

static uint32_t size_of(const seen *s) {
    return lc_fec_size(s->path.code);
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
    CHECK_AT(lc_fec_size(lc_fec_choose(&s.path, AUTO)) >= 300, "size %u", size_of(&s));
    s = (seen){{0}, 0, 0, 0}; /* the very first packets aren't the measure of all */
    lc_fec_told(&s.path, 4, 3);
    CHECK_AT(lc_fec_size(lc_fec_choose(&s.path, AUTO)) >= 50, "size %u", size_of(&s));
}

/* What was chosen for one call isn't more than another one allows. */
static void test_limit(void) {
    for (uint8_t most = 1; most < LC_FEC_CODES; most++) {
        seen s = {{0}, 0, 0, 0};
        pass(&s, 0.1, 1, 20000);
        CHECK_AT(lc_fec_choose(&s.path, most) >= most, "most %u: %u", most, s.path.code);
    }
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
    test_sizes();
    for (uint32_t n = 1; n <= MOST; n++)
        for (uint8_t code = 1; code < LC_FEC_CODES; code++)
            test_sets(code, n);
    test_settles();
    test_begins_and_ends();
    test_reordering();
    test_limit();
    return check_result("fec");
}
