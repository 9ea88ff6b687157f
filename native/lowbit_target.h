/* The loops over a group's elements for one instruction set; lowbit.c includes this once for each,
 * with
 *   TARGET        the function attribute that allows the instructions
 *   VARIANT       the suffix of the names
 *   VECTOR_BYTES  the width of a register
 *   MIN(a, b), MAX(a, b)  of two registers, and
 *   NARROW(v)     the low bytes of a register's numbers, where the hardware has them
 *
 * n is a multiple of LANES_MOST, so that no register is partial. */
#define NAME(name) JOIN2(name, VARIANT)
#define INLINE     TARGET static inline __attribute__((always_inline))
#define LANES      (VECTOR_BYTES / 4)

typedef float NAME(vf32) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(vu32) __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t NAME(vi32) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t NAME(vu8) __attribute__((vector_size(LANES)));

#define VF32 NAME(vf32)
#define VU32 NAME(vu32)
#define VU8  NAME(vu8)

#ifndef MIN
INLINE VF32 NAME(choose)(VU32 mask, VF32 a, VF32 b) {
    return (VF32)((mask & (VU32)a) | (~mask & (VU32)b));
}
#define MIN(a, b) NAME(choose)((VU32)((a) < (b)), a, b)
#define MAX(a, b) NAME(choose)((VU32)((a) > (b)), a, b)
#endif
#ifdef NARROW
#define NARROWED uint64_t
#else
#define NARROWED  VU8
#define NARROW(v) __builtin_convertvector(v, VU8)
#endif

INLINE VF32 NAME(load)(const char *p) {
    VF32 v;
    memcpy(&v, p, sizeof v);
    return v;
}

TARGET static range NAME(find)(const char *x, size_t n) {
    VF32 low = NAME(load)(x), high = low;
    VU32 special = {0};
    for (size_t i = 0; i < n; i += LANES) {
        VF32 v = NAME(load)(x + 4 * i);
        low = MIN(low, v);
        high = MAX(high, v);
        special |= (VU32)(((VU32)v & INFINITE) == INFINITE);
    }
    range r = {low[0], high[0], 0};
    for (size_t i = 0; i < LANES; i++) {
        r.low = low[i] < r.low ? low[i] : r.low;
        r.high = high[i] > r.high ? high[i] : r.high;
        r.special |= special[i] != 0;
    }
    return r;
}

/* Where elements lie on the grid: 0 to levels, not rounded yet. */
INLINE VF32 NAME(place)(const char *x, const scale *s) {
    VF32 zero = {0}, most = zero + s->levels;
    VF32 t = (s->anchor - NAME(load)(x) * s->first * s->second) * s->inverse;
    return MIN(MAX(t, zero), most);
}

/* To the nearest whole number, which is below 256, halves to even. */
INLINE void NAME(put)(uint8_t *indices, VF32 t) {
    /* Its ulp is 1: the adder rounds, and the low bits are the number. */
    VU32 rounded = (VU32)(t + ROUNDER) & 255u;
    NARROWED bytes = NARROW(rounded);
    memcpy(indices, &bytes, sizeof bytes);
}

TARGET static void NAME(encode)(uint8_t *indices, const char *x, size_t n, const scale *given) {
    const scale s = *given; /* a copy, which a store can't change */
    for (size_t i = 0; i < n; i += LANES)
        NAME(put)(indices + i, NAME(place)(x + 4 * i, &s));
}

/* One of 2^14 numbers, evenly between -1/2 and 1/2. */
INLINE VF32 NAME(draw)(VU32 counters, uint32_t key) {
    VU32 w = (counters ^ counters >> 16) * DRAW_FIRST;
    w ^= key;
    w = (w ^ w >> 15) * DRAW_SECOND;
    w = (w ^ w >> 16) * DRAW_THIRD;
    VF32 whole = __builtin_convertvector((NAME(vi32))(w >> 18), VF32);
    return whole * DRAW_UNIT + DRAW_LEAST;
}

TARGET static void NAME(encode_stochastic)(uint8_t *indices, const char *x, size_t n,
                                           const scale *given, draws from) {
    const scale s = *given;
    VU32 counters;
    for (uint32_t i = 0; i < LANES; i++)
        counters[i] = from.counter + i;
    for (size_t i = 0; i < n; i += LANES, counters += LANES) {
        VF32 v = NAME(load)(x + 4 * i), zero = {0};
        VF32 t = NAME(place)(x + 4 * i, &s);
        /* Ends stay ends: then what a group is decoded to has the same grid. */
        VU32 is_first = (VU32)(v == zero + s.first_end), is_last = (VU32)(v == zero + s.last_end);
        t = (VF32)((is_last & (VU32)(zero + s.levels)) | (~(is_last | is_first) & (VU32)t));
        NAME(put)(indices + i, t + NAME(draw)(counters, from.key));
    }
}

TARGET static void NAME(decode)(char *x, const uint8_t *indices, size_t n, const grid *given) {
    const grid g = *given;
    for (size_t i = 0; i < n; i += LANES) {
        VU8 bytes;
        memcpy(&bytes, indices + i, sizeof bytes);
        VF32 index = __builtin_convertvector(__builtin_convertvector(bytes, NAME(vi32)), VF32);
        VF32 v = (g.anchor - index * g.step) * g.unit;
        memcpy(x + 4 * i, &v, sizeof v);
    }
}

#undef VF32
#undef VU32
#undef VU8
#undef LANES
#undef INLINE
#undef NAME
#undef TARGET
#undef VARIANT
#undef VECTOR_BYTES
#undef MIN
#undef MAX
#undef NARROW
#undef NARROWED
