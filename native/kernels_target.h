/* The kernels of all dtypes for one instruction set; kernels.c includes this once for each, with
 *   TARGET        the function attribute that allows the instructions
 *   VARIANT       the suffix of the names
 *   VECTOR_BYTES  the width of a register
 *   WIDEN_F16(v), NARROW_F16(v)  conversions of a register, where the hardware has them.
 *
 * Vectors are the compiler's own vector types rather than loops left to auto-vectorization, since
 * that gives up at -O2, and falls back to scalars when out and acc are the same buffer.
 */
#define NAME(name) JOIN2(name, VARIANT)
#define INLINE     TARGET static inline __attribute__((always_inline))

typedef float NAME(vf32) __attribute__((vector_size(VECTOR_BYTES)));
typedef double NAME(vf64) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(vu32) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t NAME(vu16) __attribute__((vector_size(VECTOR_BYTES / 2)));

#define VF32 NAME(vf32)
#define VF64 NAME(vf64)
#define VU32 NAME(vu32)
#define VU16 NAME(vu16)

/* Lanes where mask is all ones come from a, the others from b. */
INLINE VU32 NAME(choose)(VU32 mask, VU32 a, VU32 b) {
    return (mask & a) | (~mask & b);
}

/* ---- fp16 ---- */

#ifdef WIDEN_F16
INLINE VF32 NAME(widen_f16)(VU16 half) {
    return WIDEN_F16(half);
}
INLINE VU16 NAME(narrow_f16)(VF32 x) {
    return NARROW_F16(x);
}
#else
/* Every lane takes all three ways (normal, subnormal, inf or NaN), and one is chosen. */
INLINE VF32 NAME(widen_f16)(VU16 half) {
    VU32 h = __builtin_convertvector(half, VU32);
    VU32 sign = (h & 0x8000u) << 16, rest = (h & 0x7FFFu) << 13;
    VU32 normal = rest + (112u << 23);
    /* 2^-14 * (1 + fraction) - 2^-14, which is exact and never makes an fp32 subnormal. */
    VF32 smallest = (VF32)((VU32){0} + (113u << 23));
    VU32 subnormal = (VU32)((VF32)(normal + (1u << 23)) - smallest);
    VU32 nan = (VU32)(rest > (31u << 23)) & 0x400000u; /* made quiet, as hardware does */
    VU32 special = (rest + (224u << 23)) | nan;
    VU32 bits = NAME(choose)((VU32)(rest >= (31u << 23)), special, normal);
    bits = NAME(choose)((VU32)(rest < (1u << 23)), subnormal, bits);
    return (VF32)(bits | sign);
}

INLINE VU16 NAME(narrow_f16)(VF32 x) {
    VU32 sign = (VU32)x & 0x80000000u, rest = (VU32)x ^ sign;
    VU32 odd = (rest >> 13) & 1;
    VU32 normal = (rest - (112u << 23) + 0xFFFu + odd) >> 13;
    /* Adding 1/2 leaves an ulp of 2^-24, fp16's least subnormal, and lets the adder round. */
    VU32 half_bits = (VU32){0} + (126u << 23);
    VU32 subnormal = (VU32)((VF32)rest + (VF32)half_bits) - half_bits;
    VU32 nan = ((rest >> 13) & 0x3FFu) | 0x200u;
    VU32 special = 0x7C00u | ((VU32)(rest > (255u << 23)) & nan);
    VU32 bits = NAME(choose)((VU32)(rest >= (143u << 23)), special, normal);
    bits = NAME(choose)((VU32)(rest < (113u << 23)), subnormal, bits);
    return __builtin_convertvector(bits | sign >> 16, VU16);
}
#endif

/* ---- bf16: the upper half of an fp32 ---- */

INLINE VF32 NAME(widen_bf16)(VU16 half) {
    return (VF32)(__builtin_convertvector(half, VU32) << 16);
}

INLINE VU16 NAME(narrow_bf16)(VF32 x) {
    VU32 bits = (VU32)x;
    VU32 rounded = bits + 0x7FFFu + ((bits >> 16) & 1);
    VU32 nan = bits | 0x400000u; /* rounding could carry a NaN over to inf or zero */
    bits = NAME(choose)((VU32)(x != x), nan, rounded);
    return __builtin_convertvector(bits >> 16, VU16);
}

/* ---- the kernels ---- */

#define DTYPE        f32
#define VECTOR       VF32
#define SCALAR       float
#define WIRE_VECTOR  VF32
#define FROM_WIRE(v) (v)
#define TO_WIRE(v)   (v)
#include "kernels_dtype.h"

#define DTYPE        f64
#define VECTOR       VF64
#define SCALAR       double
#define WIRE_VECTOR  VF64
#define FROM_WIRE(v) (v)
#define TO_WIRE(v)   (v)
#include "kernels_dtype.h"

#define DTYPE        f16
#define VECTOR       VF32
#define SCALAR       float
#define WIRE_VECTOR  VU16
#define FROM_WIRE(v) NAME(widen_f16)(v)
#define TO_WIRE(v)   NAME(narrow_f16)(v)
#include "kernels_dtype.h"

#define DTYPE        bf16
#define VECTOR       VF32
#define SCALAR       float
#define WIRE_VECTOR  VU16
#define FROM_WIRE(v) NAME(widen_bf16)(v)
#define TO_WIRE(v)   NAME(narrow_bf16)(v)
#include "kernels_dtype.h"

static const lc_kernels *const NAME(kernels)[] = {
    [LC_F32] = &JOIN3(kernels, f32, VARIANT),
    [LC_F64] = &JOIN3(kernels, f64, VARIANT),
    [LC_F16] = &JOIN3(kernels, f16, VARIANT),
    [LC_BF16] = &JOIN3(kernels, bf16, VARIANT),
};

#undef VF32
#undef VF64
#undef VU32
#undef VU16
#undef INLINE
#undef TARGET
#undef NAME
#undef VARIANT
#undef VECTOR_BYTES
#undef WIDEN_F16
#undef NARROW_F16
