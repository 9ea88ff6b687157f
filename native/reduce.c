/* Sums of packets; see reduce.h for the contract and reduce_target.h for the loops. */
#include "reduce.h"

#include <string.h>

/* The variants must agree bit for bit, so no target may fuse a multiplication with an addition.
 * Clang is told here; gcc does not know this pragma, and does not fuse under -std=c11. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#define JOIN2_(a, b)    a##_##b
#define JOIN2(a, b)     JOIN2_(a, b)
#define JOIN3_(a, b, c) a##_##b##_##c
#define JOIN3(a, b, c)  JOIN3_(a, b, c)

#define TARGET
#define VARIANT      plain
#define VECTOR_BYTES 16
#include "reduce_target.h"

enum variant { PLAIN, N_VARIANTS };

static const lc_kernels *const *const kernels[N_VARIANTS] = {[PLAIN] = kernels_plain};

static enum variant best_variant(void) {
    return PLAIN;
}

const lc_kernels *lc_kernels_of(int dtype, int simd) {
    if (dtype < LC_F32 || dtype > LC_BF16)
        return NULL;
    return kernels[simd ? best_variant() : PLAIN][dtype];
}

uint32_t lc_element_bytes(int dtype) {
    static const uint8_t bytes[] = {
        [LC_F32] = 4, [LC_F64] = 8, [LC_F16] = 2, [LC_BF16] = 2, [LC_BYTES] = 1};
    return dtype < LC_F32 || dtype > LC_BYTES ? 0 : bytes[dtype];
}

const char *lc_simd_name(void) {
    static const char *const names[N_VARIANTS] = {[PLAIN] = "plain"};
    return names[best_variant()];
}
