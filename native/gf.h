/* Arithmetic in the field GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11D), which is
 * isa-l's. A sum is XOR. It knows no packets.
 *
 * All variants of the instruction set give the same bytes. Every pointer may be unaligned. */
#ifndef LC_GF_H
#define LC_GF_H

#include "lossycoll.h"

typedef struct {
    const char *name;
    /* Bytes of one row that mad multiplies and adds in a second on one core, roughly: for choices,
     * not for claims (tests/native/bench_gf.c measures it). */
    double row_rate;
    /* into[i] += factors[i] * from, for i < rows, over n bytes. No two buffers overlap. */
    void (*mad)(uint8_t *const *into, const uint8_t *factors, uint32_t rows, const uint8_t *from,
                size_t n);
} lc_gf;

/* The fastest variant of this processor, or with simd 0 that of any. */
const lc_gf *lc_gf_of(int simd);

uint8_t lc_gf_times(uint8_t a, uint8_t b);
/* 1 / a; 0 of 0. */
uint8_t lc_gf_inverse(uint8_t a);

#endif
