/* Which arithmetic this processor runs; see gf.h for the contract and gf_target.h for the loop. */
#include "gf.h"

#include <string.h>

#include "variants.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { POLYNOMIAL = 0x11D, ROWS_OF_PASS = 4, ONES_AT = 64 };

static uint8_t powers[2 * 255]; /* of the generator 2; twice, so that two logarithms may be added */
static uint8_t logs[256];       /* of 0: none */
static uint8_t zeros_then_ones[2 * ONES_AT];
static uint8_t nibbles[256][32]; /* by factor: its products with 0 .. 15, and with 0, 16, .. 240 */
#if defined(__x86_64__)
static uint64_t matrices[256]; /* by factor: multiplication as a matrix of bits */
#endif

uint8_t lc_gf_times(uint8_t a, uint8_t b) {
    return a && b ? powers[logs[a] + logs[b]] : 0;
}

uint8_t lc_gf_inverse(uint8_t a) {
    return a ? powers[255 - logs[a]] : 0;
}

/* Eight bytes at a time, which the compiler makes wider; the vectors must not overlap. */
static void add_bytes(uint8_t *restrict into, const uint8_t *restrict from, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t a, b;
        memcpy(&a, into + i, 8);
        memcpy(&b, from + i, 8);
        a ^= b;
        memcpy(into + i, &a, 8);
    }
    for (; i < n; i++)
        into[i] ^= from[i];
}

/* ---- anywhere: the compiler's vectors ---- */

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t signed16 __attribute__((vector_size(16)));
/* The source times 1, 2, 4, ... 128; and for each bit of the factor, whether that power counts. */
typedef struct {
    bytes16 bit[8];
} bits16;

static inline __attribute__((always_inline)) bits16 powers_of(bytes16 v) {
    bits16 of;
    for (int b = 0; b < 8; b++) {
        of.bit[b] = v;
        bytes16 carry = (bytes16)((signed16)v < 0);
        v = (v + v) ^ (carry & (uint8_t)(POLYNOMIAL & 255));
    }
    return of;
}

static inline __attribute__((always_inline)) bits16 masks_of(uint8_t factor) {
    bits16 of;
    for (int b = 0; b < 8; b++)
        of.bit[b] = (bytes16){0} - (uint8_t)(factor >> b & 1);
    return of;
}

static inline __attribute__((always_inline)) bytes16 product_of(const bits16 *v, const bits16 *by) {
    bytes16 sum = v->bit[0] & by->bit[0];
    for (int b = 1; b < 8; b++)
        sum ^= v->bit[b] & by->bit[b];
    return sum;
}

#define TARGET
#define VARIANT                plain
#define VECTOR                 bytes16
#define VECTOR_BYTES           16
#define FACTOR                 bits16
#define SPLIT                  bits16
#define FACTOR_OF(c)           masks_of(c)
#define SPLIT_OF(v)            powers_of(v)
#define PRODUCT(split, factor) product_of(&(split), &(factor))
#include "gf_target.h"

#if defined(__x86_64__)
/* ---- AVX2: a byte's product is the sum of its nibbles' products, which a shuffle looks up ---- */

typedef struct {
    __m256i low, high;
} nibbles32;

#define INLINE_AVX2 __attribute__((target("avx2"), always_inline)) static inline

INLINE_AVX2 nibbles32 tables_of(uint8_t factor) {
    const __m128i *table = (const __m128i *)nibbles[factor];
    return (nibbles32){_mm256_broadcastsi128_si256(_mm_loadu_si128(table)),
                       _mm256_broadcastsi128_si256(_mm_loadu_si128(table + 1))};
}

INLINE_AVX2 nibbles32 nibbles_of(__m256i v) {
    __m256i low = _mm256_set1_epi8(15);
    return (nibbles32){v & low, _mm256_srli_epi64(v, 4) & low};
}

INLINE_AVX2 __m256i looked_up(nibbles32 v, nibbles32 by) {
    return _mm256_shuffle_epi8(by.low, v.low) ^ _mm256_shuffle_epi8(by.high, v.high);
}

#define TARGET                 __attribute__((target("avx2")))
#define VARIANT                avx2
#define VECTOR                 __m256i
#define VECTOR_BYTES           32
#define FACTOR                 nibbles32
#define SPLIT                  nibbles32
#define FACTOR_OF(c)           tables_of(c)
#define SPLIT_OF(v)            nibbles_of(v)
#define PRODUCT(split, factor) looked_up(split, factor)
#include "gf_target.h"

/* ---- GFNI: an instruction multiplies each byte by a matrix of bits. Its other instruction,
 * gf2p8mulb, has a field of its own (0x11B). ---- */

#define TARGET                 __attribute__((target("gfni,avx2")))
#define VARIANT                gfni
#define VECTOR                 __m256i
#define VECTOR_BYTES           32
#define FACTOR                 __m256i
#define SPLIT                  __m256i
#define FACTOR_OF(c)           _mm256_set1_epi64x((long long)matrices[c])
#define SPLIT_OF(v)            (v)
#define PRODUCT(split, factor) _mm256_gf2p8affine_epi64_epi8(split, factor, 0)
#include "gf_target.h"

#define TARGET                 __attribute__((target("gfni,avx512f,avx512bw")))
#define VARIANT                gfni512
#define VECTOR                 __m512i
#define VECTOR_BYTES           64
#define FACTOR                 __m512i
#define SPLIT                  __m512i
#define FACTOR_OF(c)           _mm512_set1_epi64((long long)matrices[c])
#define SPLIT_OF(v)            (v)
#define PRODUCT(split, factor) _mm512_gf2p8affine_epi64_epi8(split, factor, 0)
#include "gf_target.h"

static int runs_avx2(void) {
    return __builtin_cpu_supports("avx2");
}

/* Asked of the processor itself: not every compiler knows the name. */
static int has_gfni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & 1u << 8);
}

static int runs_gfni(void) {
    return runs_avx2() && has_gfni();
}

static int runs_gfni512(void) {
    return has_gfni() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}
#elif defined(__aarch64__)
/* ---- NEON, which every aarch64 has: the same tables of nibbles ---- */

typedef struct {
    uint8x16_t low, high;
} nibbles16;

static inline __attribute__((always_inline)) nibbles16 tables_of(uint8_t factor) {
    return (nibbles16){vld1q_u8(nibbles[factor]), vld1q_u8(nibbles[factor] + 16)};
}

static inline __attribute__((always_inline)) nibbles16 nibbles_of(uint8x16_t v) {
    return (nibbles16){v & 15, vshrq_n_u8(v, 4)};
}

static inline __attribute__((always_inline)) uint8x16_t looked_up(nibbles16 v, nibbles16 by) {
    return vqtbl1q_u8(by.low, v.low) ^ vqtbl1q_u8(by.high, v.high);
}

#define TARGET
#define VARIANT                neon
#define VECTOR                 uint8x16_t
#define VECTOR_BYTES           16
#define FACTOR                 nibbles16
#define SPLIT                  nibbles16
#define FACTOR_OF(c)           tables_of(c)
#define SPLIT_OF(v)            nibbles_of(v)
#define PRODUCT(split, factor) looked_up(split, factor)
#include "gf_target.h"
#endif

static int always(void) {
    return 1;
}

typedef struct {
    lc_gf field;
    int (*runs)(void); /* whether this processor and kernel can execute it */
} variant;

/* Best first; the last runs everywhere. */
static const variant variants[] = {
#if defined(__x86_64__)
    {{"gfni512", 40e9, mad_gfni512}, runs_gfni512},
    {{"gfni", 40e9, mad_gfni}, runs_gfni},
    {{"avx2", 30e9, mad_avx2}, runs_avx2},
#elif defined(__aarch64__)
    {{"neon", 10e9, mad_neon}, always}, /* a guess: nobody has measured it */
#endif
    {{"plain", 4e9, mad_plain}, always},
};

enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

static const variant *best;

static void fill_tables(void) {
    unsigned power = 1;
    for (unsigned i = 0; i < 255; i++) {
        powers[i] = powers[i + 255] = (uint8_t)power;
        logs[power] = (uint8_t)i;
        power <<= 1;
        power ^= power >> 8 ? POLYNOMIAL : 0;
    }
    memset(zeros_then_ones + ONES_AT, 255, ONES_AT);
    for (unsigned c = 0; c < 256; c++) {
        for (unsigned i = 0; i < 16; i++) {
            nibbles[c][i] = lc_gf_times((uint8_t)c, (uint8_t)i);
            nibbles[c][i + 16] = lc_gf_times((uint8_t)c, (uint8_t)(i << 4));
        }
#if defined(__x86_64__)
        for (unsigned out = 0; out < 8; out++) /* its row is the byte 7 - out */
            for (unsigned in = 0; in < 8; in++)
                if (lc_gf_times((uint8_t)c, (uint8_t)(1u << in)) >> out & 1)
                    matrices[c] |= 1ull << ((7 - out) * 8 + in);
#endif
    }
}

/* Before main and before any thread, so that it needs no lock; and before other constructors, which
 * compute in the field. */
__attribute__((constructor(101))) static void prepare(void) {
    fill_tables();
    best = variants;
    while (!best->runs())
        best++;
}

const lc_gf *lc_gf_of(int simd) {
    return simd ? &best->field : &variants[N_VARIANTS - 1].field;
}
