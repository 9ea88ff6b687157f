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
    for (size_t i = 0; i < n; i += 8, plane += width) {
        uint64_t w = 0, before = 0;
        memcpy(&w, plane, n - i < 8 ? lc_plane_bytes(n - i, width) : width);
        if (shift)
            memcpy(&before, indices + i, 8);
        w = before | lc_scatter_bits(w, width) << shift;
        memcpy(indices + i, &w, 8);
    }
}

#undef EACH_BYTE

#endif
