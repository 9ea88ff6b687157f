/* Parity of a set and its inverse. The factors are a table by column, since all rows of a column
 * are wanted at once. */
#include "rs.h"

#include <string.h>

static uint8_t factors[LC_COLUMNS_MOST][LC_ROWS_MOST + 1];

static uint8_t x_of(uint32_t row) {
    return (uint8_t)row;
}

static uint8_t y_of(uint32_t column) {
    return (uint8_t)(255 - column);
}

/* factor(i, j) = row_scale(i) * column_scale(j) / (x + y). */
static uint8_t row_scale(uint32_t row) {
    return lc_gf_times(x_of(row) ^ y_of(0), lc_gf_inverse(y_of(0)));
}

static uint8_t column_scale(uint32_t column) {
    return y_of(column);
}

/* After the field's own tables, and before main and any thread, so that it needs no lock. */
__attribute__((constructor)) static void fill_factors(void) {
    for (uint32_t j = 0; j < LC_COLUMNS_MOST; j++)
        for (uint32_t i = 0; i < LC_ROWS_MOST; i++)
            factors[j][i] = lc_gf_times(lc_gf_times(row_scale(i), column_scale(j)),
                                        lc_gf_inverse(x_of(i) ^ y_of(j)));
}

uint8_t lc_rs_factor(uint32_t row, uint32_t column) {
    return factors[column][row];
}

/* Most counts are below 256. */
static uint16_t times_count(uint8_t factor, uint16_t count) {
    unsigned high = count >> 8 ? lc_gf_times(factor, (uint8_t)(count >> 8)) : 0;
    return (uint16_t)(lc_gf_times(factor, count & 255) | high << 8);
}

void lc_rs_add(const lc_gf *gf, const lc_rs_rows *rows, const uint8_t *which, uint32_t e,
               uint32_t column, const void *payload, size_t bytes, uint16_t count) {
    uint8_t *into[LC_ROWS_MOST], chosen[LC_ROWS_MOST];
    for (uint32_t i = 0; i < e; i++) {
        uint32_t row = which ? which[i] : i;
        into[i] = rows->rows + row * rows->stride;
        chosen[i] = factors[column][row];
        rows->counts[row] ^= times_count(chosen[i], count);
    }
    gf->mad(into, chosen, e, payload, bytes);
}

void lc_rs_add_row(const lc_gf *gf, const lc_rs_rows *rows, uint32_t row, const void *payload,
                   size_t bytes, uint16_t count) {
    static const uint8_t one = 1;
    uint8_t *into = rows->rows + row * rows->stride;
    rows->counts[row] ^= count;
    gf->mad(&into, &one, 1, payload, bytes);
}

/* The product of all but itself of v ^ others[k], and the product of v ^ all[k]. */
static uint8_t differences(const uint8_t *points, uint32_t e, uint8_t v, uint32_t skip) {
    uint8_t product = 1;
    for (uint32_t k = 0; k < e; k++)
        if (k != skip)
            product = lc_gf_times(product, points[k] ^ v);
    return product;
}

/* The inverse of a Cauchy matrix has a closed form (S. Schechter, On the inversion of certain
 * matrices, 1959): e^2 steps, where elimination takes e^3. */
int lc_rs_invert(uint8_t *inverse, const uint8_t *rows, const uint8_t *columns, uint32_t e) {
    if (e > LC_ROWS_MOST)
        return 0;
    uint8_t x[LC_ROWS_MOST], y[LC_ROWS_MOST], of_row[LC_ROWS_MOST], of_column[LC_ROWS_MOST];
    for (uint32_t i = 0; i < e; i++) {
        if (rows[i] >= LC_ROWS_MOST || columns[i] >= LC_COLUMNS_MOST)
            return 0;
        x[i] = x_of(rows[i]);
        y[i] = y_of(columns[i]);
    }
    for (uint32_t i = 0; i < e; i++) {
        uint8_t others = lc_gf_times(differences(x, e, x[i], i), row_scale(rows[i]));
        of_row[i] = lc_gf_times(differences(y, e, x[i], e), lc_gf_inverse(others));
        others = lc_gf_times(differences(y, e, y[i], i), column_scale(columns[i]));
        of_column[i] = lc_gf_times(differences(x, e, y[i], e), lc_gf_inverse(others));
        if (!of_row[i] || !of_column[i])
            return 0; /* a difference was 0: a point stands twice */
    }
    for (uint32_t i = 0; i < e; i++)
        for (uint32_t j = 0; j < e; j++)
            inverse[i * e + j] =
                lc_gf_times(lc_gf_times(of_row[i], of_column[j]), lc_gf_inverse(x[i] ^ y[j]));
    return 1;
}

int lc_rs_restore(const lc_gf *gf, const lc_rs_rows *rows, const uint8_t *which,
                  const uint8_t *columns, uint32_t e, size_t bytes, uint8_t *inverse,
                  uint8_t *packets, uint16_t *counts) {
    if (!lc_rs_invert(inverse, which, columns, e))
        return 0;
    uint8_t *into[LC_ROWS_MOST];
    for (uint32_t j = 0; j < e; j++) {
        into[j] = packets + j * rows->stride;
        memset(into[j], 0, bytes);
        counts[j] = 0;
    }
    for (uint32_t i = 0; i < e; i++) {
        gf->mad(into, inverse + i * e, e, rows->rows + which[i] * rows->stride, bytes);
        for (uint32_t j = 0; j < e; j++)
            counts[j] ^= times_count(inverse[i * e + j], rows->counts[which[i]]);
    }
    return 1;
}

/* ---- for tests ---- */

int lc_parity_rows(int simd, uint32_t k, uint32_t m, uint32_t bytes, const uint8_t *packets,
                   uint8_t *rows) {
    if (k > LC_COLUMNS_MOST || m > LC_ROWS_MOST || k + m > LC_SYMBOLS_MOST)
        return LC_E_ARGUMENT;
    uint16_t counts[LC_ROWS_MOST] = {0};
    lc_rs_rows into = {rows, counts, bytes};
    memset(rows, 0, (size_t)m * bytes);
    for (uint32_t j = 0; j < k; j++)
        lc_rs_add(lc_gf_of(simd), &into, NULL, m, j, packets + (size_t)j * bytes, bytes, 0);
    return LC_OK;
}
