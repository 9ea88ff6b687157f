/* Indices of one byte each into planes and back. A plane has some bits of each index, packed; the
 * first element has the lowest bits of a byte. Eight indices at a time are one word, whatever the
 * width: all machines that are supported are little-endian. */
#ifndef LC_LOWBIT_PLANES_H
#define LC_LOWBIT_PLANES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EACH_BYTE 0x0101010101010101u

/* The low `width` bits of eight bytes, of which the others are 0, as width bytes. */
static inline uint64_t lc_gather_bits(uint64_t w, unsigned width) {
    if (width == 4) {
        w = (w | w >> 4) & 0x00FF00FF00FF00FFu;
        w = (w | w >> 8) & 0x0000FFFF0000FFFFu;
        return (w | w >> 16) & 0xFFFFFFFFu;
    }
    if (width == 2) {
        w = (w | w >> 6) & 0x000F000F000F000Fu;
        w = (w | w >> 12) & 0x000000FF000000FFu;
        return (w | w >> 24) & 0xFFFFu;
    }
    return width == 1 ? w * 0x0102040810204080u >> 56 : w;
}

static inline uint64_t lc_scatter_bits(uint64_t w, unsigned width) {
    if (width == 4) {
        w = (w | w << 16) & 0x0000FFFF0000FFFFu;
        w = (w | w << 8) & 0x00FF00FF00FF00FFu;
        return (w | w << 4) & 0x0F0F0F0F0F0F0F0Fu;
    }
    if (width == 2) {
        w = (w | w << 24) & 0x000000FF000000FFu;
        w = (w | w << 12) & 0x000F000F000F000Fu;
        return (w | w << 6) & 0x0303030303030303u;
    }
    if (width == 1) /* each byte keeps its own bit, which then carries to the top */
        return (((w * EACH_BYTE) & 0x8040201008040201u) + 0x7F * EACH_BYTE) >> 7 & EACH_BYTE;
    return w;
}

/* Bytes of a plane of n indices. */
static inline size_t lc_plane_bytes(size_t n, unsigned width) {
    return (n * width + 7) / 8;
}

/* Of indices that are followed by zeros up to a multiple of eight. */
static inline __attribute__((always_inline)) void
lc_plane_put(uint8_t *plane, const uint8_t *indices, size_t n, unsigned width, unsigned shift) {
    uint64_t w, mask = ((1u << width) - 1) * EACH_BYTE;
    size_t i = 0;
    for (; i + 8 <= n; i += 8, plane += width) {
        memcpy(&w, indices + i, 8);
        w = lc_gather_bits(w >> shift & mask, width);
        memcpy(plane, &w, width);
    }
    if (i == n)
        return;
    memcpy(&w, indices + i, 8);
    w = lc_gather_bits(w >> shift & mask, width);
    memcpy(plane, &w, lc_plane_bytes(n - i, width));
}

/* Adds the plane's bits to indices, which have room for a multiple of eight; sets them if shift is
 * 0.
 */
static inline __attribute__((always_inline)) void
lc_plane_get(uint8_t *indices, const uint8_t *plane, size_t n, unsigned width, unsigned shift) {
    uint64_t w = 0, before = 0;
    size_t i = 0;
    for (; i + 8 <= n; i += 8, plane += width) { /* copies of constant size */
        memcpy(&w, plane, width);
        if (shift)
            memcpy(&before, indices + i, 8);
        w = before | lc_scatter_bits(w, width) << shift;
        memcpy(indices + i, &w, 8);
        w = 0;
    }
    if (i == n)
        return;
    memcpy(&w, plane, lc_plane_bytes(n - i, width));
    if (shift)
        memcpy(&before, indices + i, 8);
    w = before | lc_scatter_bits(w, width) << shift;
    memcpy(indices + i, &w, 8);
}

/* A register at a time: planes of four bits, which hold the low bits of indices, and reading those
 * of two bits and one. */
typedef uint8_t lc_bytes16 __attribute__((vector_size(16)));
typedef uint16_t lc_pairs8 __attribute__((vector_size(16)));
typedef uint32_t lc_quads4 __attribute__((vector_size(16)));

/* GCC has clang's builtin from version 12 on, and this one of its own in all. */
#ifdef __clang__
#define SHUFFLE(kind, a, b, ...) __builtin_shufflevector((kind)(a), (kind)(b), __VA_ARGS__)
#else
#define SHUFFLE(kind, a, b, ...) __builtin_shuffle((kind)(a), (kind)(b), (kind){__VA_ARGS__})
#endif

#define LOW_HALVES(a, b)                                                                           \
    SHUFFLE(lc_bytes16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_HALVES(a, b)                                                                          \
    SHUFFLE(lc_bytes16, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN_BYTES(a, b)                                                                           \
    SHUFFLE(lc_bytes16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define LOW_PAIRS(a, b)  (lc_bytes16) SHUFFLE(lc_pairs8, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_PAIRS(a, b) (lc_bytes16) SHUFFLE(lc_pairs8, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_QUADS(a, b)  (lc_bytes16) SHUFFLE(lc_quads4, a, b, 0, 4, 1, 5)
#define HIGH_QUADS(a, b) (lc_bytes16) SHUFFLE(lc_quads4, a, b, 2, 6, 3, 7)

static inline void lc_nibbles_put(uint8_t *plane, const uint8_t *indices, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        lc_pairs8 a, b;
        memcpy(&a, indices + i, 16);
        memcpy(&b, indices + i + 16, 16);
        a &= 0x0F0F;
        b &= 0x0F0F;
        a |= a >> 4;
        b |= b >> 4;
        lc_bytes16 both = EVEN_BYTES(a, b);
        memcpy(plane + i / 2, &both, 16);
    }
    lc_plane_put(plane + i / 2, indices + i, n - i, 4, 0);
}

static inline void lc_nibbles_get(uint8_t *indices, const uint8_t *plane, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        lc_bytes16 both;
        memcpy(&both, plane + i / 2, 16);
        lc_bytes16 even = both & 15, odd = both >> 4;
        lc_bytes16 first = LOW_HALVES(even, odd), second = HIGH_HALVES(even, odd);
        memcpy(indices + i, &first, 16);
        memcpy(indices + i + 16, &second, 16);
    }
    lc_plane_get(indices + i, plane + i / 2, n - i, 4, 0);
}

/* Adds to what is there, or sets it if shift is 0, as lc_plane_get. */
static inline __attribute__((always_inline)) void lc_add_bits(uint8_t *indices, lc_bytes16 bits,
                                                              unsigned shift) {
    lc_bytes16 before = {0};
    if (shift)
        memcpy(&before, indices, 16);
    before |= bits << shift;
    memcpy(indices, &before, 16);
}

static inline __attribute__((always_inline)) void
lc_crumbs_get(uint8_t *indices, const uint8_t *plane, size_t n, unsigned shift) {
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        lc_bytes16 v;
        memcpy(&v, plane + i / 4, 16);
        lc_bytes16 a = v & 3, b = v >> 2 & 3, c = v >> 4 & 3, d = v >> 6;
        lc_bytes16 ab = LOW_HALVES(a, b), cd = LOW_HALVES(c, d);
        lc_add_bits(indices + i, LOW_PAIRS(ab, cd), shift);
        lc_add_bits(indices + i + 16, HIGH_PAIRS(ab, cd), shift);
        ab = HIGH_HALVES(a, b);
        cd = HIGH_HALVES(c, d);
        lc_add_bits(indices + i + 32, LOW_PAIRS(ab, cd), shift);
        lc_add_bits(indices + i + 48, HIGH_PAIRS(ab, cd), shift);
    }
    lc_plane_get(indices + i, plane + i / 4, n - i, 2, shift);
}

/* The same bits of eight vectors: of one half of their bytes, in the order of the bytes. */
#define ADD_EIGHTHS(HALVES, at)                                                                    \
    do {                                                                                           \
        lc_bytes16 ab = HALVES(b[0], b[1]), cd = HALVES(b[2], b[3]);                               \
        lc_bytes16 ef = HALVES(b[4], b[5]), gh = HALVES(b[6], b[7]);                               \
        lc_bytes16 first = LOW_PAIRS(ab, cd), second = LOW_PAIRS(ef, gh);                          \
        lc_add_bits((at), LOW_QUADS(first, second), shift);                                        \
        lc_add_bits((at) + 16, HIGH_QUADS(first, second), shift);                                  \
        first = HIGH_PAIRS(ab, cd);                                                                \
        second = HIGH_PAIRS(ef, gh);                                                               \
        lc_add_bits((at) + 32, LOW_QUADS(first, second), shift);                                   \
        lc_add_bits((at) + 48, HIGH_QUADS(first, second), shift);                                  \
    } while (0)

static inline
    __attribute__((always_inline)) void lc_bits_get(uint8_t *indices, const uint8_t *plane,
                                                    size_t n, unsigned shift) {
    size_t i = 0;
    for (; i + 128 <= n; i += 128) {
        lc_bytes16 v, b[8];
        memcpy(&v, plane + i / 8, 16);
        for (unsigned j = 0; j < 8; j++)
            b[j] = v >> j & 1;
        ADD_EIGHTHS(LOW_HALVES, indices + i);
        ADD_EIGHTHS(HIGH_HALVES, indices + i + 64);
    }
    lc_plane_get(indices + i, plane + i / 8, n - i, 1, shift);
}

#undef ADD_EIGHTHS
#undef LOW_QUADS
#undef HIGH_QUADS
#undef LOW_HALVES
#undef HIGH_HALVES
#undef LOW_PAIRS
#undef HIGH_PAIRS
#undef EVEN_BYTES
#undef SHUFFLE
#undef EACH_BYTE

#endif
