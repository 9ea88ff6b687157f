/* Small floats as they are defined, to compare conversions with, and floats to convert. */
#ifndef LC_SMALL_FLOATS_H
#define LC_SMALL_FLOATS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static uint64_t state = 1;

static inline uint32_t random32(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* ---- fp16 and bf16 by their definition, in double ---- */

typedef struct {
    int fraction_bits, min_exponent, infinity;
} format;

static const format half = {10, -14, 0x7C00}, brain = {7, -126, 0x7F80};

static inline float decode(format f, uint16_t bits) {
    int magnitude = bits & 0x7FFF, fraction = magnitude & ((1 << f.fraction_bits) - 1);
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    if (magnitude > f.infinity) /* bf16 is kept as it is, fp16 made quiet */
        return float_of(sign | 0x7F800000u | (uint32_t)fraction << (23 - f.fraction_bits) |
                        (f.fraction_bits == 10 ? 0x400000u : 0));
    double x = INFINITY;
    if (magnitude < 1 << f.fraction_bits)
        x = ldexp(fraction, f.min_exponent - f.fraction_bits);
    else if (magnitude < f.infinity)
        x = ldexp(fraction + (1 << f.fraction_bits),
                  (magnitude >> f.fraction_bits) - 1 + f.min_exponent - f.fraction_bits);
    return float_of(bits_of((float)x) | sign);
}

static inline uint16_t encode(format f, float x) {
    uint16_t sign = (uint16_t)(bits_of(x) >> 16 & 0x8000);
    int fraction = (int)(bits_of(x) >> (23 - f.fraction_bits)) & ((1 << f.fraction_bits) - 1);
    if (isnan(x))
        return (uint16_t)(sign | f.infinity | fraction | 1 << (f.fraction_bits - 1));
    if (isinf(x))
        return (uint16_t)(sign | f.infinity);
    double size = fabs((double)x);
    int exponent = size > 0 && ilogb(size) > f.min_exponent ? ilogb(size) : f.min_exponent;
    double units = nearbyint(ldexp(size, f.fraction_bits - exponent)); /* ties to even */
    int bits = (exponent - f.min_exponent) * (1 << f.fraction_bits) + (int)units;
    return (uint16_t)(sign | (bits < f.infinity ? bits : f.infinity));
}

/* Mostly numbers of training's size; some of every kind there is. */
static inline float random_value(void) {
    static const float special[] = {0.0f,   -0.0f, INFINITY, -INFINITY, NAN,    1e-45f, -1e-40f,
                                    6e-8f,  3e-8f, 65504.0f, 65520.0f,  1e30f,  -3e38f, 6.1e-5f,
                                    1e-38f, 1.0f,  2048.5f,  -65519.0f, 3.4e38f};
    uint32_t r = random32();
    if (r % 8 == 0)
        return special[random32() % (sizeof special / sizeof *special)];
    if (r % 8 == 1)
        return float_of(random32());
    return ((float)random32() / 4294967296.0f - 0.5f) * 8;
}

#endif
