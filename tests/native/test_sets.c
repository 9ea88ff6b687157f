/* Every packet is of one set, at a place of its own; every code word says what was meant. */
#include "check.h"
#include "sets.h"

#include <stdlib.h>
#include <string.h>

/* ---- code ---- */

static void test_codes(void) {
    unsigned valid = 0;
    CHECK(lc_code_valid(0) && lc_code_k(0) == 0 && lc_code_m(0) == 0);
    for (uint32_t code = 0; code < 1 << 17; code++) {
        uint32_t k = lc_code_k(code & 0x3FF), m = lc_code_m(code & 0x3FF);
        if (!lc_code_valid(code))
            continue;
        valid++;
        CHECK_AT(code < 1 << 10 && lc_code(k, m) == code, "code %u is k %u, m %u", code, k, m);
        CHECK(k <= LC_COLUMNS_MOST && m <= LC_ROWS_MOST && k + m <= LC_SYMBOLS_MOST);
        for (uint32_t rounds = 0; rounds < 4; rounds++) {
            uint16_t word = lc_word(code, rounds);
            CHECK(word < 1 << 12 && lc_word_code(word) == code && lc_word_rounds(word) == rounds);
        }
    }
    /* 16 sizes with 63 numbers of rows, less those beyond 256 in all, and none. */
    unsigned beyond = 0;
    for (uint32_t i = 0; i < LC_SIZES; i++)
        for (uint32_t m = 1; m <= LC_ROWS_MOST; m = lc_code_rows_up(m + 1)) {
            beyond += lc_code_size(i) + m > LC_SYMBOLS_MOST;
            if (m == LC_ROWS_MOST)
                break;
        }
    CHECK_AT(valid == 1 + LC_SIZES * 63 - beyond, "%u are valid, %u beyond", valid, beyond);
    CHECK(beyond > 0 && lc_code_size(LC_SIZES) == 0);
    CHECK(lc_code(5, 1) == 0 && lc_code(4, 32) == 0 && lc_code(4, 128) == 0 && lc_code(4, 0) == 0);
}

static void test_rows(void) {
    for (uint32_t m = 0; m <= 200; m++) {
        uint32_t up = lc_code_rows_up(m), down = lc_code_rows_down(m);
        uint32_t wanted = m < LC_ROWS_MOST ? m : LC_ROWS_MOST;
        CHECK(down <= wanted && wanted <= up && up - down <= 3 && up <= LC_ROWS_MOST);
        CHECK((up == 0 || lc_code(1, up)) && (down == 0 || lc_code(1, down)));
        CHECK((lc_code(1, wanted) || wanted == 0) == (up == down));
    }
}

/* Streams have about the same share of parity, whether it is a number of whole sets or not. */
static void test_fitted(void) {
    for (uint32_t code = 1; code < 1 << 10; code++) {
        if (!lc_code_valid(code))
            continue;
        uint32_t k = lc_code_k(code), m = lc_code_m(code);
        CHECK(lc_code_fitted((uint16_t)code, 0) == 0);
        for (uint32_t n = 1; n < 300; n++) {
            uint16_t fitted = lc_code_fitted((uint16_t)code, n);
            CHECK(fitted && lc_code_valid(fitted));
            if (n % k == 0)
                CHECK(fitted == code);
            lc_shape s = lc_shape_of(fitted, n); /* each set is rounded to a row, or three */
            CHECK_AT(s.parity * k <= (n + s.sets) * m + s.sets * k &&
                         (s.parity + 3 * s.sets) * k > n * m && s.parity >= s.sets,
                     "k %u, m %u, n %u: %u", k, m, n, s.parity);
        }
    }
}

/* ---- shape ---- */

static void check_place(lc_shape s, uint32_t packet, uint8_t *columns, uint32_t *in_window) {
    lc_place p = lc_shape_data(&s, packet);
    CHECK_AT(p.set < s.sets && p.window < s.windows && p.at < lc_shape_columns(&s, p.set) &&
                 p.set / s.each == p.window,
             "packet %u of %u, k %u: window %u, set %u, column %u", packet, s.n, s.k, p.window,
             p.set, p.at);
    CHECK(lc_shape_packet(&s, p.set, p.at) == packet);
    CHECK(p.at == columns[p.set]); /* in order, so each column once */
    columns[p.set]++;
    in_window[p.window]++;
}

static void test_shape(uint16_t code, uint32_t n) {
    lc_shape s = lc_shape_of(code, n);
    static uint8_t columns[1 << 16], rows[1 << 16];
    uint32_t in_window[64] = {0}, sets = 0;
    CHECK(s.windows <= 64 && s.sets <= 1 << 16 && s.parity == s.sets * s.m);
    CHECK(s.window <= LC_WINDOW && s.k == lc_code_k(code) && s.m == lc_code_m(code));
    memset(columns, 0, s.sets);
    memset(rows, 0, s.sets);
    for (uint32_t packet = 0; packet < n; packet++)
        check_place(s, packet, columns, in_window);
    for (uint32_t w = 0; w < s.windows; w++) {
        CHECK(in_window[w] == lc_shape_packets(&s, w) && in_window[w] > 0);
        CHECK(lc_shape_data(&s, lc_shape_first(&s, w)).window == w);
        CHECK(w + 1 == s.windows || in_window[w] == s.window);
        sets += lc_shape_sets(&s, w);
    }
    CHECK(sets == s.sets);
    for (uint32_t set = 0; set < s.sets; set++)
        CHECK(columns[set] >= 1 && columns[set] <= s.k &&
              columns[set] == lc_shape_columns(&s, set));
    uint32_t window = 0;
    for (uint32_t j = 0; j < s.parity; j++) {
        lc_place p = lc_shape_row(&s, j);
        CHECK(p.set < s.sets && p.at == rows[p.set] && p.set / s.each == p.window);
        CHECK(lc_shape_parity(&s, p.set, p.at) == j);
        CHECK(p.window == window || p.window == window + 1); /* window by window */
        window = p.window;
        rows[p.set]++;
    }
    for (uint32_t set = 0; set < s.sets; set++)
        CHECK(rows[set] == s.m);
}

/* Neighbours are in different sets, as many of them as a window has sets. */
static void test_interleaved(void) {
    lc_shape s = lc_shape_of(lc_code(64, 4), 2979);
    CHECK(s.windows == 3 && s.window == 993 && s.each == 16 && s.sets == 48);
    for (uint32_t packet = 0; packet + 16 < s.n; packet++)
        for (uint32_t next = packet + 1; next < packet + 16; next++)
            CHECK(lc_shape_data(&s, packet).set != lc_shape_data(&s, next).set);
}

int main(void) {
    test_codes();
    test_rows();
    test_fitted();
    static const uint32_t sizes[] = {1,   2,    3,    5,    12,   63,   64,   65,   223,  224,
                                     225, 1023, 1024, 1025, 2047, 2048, 2049, 2979, 4097, 5120};
    for (uint32_t i = 0; i < LC_SIZES; i++)
        for (uint32_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++) {
            test_shape(lc_code(lc_code_size(i), 1), sizes[j]);
            test_shape(lc_code(lc_code_size(i), 7), sizes[j]);
        }
    CHECK(lc_shape_of(0, 100).parity == 0 && lc_shape_of(lc_code(4, 1), 0).parity == 0);
    /* Of many packets no window is empty, and numbers don't overflow. */
    for (uint32_t n = 1u << 20; n < 1u << 25; n = n * 3 + 1) {
        lc_shape s = lc_shape_of(lc_code(1, 127), n);
        CHECK(lc_shape_packets(&s, s.windows - 1) > 0 && s.parity == 127 * n);
        CHECK(lc_shape_packets(&s, s.windows - 1) <= s.window && s.window <= LC_WINDOW);
    }
    test_interleaved();
    return check_result("sets");
}
