/* Reed-Solomon parity of a set: any e of its rows bring back any e of its packets.
 *
 * Row i of a set is the sum of factor(i, j) times the packet at column j, over the payloads as they
 * travel, shorter ones padded with zeros, and in the same way over the two bytes of their counts.
 * factor(i, j) = a(i, j) a(0, 0) / (a(i, 0) a(0, j)) with a(i, j) = 1 / (x + y), x = i and
 * y = 255 - j: a Cauchy matrix, scaled so that row 0 and column 0 are ones. Row 0 is thus XOR. Rows
 * don't depend on how many there are. tests/oracle/galois.py is the same in numpy. */
#ifndef LC_RS_H
#define LC_RS_H

#include "gf.h"
#include "sets.h"

/* Rows of one set: row i is at rows + i * stride, its count at counts[i]. Which of them are there
 * is for the caller to know. */
typedef struct {
    uint8_t *rows;
    uint16_t *counts;
    size_t stride;
} lc_rs_rows;

/* factor(row, column), row < LC_ROWS_MOST, column < LC_COLUMNS_MOST. */
uint8_t lc_rs_factor(uint32_t row, uint32_t column);

/* Adds a packet of the set to e of its rows: to those named, or to rows 0 to e - 1 where which is
 * NULL. bytes is at most the stride. */
void lc_rs_add(const lc_gf *gf, const lc_rs_rows *rows, const uint8_t *which, uint32_t e,
               uint32_t column, const void *payload, size_t bytes, uint16_t count);
/* Adds a parity packet to its row. */
void lc_rs_add_row(const lc_gf *gf, const lc_rs_rows *rows, uint32_t row, const void *payload,
                   size_t bytes, uint16_t count);

/* What brings packets back: packet `columns[j]` is the sum over i < e of inverse[i * e + j] times
 * row rows[i], from which all other packets of the set have been taken. Returns 0 if rows or
 * columns repeat, or are no part of a code; else 1. */
int lc_rs_invert(uint8_t *inverse, const uint8_t *rows, const uint8_t *columns, uint32_t e);

/* Brings back e packets, to packets + j * stride and counts[j], from the rows named, which hold the
 * set's other packets and its parity. inverse: room for e * e bytes. Returns as lc_rs_invert. */
int lc_rs_restore(const lc_gf *gf, const lc_rs_rows *rows, const uint8_t *which,
                  const uint8_t *columns, uint32_t e, size_t bytes, uint8_t *inverse,
                  uint8_t *packets, uint16_t *counts);

#endif
