/* Sets: which packets of a stream a parity packet protects, and the code word that says so.
 *
 * The n data packets of a stream are cut into parity windows of equal size, at most LC_WINDOW
 * packets. A window of w packets has S = ceil(w / k) sets. Its packet i is in set i mod S at column
 * i div S, so neighbours are in different sets. Each set has m rows, its parity packets. Parity
 * packet j of a window is of set j mod S and is its row j div S. On the wire parity packets are
 * numbered from n on, window by window.
 *
 * Arithmetic of numbers alone. tests/oracle/parity.py is the same. docs/parity.md has the
 * reasons. */
#ifndef LC_SETS_H
#define LC_SETS_H

#include "lossycoll.h"

enum {
    LC_WINDOW = 1024,      /* packets of a parity window at most */
    LC_COLUMNS_MOST = 224, /* k */
    LC_ROWS_MOST = 127,    /* m */
    LC_SYMBOLS_MOST = 256, /* k + m */
    LC_SIZES = 16,         /* values of k that a code can say */
};

/* ---- code ----
 * Four bits for k, six for m: 0, 1, ... 31, 34, 37, ... 127. 0: no parity. Two bits more for the
 * rounds of resending make a code word. */

/* The code of sets of up to k packets with m rows; 0 if there is none that says just this. */
uint16_t lc_code(uint32_t k, uint32_t m);
/* Whether a sender may mean it: k + m is at most LC_SYMBOLS_MOST; without parity it is 0. */
int lc_code_valid(uint32_t code);
/* k and m of a valid code; 0 of code 0. */
uint32_t lc_code_k(uint32_t code);
uint32_t lc_code_m(uint32_t code);
/* The k that a code can say, ascending; 0 from LC_SIZES on. */
uint32_t lc_code_size(uint32_t i);
/* The least m that a code can say and is at least so much, and the greatest that is at most so
 * much. */
uint32_t lc_code_rows_up(uint32_t m);
uint32_t lc_code_rows_down(uint32_t m);
/* The code for a stream of n packets where such a share of parity is wanted. Sets of a short
 * stream, or of a window that isn't a multiple of k, have fewer packets than k: m shrinks as well,
 * to no less than 1. */
uint16_t lc_code_fitted(uint16_t code, uint32_t n);

enum { LC_WORD_BITS = 12 };
static inline uint16_t lc_word(uint32_t code, uint32_t rounds) {
    return (uint16_t)(code | rounds << 10);
}
static inline uint16_t lc_word_code(uint32_t word) {
    return word & 0x3FF;
}
static inline uint8_t lc_word_rounds(uint32_t word) {
    return word >> 10 & 3;
}

/* ---- shape ---- */

typedef struct {
    uint32_t n;       /* data packets */
    uint32_t windows; /* 0 without packets or without parity */
    uint32_t window;  /* packets of each; the last may have fewer */
    uint32_t each;    /* sets of each window; the last may have fewer */
    uint32_t sets;    /* of the stream */
    uint32_t parity;  /* parity packets of the stream: sets * m */
    uint16_t k, m;
} lc_shape;

/* Of a packet. Sets are numbered through the stream, so row r of set s may be kept at s * m + r. */
typedef struct {
    uint32_t window, set;
    uint32_t at; /* a data packet's column, a parity packet's row */
} lc_place;

/* code is valid. */
lc_shape lc_shape_of(uint16_t code, uint32_t n);
/* Data packets and sets of a window, and its first data packet. */
uint32_t lc_shape_packets(const lc_shape *shape, uint32_t window);
uint32_t lc_shape_sets(const lc_shape *shape, uint32_t window);
uint32_t lc_shape_first(const lc_shape *shape, uint32_t window);
/* Data packets of a set. */
uint32_t lc_shape_columns(const lc_shape *shape, uint32_t set);
/* Where packet < n belongs, and parity packet n + j; and the other way round. */
lc_place lc_shape_data(const lc_shape *shape, uint32_t packet);
lc_place lc_shape_row(const lc_shape *shape, uint32_t j);
uint32_t lc_shape_packet(const lc_shape *shape, uint32_t set, uint32_t column);
uint32_t lc_shape_parity(const lc_shape *shape, uint32_t set, uint32_t row);

#endif
