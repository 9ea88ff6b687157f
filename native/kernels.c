/* Which kernels this processor runs; see kernels.h for the contract and kernels_target.h for the
 * loops. */
#include "kernels.h"

#include <string.h>

#include "variants.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TARGET
#define VARIANT      plain
#define VECTOR_BYTES 16
#include "kernels_target.h"

#if defined(__x86_64__)
/* Register widths are the compiler's to keep within what TARGET allows, whatever flags the build
 * has: nothing here needs -march, and one binary serves every processor. */
#define TARGET        __attribute__((target("avx2,f16c")))
#define VARIANT       avx2
#define VECTOR_BYTES  32
#define WIDEN_F16(v)  ((VF32)_mm256_cvtph_ps((__m128i)(v)))
#define NARROW_F16(v) ((VU16)_mm256_cvtps_ph((__m256)(v), _MM_FROUND_TO_NEAREST_INT))
#include "kernels_target.h"

#define TARGET        __attribute__((target("avx512f,avx512bw,avx512vl")))
#define VARIANT       avx512
#define VECTOR_BYTES  64
#define WIDEN_F16(v)  ((VF32)_mm512_cvtph_ps((__m256i)(v)))
#define NARROW_F16(v) ((VU16)_mm512_cvtps_ph((__m512)(v), _MM_FROUND_TO_NEAREST_INT))
#include "kernels_target.h"
#elif defined(__aarch64__)
/* What the compiler makes of vectors of 16 bytes is NEON already, but for these two. */
#define TARGET
#define VARIANT       neon
#define VECTOR_BYTES  16
#define WIDEN_F16(v)  ((VF32)vcvt_f32_f16((float16x4_t)(v)))
#define NARROW_F16(v) ((VU16)vcvt_f16_f32((float32x4_t)(v)))
#include "kernels_target.h"
#endif

typedef struct {
    const char *name;
    const lc_kernels *const *kernels; /* indexed by dtype */
    int (*runs)(void);                /* whether this processor and kernel can execute it */
} variant;

static int always(void) {
    return 1;
}

#if defined(__x86_64__)
/* clang 14 cannot ask for f16c by name. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static int runs_avx2(void) {
    return __builtin_cpu_supports("avx2") && has_f16c();
}

static int runs_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

/* Best first; the last runs everywhere. */
static const variant variants[] = {
#if defined(__x86_64__)
    {"avx512", kernels_avx512, runs_avx512},
    {"avx2", kernels_avx2, runs_avx2},
#elif defined(__aarch64__)
    {"neon", kernels_neon, always},
#endif
    {"plain", kernels_plain, always},
};

enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

static const variant *best;

/* Before main and before any thread, so that the choice needs no lock. */
__attribute__((constructor)) static void choose_best(void) {
    best = variants;
    while (!best->runs())
        best++;
}

const lc_kernels *lc_kernels_of(int dtype, int simd) {
    if (dtype < LC_F32 || dtype > LC_BF16)
        return NULL;
    const variant *v = simd ? best : &variants[N_VARIANTS - 1];
    return v->kernels[dtype];
}

uint32_t lc_element_bytes(int dtype) {
    static const uint8_t bytes[] = {
        [LC_F32] = 4, [LC_F64] = 8, [LC_F16] = 2, [LC_BF16] = 2, [LC_BYTES] = 1};
    return dtype < LC_F32 || dtype > LC_BYTES ? 0 : bytes[dtype];
}

const char *lc_simd_name(void) {
    return best->name;
}
