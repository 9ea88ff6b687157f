/* Codecs: how the elements of a buffer stand in a packet.
 *
 * A codec knows elements, not packets, streams or peers. What it makes of n elements can be decoded
 * by itself: whatever a codec needs beyond the elements (scales, say) is part of those bytes, so
 * wire_bytes need not be linear in n. Bytes are encoded once; resending, forwarding and parity use
 * the same ones. tests/oracle/codec.py is the same in numpy, to the bit.
 *
 * Sums of encoded elements are always taken in float. All variants of the instruction set give the
 * same bits, as in kernels.h. Every pointer may be unaligned. Buffers overlap not at all, except
 * that acc may be own where both have the same type. */
#ifndef LC_CODEC_H
#define LC_CODEC_H

#include "kernels.h"
#include "lowbit.h"

typedef struct lc_codec lc_codec;

/* Made by lc_codec_make and constant from then on; any thread may use it. */
struct lc_codec {
    uint8_t encoding;       /* lc_encoding, without its parameters */
    uint8_t dtype;          /* lc_dtype of the buffers' elements */
    uint8_t same;           /* an element in a packet is an element in memory: nothing to encode */
    uint8_t divides;        /* partial sums travel divided (lc_partial_divisor), */
    uint8_t holds_divided;  /* and lie so in memory: its elements are of the type that travels */
    uint32_t element_bytes; /* in buffers */
    uint32_t acc_bytes;     /* of one accumulator */
    const lc_kernels *sums; /* of dtype: what finishes a sum. NULL for LC_BYTES */
    const lc_kernels *wire; /* of the float type that travels; NULL for LC_BYTES */
    lc_lowbit_format low;   /* of indices of a few bits */

    /* Bytes of n elements in one packet; grows with n. */
    size_t (*wire_bytes)(const lc_codec *c, size_t n);
    /* Of src * factor. seed: of the packet's name; for codecs that round at random. Returns how
     * many groups of few bits became NaN as a whole. */
    uint32_t (*encode)(const lc_codec *c, void *dst, const void *src, size_t n, double factor,
                       uint64_t seed);
    void (*decode)(const lc_codec *c, void *dst, const void *src, size_t n);
    /* Sums, with x as it stands in a packet; lc_kernels says what each does. own is of dtype.
     * NULL for LC_BYTES. */
    void (*first)(const lc_codec *c, void *acc, const void *own, const void *x, size_t n);
    void (*add)(const lc_codec *c, void *acc, const void *x, size_t n);
    void (*first_weighted)(const lc_codec *c, void *acc, const void *own, const void *x,
                           double factor, size_t n);
    void (*add_weighted)(const lc_codec *c, void *acc, const void *x, double factor, size_t n);
};

/* encoding: lc_encoding, with its parameters. Returns whether elements of this type can be encoded
 * in this way; *codec is valid only then. */
int lc_codec_make(lc_codec *codec, int encoding, int dtype, int simd);
/* By what a partial sum of so many contributions is divided on its way. A sum may exceed what
 * float16 holds although each contribution fits: divided, it is no larger than the largest of them.
 * A power of two rounds nothing. */
static inline double lc_partial_divisor(const lc_codec *codec, uint32_t weight) {
    uint32_t divisor = 1;
    while (codec->divides && divisor < weight)
        divisor *= 2;
    return divisor;
}
/* The same for a partial sum in memory. */
static inline double lc_held_divisor(const lc_codec *codec, uint32_t weight) {
    return codec->holds_divided ? lc_partial_divisor(codec, weight) : 1.0;
}
/* The most elements that fit into a packet's payload; in whole groups, where one fits: so packets
 * of several sizes have the same groups. */
uint32_t lc_codec_elements(const lc_codec *codec, uint16_t payload_bytes);

#endif
