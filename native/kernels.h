/* Arithmetic on vectors of elements, for codec.c; it knows no packets. acc is float for LC_F16 and
 * LC_BF16, double for LC_F64, float for LC_F32; all other pointers are of the wire type. Every
 * pointer may be unaligned. n counts elements.
 *
 * All variants give the same bits: one rounding to nearest even per operation, factors rounded to
 * the accumulator's type first, NaNs kept. Buffers overlap not at all or, where
 * a kernel allows it, wholly. */
#ifndef LC_KERNELS_H
#define LC_KERNELS_H

#include "lossycoll.h"

typedef struct {
    uint32_t element_bytes; /* on the wire */
    uint32_t acc_bytes;     /* of one accumulator */
    /* acc = own + x; own may be NULL: acc = x. acc may be own where the types are the same. */
    void (*first)(void *acc, const void *own, const void *x, size_t n);
    /* acc += x */
    void (*add)(void *acc, const void *x, size_t n);
    /* first with x * factor for x, and add; a product is rounded before it is added. */
    void (*first_weighted)(void *acc, const void *own, const void *x, double factor, size_t n);
    void (*add_weighted)(void *acc, const void *x, double factor, size_t n);
    /* out = acc * factor; out may be acc where the types are the same. */
    void (*finish)(void *out, const void *acc, size_t n, double factor);
    /* out = own * own_factor + acc * acc_factor; acc NULL: out = own * own_factor. out may be own
     * or acc. */
    void (*blend)(void *out, const void *own, double own_factor, const void *acc, double acc_factor,
                  size_t n);
} lc_kernels;

/* NULL for LC_BYTES, which is never summed, and for unknown types. */
const lc_kernels *lc_kernels_of(int dtype, int simd);
/* Bytes of one element; 0 for unknown types. */
uint32_t lc_element_bytes(int dtype);
/* The name of the variant that simd=1 selects on this processor: "avx512", "avx2", "plain". */
const char *lc_simd_name(void);

#endif
