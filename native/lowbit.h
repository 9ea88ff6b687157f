/* Groups of float32 in indices of a few bits; docs/wire-format.md has it, tests/oracle/lowbit.py
 * the same in numpy, to the bit.
 *
 * All variants of the instruction set give the same bytes. Pointers to floats may be unaligned.
 * Whatever stands in a packet, decoding reads its bytes and writes its elements, and nothing else.
 */
#ifndef LC_LOWBIT_H
#define LC_LOWBIT_H

#include <stddef.h>
#include <stdint.h>

enum { LC_LOWBIT_GROUP = 128 }; /* the largest */

typedef struct lc_lowbit lc_lowbit; /* for one instruction set */

/* How elements become indices: constant for a call. */
typedef struct {
    const lc_lowbit *loops;
    uint8_t bits;       /* of an index: 2, 3, 4, 5, 6 or 8 */
    uint8_t group;      /* elements that share a grid: 32 or 128 */
    uint8_t spikes;     /* the least and the greatest of a group travel as floats */
    uint8_t stochastic; /* indices are rounded up or down, such that their mean is the element */
} lc_lowbit_format;

const lc_lowbit *lc_lowbit_of(int simd);
/* Bytes of n elements in one packet. */
size_t lc_lowbit_bytes(const lc_lowbit_format *f, size_t n);
/* seed: what is drawn, rounding at random. Returns how many groups had a NaN or an infinity, and
 * are NaN now. */
uint32_t lc_lowbit_encode(const lc_lowbit_format *f, uint8_t *dst, const char *src, size_t n,
                          uint64_t seed);

/* Where the parts of a packet lie. */
typedef struct {
    const uint8_t *planes, *anchors, *steps, *exponents;
    const uint8_t *lows, *highs, *low_places, *high_places; /* of spikes */
    size_t n;
} lc_lowbit_packet;

enum { LC_LOWBIT_CHUNK = 1024 }; /* whole groups, of which every plane has whole bytes */

lc_lowbit_packet lc_lowbit_packet_of(const lc_lowbit_format *f, const uint8_t *src, size_t n);
/* The elements of one chunk, from element `at` on; returns how many these are. */
size_t lc_lowbit_decode(const lc_lowbit_format *f, const lc_lowbit_packet *p, size_t at, char *dst);

#endif
