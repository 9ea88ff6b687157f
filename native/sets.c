/* Which set a packet belongs to: numbers alone. */
#include "sets.h"

/* lossycoll/plan/sets.py has the same table. */
static const uint16_t sizes[LC_SIZES] = {1,  2,  3,  4,  6,  8,   12,  16,
                                         24, 32, 48, 64, 96, 128, 176, 224};

/* Every number of rows up to here has a code, and from here on every third. */
enum { FINE = 31, STEP = 3 };

static uint32_t up(uint32_t a, uint32_t b) {
    return (a + b - 1) / b;
}

/* ---- code ---- */

static uint32_t rows_of(uint32_t number) {
    return number <= FINE ? number : FINE + STEP * (number - FINE);
}

uint32_t lc_code_rows_up(uint32_t m) {
    uint32_t found = m <= FINE ? m : FINE + STEP * up(m - FINE, STEP);
    return found < LC_ROWS_MOST ? found : LC_ROWS_MOST;
}

uint32_t lc_code_rows_down(uint32_t m) {
    m = m < LC_ROWS_MOST ? m : LC_ROWS_MOST;
    return m <= FINE ? m : FINE + (m - FINE) / STEP * STEP;
}

uint32_t lc_code_size(uint32_t i) {
    return i < LC_SIZES ? sizes[i] : 0;
}

uint16_t lc_code(uint32_t k, uint32_t m) {
    if (m == 0 || m > LC_ROWS_MOST || m != lc_code_rows_up(m) || k + m > LC_SYMBOLS_MOST)
        return 0;
    uint32_t number = m <= FINE ? m : FINE + (m - FINE) / STEP;
    for (uint32_t i = 0; i < LC_SIZES; i++)
        if (sizes[i] == k)
            return (uint16_t)(i | number << 4);
    return 0;
}

int lc_code_valid(uint32_t code) {
    if (code >> 4 == 0)
        return code == 0;
    return code < 1u << 10 && lc_code_k(code) + lc_code_m(code) <= LC_SYMBOLS_MOST;
}

uint32_t lc_code_k(uint32_t code) {
    return code ? sizes[code & 15] : 0;
}

uint32_t lc_code_m(uint32_t code) {
    return rows_of(code >> 4 & 63);
}

uint16_t lc_code_fitted(uint16_t code, uint32_t n) {
    uint32_t k = lc_code_k(code), m = lc_code_m(code), i = 0;
    if (!code || !n)
        return 0;
    while (sizes[i] < k && sizes[i] < n)
        i++;
    uint32_t window = up(n, up(n, LC_WINDOW)), columns = up(window, up(window, k));
    uint32_t fewer = lc_code_rows_down((2 * columns * m + k) / (2 * k));
    return lc_code(sizes[i], fewer ? fewer : 1);
}

/* ---- shape ---- */

lc_shape lc_shape_of(uint16_t code, uint32_t n) {
    lc_shape s = {.n = n, .k = (uint16_t)lc_code_k(code), .m = (uint16_t)lc_code_m(code)};
    if (!s.m || !n)
        return s;
    s.window = up(n, up(n, LC_WINDOW));
    s.windows = up(n, s.window); /* fewer than asked for where n has a great many */
    s.each = up(s.window, s.k);
    s.sets = (s.windows - 1) * s.each + lc_shape_sets(&s, s.windows - 1);
    s.parity = s.sets * s.m;
    return s;
}

uint32_t lc_shape_first(const lc_shape *s, uint32_t window) {
    return window * s->window;
}

uint32_t lc_shape_packets(const lc_shape *s, uint32_t window) {
    return window + 1 < s->windows ? s->window : s->n - lc_shape_first(s, window);
}

uint32_t lc_shape_sets(const lc_shape *s, uint32_t window) {
    return window + 1 < s->windows ? s->each : up(lc_shape_packets(s, window), s->k);
}

uint32_t lc_shape_columns(const lc_shape *s, uint32_t set) {
    uint32_t window = set / s->each, sets = lc_shape_sets(s, window);
    return (lc_shape_packets(s, window) - set % s->each - 1) / sets + 1;
}

lc_place lc_shape_data(const lc_shape *s, uint32_t packet) {
    uint32_t window = packet / s->window, i = packet - lc_shape_first(s, window);
    uint32_t sets = lc_shape_sets(s, window);
    return (lc_place){window, window * s->each + i % sets, i / sets};
}

lc_place lc_shape_row(const lc_shape *s, uint32_t j) {
    uint32_t of_window = s->each * s->m, window = j / of_window, sets = lc_shape_sets(s, window);
    j -= window * of_window;
    return (lc_place){window, window * s->each + j % sets, j / sets};
}

uint32_t lc_shape_packet(const lc_shape *s, uint32_t set, uint32_t column) {
    uint32_t window = set / s->each;
    return lc_shape_first(s, window) + column * lc_shape_sets(s, window) + set % s->each;
}

uint32_t lc_shape_parity(const lc_shape *s, uint32_t set, uint32_t row) {
    uint32_t window = set / s->each;
    return window * s->each * s->m + row * lc_shape_sets(s, window) + set % s->each;
}

/* ---- for tests ---- */

uint32_t lc_parity_packets(uint32_t code, uint32_t n) {
    return lc_code_valid(code) ? lc_shape_of((uint16_t)code, n).parity : UINT32_MAX;
}

uint32_t lc_set_of(uint32_t code, uint32_t n, uint32_t packet) {
    if (!code || !n || !lc_code_valid(code))
        return UINT32_MAX;
    lc_shape s = lc_shape_of((uint16_t)code, n);
    if (packet >= n && packet - n >= s.parity)
        return UINT32_MAX;
    return packet < n ? lc_shape_data(&s, packet).set : lc_shape_row(&s, packet - n).set;
}
