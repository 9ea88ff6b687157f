/* Rows of sets as packets are sent and as they arrive; see parity.h. */
#include "parity.h"

#include <string.h>

static int bit(const uint64_t *bits, uint32_t i) {
    return bits[i / 64] >> (i % 64) & 1;
}

static void set_bit(uint64_t *bits, uint32_t i) {
    bits[i / 64] |= (uint64_t)1 << (i % 64);
}

/* ---- what a level allows ---- */

/* Windows are the same in all codes. */
static lc_shape windows_of(uint32_t n) {
    return lc_shape_of(lc_code(1, 1), n);
}

uint32_t lc_parity_windows(uint32_t n) {
    return windows_of(n).windows;
}

static uint32_t share_of(uint32_t packets, uint8_t most) {
    return (uint32_t)(((uint64_t)packets * most + LC_PARITY_SHARE - 1) / LC_PARITY_SHARE);
}

uint32_t lc_parity_room(const lc_level *level, uint32_t n) {
    if (n == 0)
        return 0;
    if (!(level->choose & LC_CHOOSE_PARITY))
        return lc_shape_of(lc_code_fitted(level->code, n), n).parity;
    lc_shape s = windows_of(n);
    uint32_t last = share_of(lc_shape_packets(&s, s.windows - 1), level->most);
    return (s.windows - 1) * share_of(s.window, level->most) + last;
}

int lc_parity_allows(const lc_level *level, uint32_t code, uint32_t n) {
    if (!(level->choose & LC_CHOOSE_PARITY))
        return code == lc_code_fitted(level->code, n);
    if (!lc_code_valid(code))
        return 0;
    lc_shape s = lc_shape_of((uint16_t)code, n);
    return (uint64_t)s.sets * s.m <= lc_parity_room(level, n);
}

/* ---- what is sent ---- */

/* Clears the rows of a window when something is first added to them: of what is laid out for the
 * worst loss, memory that isn't used is never touched. */
static void begin_window(const lc_shape *s, uint64_t *begun, uint32_t window, uint8_t *rows,
                         uint32_t packet_bytes) {
    if (bit(begun, window))
        return;
    size_t first = (size_t)window * s->each * s->m;
    size_t n = (size_t)lc_shape_sets(s, window) * s->m;
    memset(rows + first * packet_bytes, 0, n * packet_bytes);
    set_bit(begun, window);
}

void lc_encoder_prepare(lc_encoder *e, uint32_t n) {
    lc_shape s = windows_of(n);
    e->window = s.window;
    e->windows = s.windows;
    for (uint32_t w = 0; e->open && w < s.windows; w++)
        e->open[w] = lc_shape_packets(&s, w);
}

void lc_encoder_settled(lc_encoder *e, uint32_t k, uint32_t n_ready, int is_void) {
    uint32_t w = k / e->window;
    if (!is_void)
        set_bit(e->sends, w);
    if (--e->open[w] || !bit(e->sends, w))
        return; /* a window of which nothing is sent has no parity */
    e->due[e->n_due] = w;
    e->due_at[e->n_due++] = n_ready;
}

void lc_encoder_begin(lc_encoder *e, uint16_t code, uint32_t n) {
    e->known = 1;
    e->code = code;
    e->shape = lc_shape_of(code, n);
}

void lc_encoder_add(lc_encoder *e, const lc_gf *gf, uint32_t k, const void *payload, uint32_t bytes,
                    uint32_t packet_bytes, uint16_t count) {
    const lc_shape *s = &e->shape;
    lc_place at = lc_shape_data(s, k);
    begin_window(s, e->begun, at.window, e->rows, packet_bytes);
    size_t first = (size_t)at.set * s->m;
    lc_rs_rows rows = {e->rows + first * packet_bytes, e->counts + first, packet_bytes};
    lc_rs_add(gf, &rows, NULL, s->m, at.at, payload, bytes, count);
}

uint32_t lc_encoder_windows(const lc_encoder *e) {
    return e->open ? e->n_due : e->windows;
}

int lc_encoder_is_due(const lc_encoder *e, uint32_t i, uint32_t sent) {
    if (i >= lc_encoder_windows(e))
        return 0;
    if (e->open)
        return sent >= e->due_at[i];
    return sent == e->shape.n || sent >= (uint64_t)(i + 1) * e->window;
}

lc_encoded lc_encoder_row(const lc_encoder *e, uint16_t code, uint32_t *windows,
                          uint32_t *packets) {
    const lc_shape *s = &e->shape;
    uint32_t m = lc_code_m(code);
    uint32_t w = e->open ? e->due[*windows] : *windows;
    uint32_t sets = lc_shape_sets(s, w), j = (*packets)++;
    if (*packets == sets * m) {
        *packets = 0;
        ++*windows;
    }
    size_t set = (size_t)w * s->each + j % sets;
    return (lc_encoded){set * s->m + j / sets, w * s->each * m + j,
                        lc_shape_first(s, w) + j % sets};
}

/* ---- what arrives ---- */

void lc_decoder_begin(lc_decoder *d, uint16_t code, uint32_t n, int unprotected) {
    d->known = 1;
    d->code = code;
    d->shape = lc_shape_of(code, n);
    for (uint32_t i = 0; i < d->shape.sets && !unprotected; i++)
        d->left[i] = (uint16_t)lc_shape_columns(&d->shape, i);
}

lc_rs_rows lc_decoder_rows(const lc_decoder *d, uint32_t set, uint32_t packet_bytes) {
    size_t first = (size_t)set * d->shape.m;
    return (lc_rs_rows){d->rows + first * packet_bytes, d->counts + first, packet_bytes};
}

uint32_t lc_decoder_add(lc_decoder *d, const lc_gf *gf, uint32_t k, const void *payload,
                        uint32_t bytes, uint32_t packet_bytes, uint16_t count) {
    const lc_shape *s = &d->shape;
    lc_place at = lc_shape_data(s, k);
    if (!d->left[at.set])
        return at.set;
    if (!d->keeps) {
        begin_window(s, d->begun, at.window, d->rows, packet_bytes);
        lc_rs_rows rows = lc_decoder_rows(d, at.set, packet_bytes);
        lc_rs_add(gf, &rows, NULL, s->m, at.at, payload, bytes, count);
    }
    d->left[at.set]--;
    return at.set;
}

uint32_t lc_decoder_add_row(lc_decoder *d, const lc_gf *gf, uint32_t j, const void *payload,
                            uint32_t bytes, uint32_t packet_bytes, uint16_t count) {
    lc_place at = lc_shape_row(&d->shape, j);
    lc_rs_rows rows = lc_decoder_rows(d, at.set, packet_bytes);
    if (!d->left[at.set])
        return at.set;
    d->n_rows[at.set]++;
    if (d->keeps) {
        uint8_t *row = rows.rows + (size_t)at.at * packet_bytes;
        memcpy(row, payload, bytes);
        memset(row + bytes, 0, packet_bytes - bytes);
        rows.counts[at.at] = count;
    } else {
        begin_window(&d->shape, d->begun, at.window, d->rows, packet_bytes);
        lc_rs_add_row(gf, &rows, at.at, payload, bytes, count);
    }
    return at.set;
}

int lc_decoder_find(const lc_decoder *d, uint32_t set, const uint64_t *arrived, lc_restorer *r) {
    const lc_shape *s = &d->shape;
    uint32_t rows = 0, lacks = 0, left = d->left[set], columns = lc_shape_columns(s, set);
    for (uint32_t i = 0; i < s->m && rows < left; i++)
        if (bit(d->came, lc_shape_parity(s, set, i)))
            r->which[rows++] = (uint8_t)i;
    for (uint32_t i = 0; i < columns && lacks <= left; i++)
        if (!bit(arrived, lc_shape_packet(s, set, i))) {
            if (lacks < left)
                r->columns[lacks] = (uint8_t)i;
            lacks++;
        }
    r->e = left;
    return rows == left && lacks == left;
}

static uint16_t times_count(uint8_t factor, uint16_t count) {
    return (uint16_t)(lc_gf_times(factor, count & 255) | lc_gf_times(factor, (uint8_t)(count >> 8))
                                                             << 8);
}

int lc_decoder_solve(const lc_decoder *d, uint32_t set, lc_restorer *r) {
    const uint16_t *counts = d->counts + (size_t)set * d->shape.m;
    if (!lc_rs_invert(r->inverse, r->which, r->columns, r->e))
        return 0;
    memset(r->counts, 0, sizeof r->counts);
    for (uint32_t i = 0; i < r->e; i++)
        for (uint32_t j = 0; j < r->e; j++)
            r->counts[j] ^= times_count(r->inverse[i * r->e + j], counts[r->which[i]]);
    return 1;
}

void lc_decoder_restore(const lc_decoder *d, const lc_gf *gf, uint32_t set, lc_restorer *r,
                        uint32_t first, uint32_t n, uint32_t packet_bytes) {
    lc_rs_rows rows = lc_decoder_rows(d, set, packet_bytes);
    uint8_t *into[LC_RESTORED];
    for (uint32_t j = 0; j < n; j++)
        into[j] = r->packets + (size_t)j * packet_bytes;
    memset(r->packets, 0, (size_t)n * packet_bytes);
    for (uint32_t i = 0; i < r->e; i++)
        gf->mad(into, r->inverse + i * r->e + first, n,
                rows.rows + (size_t)r->which[i] * packet_bytes, packet_bytes);
}
