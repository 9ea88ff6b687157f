/* Any rows bring back as many packets, whatever the pattern; row 0 is XOR; counts come too. */
#include "check.h"
#include "isal.h"
#include "rs.h"

#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;

static uint32_t drawn(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % below);
}

/* ---- the matrix ---- */

static void test_factors(void) {
    for (uint32_t j = 0; j < LC_COLUMNS_MOST; j++)
        CHECK(lc_rs_factor(0, j) == 1);
    for (uint32_t i = 0; i < LC_ROWS_MOST; i++)
        CHECK(lc_rs_factor(i, 0) == 1);
    /* By the definition in rs.h. */
    for (uint32_t i = 0; i < LC_ROWS_MOST; i++)
        for (uint32_t j = 0; j < LC_COLUMNS_MOST && i + j < LC_SYMBOLS_MOST - 1; j++) {
            uint8_t a = lc_gf_inverse((uint8_t)(i ^ (255 - j))), first = lc_gf_inverse(255);
            uint8_t under =
                lc_gf_times(lc_gf_inverse((uint8_t)(i ^ 255)), lc_gf_inverse((uint8_t)(255 - j)));
            CHECK_AT(lc_gf_times(lc_rs_factor(i, j), under) == lc_gf_times(a, first),
                     "row %u, column %u", i, j);
        }
}

/* Draws e numbers below n without repeating one. */
static void choose(uint8_t *into, uint32_t e, uint32_t n) {
    uint8_t all[256];
    for (uint32_t i = 0; i < n; i++)
        all[i] = (uint8_t)i;
    for (uint32_t i = 0; i < e; i++) {
        uint32_t at = i + drawn(n - i);
        into[i] = all[at];
        all[at] = all[i];
    }
}

static void test_inverse(uint32_t e, uint32_t k, uint32_t m) {
    static uint8_t inverse[LC_ROWS_MOST * LC_ROWS_MOST];
    uint8_t rows[LC_ROWS_MOST], columns[LC_ROWS_MOST];
    choose(rows, e, m);
    choose(columns, e, k);
    CHECK(lc_rs_invert(inverse, rows, columns, e));
    for (uint32_t j = 0; j < e; j++)
        for (uint32_t to = 0; to < e; to++) {
            uint8_t sum = 0;
            for (uint32_t i = 0; i < e; i++)
                sum ^= lc_gf_times(inverse[i * e + to], lc_rs_factor(rows[i], columns[j]));
            CHECK_AT(sum == (to == j), "e %u, k %u, m %u: %u at %u, %u", e, k, m, sum, to, j);
        }
}

static void test_refused(void) {
    uint8_t inverse[9], good[] = {0, 5, 9}, twice[] = {5, 2, 5}, beyond[] = {0, 1, 224},
                        clash[] = {126, 1, 2}, at[] = {129, 3, 4}, row[] = {127, 1, 2};
    CHECK(lc_rs_invert(inverse, good, good, 3));
    CHECK(!lc_rs_invert(inverse, twice, good, 3) && !lc_rs_invert(inverse, good, twice, 3));
    CHECK(!lc_rs_invert(inverse, good, beyond, 3) && !lc_rs_invert(inverse, row, good, 3));
    CHECK(!lc_rs_invert(inverse, clash, at, 3)); /* more than 256 symbols */
    CHECK(!lc_rs_invert(inverse, good, good, LC_ROWS_MOST + 1));
}

/* ---- sets ---- */

enum { BYTES = 40 };

typedef struct {
    uint32_t k, m;
    uint8_t data[LC_COLUMNS_MOST][BYTES], rows[LC_ROWS_MOST][BYTES];
    uint32_t bytes[LC_COLUMNS_MOST];
    uint16_t count[LC_COLUMNS_MOST], row_count[LC_ROWS_MOST];
} set;

static set sent, came;

static lc_rs_rows rows_of(set *s) {
    return (lc_rs_rows){s->rows[0], s->row_count, BYTES};
}

static void draw_set(uint32_t k, uint32_t m) {
    memset(&sent, 0, sizeof sent);
    sent.k = k;
    sent.m = m;
    lc_rs_rows rows = rows_of(&sent);
    for (uint32_t j = 0; j < k; j++) {
        sent.bytes[j] = drawn(4) ? BYTES : drawn(BYTES);
        sent.count[j] = (uint16_t)drawn(65536);
        for (uint32_t i = 0; i < sent.bytes[j]; i++)
            sent.data[j][i] = (uint8_t)drawn(256);
        lc_rs_add(lc_gf_of(1), &rows, NULL, m, j, sent.data[j], sent.bytes[j], sent.count[j]);
    }
}

/* missing: a bit per packet of data, then per row. lazy: rows take in what came only at the end,
 * and only those that are needed; else each as it comes. */
static void receive(const uint8_t *missing, int lazy) {
    uint8_t columns[LC_COLUMNS_MOST], which[LC_ROWS_MOST];
    uint32_t lost = 0, e = 0;
    const lc_gf *gf = lc_gf_of(lazy);
    memset(&came, 0, sizeof came);
    lc_rs_rows rows = rows_of(&came);
    for (uint32_t j = 0; j < sent.k; j++)
        if (missing[j])
            columns[lost++] = (uint8_t)j;
        else if (!lazy)
            lc_rs_add(gf, &rows, NULL, sent.m, j, sent.data[j], sent.bytes[j], sent.count[j]);
    for (uint32_t i = 0; i < sent.m; i++)
        if (!missing[sent.k + i] && e < lost) {
            which[e++] = (uint8_t)i;
            lc_rs_add_row(gf, &rows, i, sent.rows[i], BYTES, sent.row_count[i]);
        }
    if (e < lost)
        return;
    for (uint32_t j = 0; lazy && j < sent.k; j++)
        if (!missing[j])
            lc_rs_add(gf, &rows, which, e, j, sent.data[j], sent.bytes[j], sent.count[j]);
    static uint8_t inverse[LC_ROWS_MOST * LC_ROWS_MOST], back[LC_ROWS_MOST * BYTES];
    uint16_t counts[LC_ROWS_MOST];
    CHECK(lc_rs_restore(gf, &rows, which, columns, e, BYTES, inverse, back, counts));
    for (uint32_t j = 0; j < e; j++)
        CHECK_AT(memcmp(back + j * BYTES, sent.data[columns[j]], BYTES) == 0 &&
                     counts[j] == sent.count[columns[j]],
                 "k %u, m %u: packet %u", sent.k, sent.m, columns[j]);
}

static void test_every_pattern(uint32_t k, uint32_t m) {
    draw_set(k, m);
    for (uint32_t pattern = 0; pattern < 1u << (k + m); pattern++) {
        uint8_t missing[12];
        for (uint32_t i = 0; i < k + m; i++)
            missing[i] = pattern >> i & 1;
        receive(missing, (int)pattern % 2);
    }
}

static void test_drawn_patterns(uint32_t k, uint32_t m) {
    draw_set(k, m);
    for (int time = 0; time < 8; time++) { /* as many as there are rows, or fewer */
        uint8_t missing[LC_SYMBOLS_MOST] = {0}, lost[LC_SYMBOLS_MOST];
        uint32_t most = m < k ? m : k;
        uint32_t e = time < 4 ? most : 1 + drawn(most);
        choose(lost, e, k + m);
        for (uint32_t i = 0; i < e; i++)
            missing[lost[i]] = 1;
        receive(missing, time % 2);
    }
}

static void test_row_0_is_xor(void) {
    draw_set(60, 3);
    uint8_t sum[BYTES] = {0};
    uint16_t count = 0;
    for (uint32_t j = 0; j < sent.k; j++) {
        for (uint32_t i = 0; i < BYTES; i++)
            sum[i] ^= sent.data[j][i];
        count ^= sent.count[j];
    }
    CHECK(memcmp(sum, sent.rows[0], BYTES) == 0 && count == sent.row_count[0]);
}

/* isa-l makes the same rows of the same factors. */
static void test_agrees(const isal *other, uint32_t k, uint32_t m) {
    static uint8_t factors[LC_SYMBOLS_MOST * LC_SYMBOLS_MOST],
        tables[LC_SYMBOLS_MOST * LC_SYMBOLS_MOST * ISAL_TABLE], theirs[LC_ROWS_MOST][BYTES];
    uint8_t *into[LC_ROWS_MOST];
    draw_set(k, m);
    memset(theirs, 0, sizeof theirs);
    for (uint32_t i = 0; i < m; i++) {
        into[i] = theirs[i];
        for (uint32_t j = 0; j < k; j++)
            factors[i * k + j] = lc_rs_factor(i, j);
    }
    other->tables((int)k, (int)m, factors, tables);
    for (uint32_t j = 0; j < k; j++)
        other->add(BYTES, (int)k, (int)m, (int)j, tables, sent.data[j], into);
    CHECK_AT(memcmp(theirs, sent.rows, m * BYTES) == 0, "k %u, m %u", k, m);
}

int main(void) {
    test_factors();
    for (uint32_t e = 1; e <= 32; e++)
        test_inverse(e, 224, 32);
    test_inverse(127, 128, 127);
    test_inverse(64, 176, 79);
    test_refused();
    for (uint32_t k = 1; k <= 6; k++)
        for (uint32_t m = 1; m <= 6; m++)
            test_every_pattern(k, m);
    for (uint32_t i = 0; i < LC_SIZES; i++)
        for (uint32_t m = 1; m <= 31; m += 6)
            test_drawn_patterns(lc_code_size(i), m);
    test_drawn_patterns(128, 127);
    test_drawn_patterns(176, 79);
    test_row_0_is_xor();
    isal other = isal_open();
    if (other.library) {
        test_agrees(&other, 64, 6);
        test_agrees(&other, 10, 4);
        test_agrees(&other, 128, 48);
    }
    return check_result("rs");
}
