/* Codecs; see codec.h. The arithmetic and the conversions are those of kernels.h, so that every
 * variant is tested once. */
#include "codec.h"

#include <string.h>

#include "float_mode.h"

/* ---- same: elements travel as they are ---- */

static size_t same_bytes(const lc_codec *c, size_t n) {
    return n * c->element_bytes;
}

static uint32_t same_encode(const lc_codec *c, void *dst, const void *src, size_t n, double factor,
                            uint64_t seed) {
    (void)factor; /* 1: what lies in memory as it travels is divided there */
    (void)seed;
    memcpy(dst, src, n * c->element_bytes);
    return 0;
}

static void same_decode(const lc_codec *c, void *dst, const void *src, size_t n) {
    memcpy(dst, src, n * c->element_bytes);
}

static void same_first(const lc_codec *c, void *acc, const void *own, const void *x, size_t n) {
    c->wire->first(acc, own, x, n);
}

static void same_first_weighted(const lc_codec *c, void *acc, const void *own, const void *x,
                                double factor, size_t n) {
    c->wire->first_weighted(acc, own, x, factor, n);
}

static void same_add(const lc_codec *c, void *acc, const void *x, size_t n) {
    c->wire->add(acc, x, n);
}

static void same_add_weighted(const lc_codec *c, void *acc, const void *x, double factor,
                              size_t n) {
    c->wire->add_weighted(acc, x, factor, n);
}

/* ---- narrow: float32 travels as a float of two bytes ---- */

static size_t narrow_bytes(const lc_codec *c, size_t n) {
    return n * c->wire->element_bytes;
}

static uint32_t narrow_encode(const lc_codec *c, void *dst, const void *src, size_t n,
                              double factor, uint64_t seed) {
    (void)seed;
    c->wire->finish(dst, src, n, factor);
    return 0;
}

static void narrow_decode(const lc_codec *c, void *dst, const void *src, size_t n) {
    c->wire->first(dst, NULL, src, n);
}

/* The kernels take an own addend of the type that travels. */
static void narrow_first(const lc_codec *c, void *acc, const void *own, const void *x, size_t n) {
    if (!own) {
        c->wire->first(acc, NULL, x, n);
        return;
    }
    if (acc != own)
        memcpy(acc, own, n * c->acc_bytes);
    c->wire->add(acc, x, n);
}

static void narrow_first_weighted(const lc_codec *c, void *acc, const void *own, const void *x,
                                  double factor, size_t n) {
    if (!own) {
        c->wire->first_weighted(acc, NULL, x, factor, n);
        return;
    }
    if (acc != own)
        memcpy(acc, own, n * c->acc_bytes);
    c->wire->add_weighted(acc, x, factor, n);
}

/* ---- low: float32 travels in indices of a few bits ---- */

static size_t low_bytes(const lc_codec *c, size_t n) {
    return lc_lowbit_bytes(&c->low, n);
}

static uint32_t low_encode(const lc_codec *c, void *dst, const void *src, size_t n, double factor,
                           uint64_t seed) {
    (void)factor; /* 1: nothing travels divided */
    return lc_lowbit_encode(&c->low, dst, src, n, seed);
}

static void low_decode(const lc_codec *c, void *dst, const void *src, size_t n) {
    lc_lowbit_packet p = lc_lowbit_packet_of(&c->low, src, n);
    for (size_t at = 0; at < n;)
        at += lc_lowbit_decode(&c->low, &p, at, (char *)dst + at * sizeof(float));
}

static void low_first_weighted(const lc_codec *c, void *acc, const void *own, const void *x,
                               double factor, size_t n) {
    float part[LC_LOWBIT_CHUNK];
    lc_lowbit_packet p = lc_lowbit_packet_of(&c->low, x, n);
    for (size_t at = 0, here; at < n; at += here) {
        here = lc_lowbit_decode(&c->low, &p, at, (char *)part);
        const char *mine = own ? (const char *)own + at * sizeof(float) : NULL;
        c->sums->first_weighted((char *)acc + at * sizeof(float), mine, part, factor, here);
    }
}

static void low_first(const lc_codec *c, void *acc, const void *own, const void *x, size_t n) {
    low_first_weighted(c, acc, own, x, 1.0, n);
}

static void low_add(const lc_codec *c, void *acc, const void *x, size_t n) {
    low_first_weighted(c, acc, acc, x, 1.0, n);
}

static void low_add_weighted(const lc_codec *c, void *acc, const void *x, double factor, size_t n) {
    low_first_weighted(c, acc, acc, x, factor, n);
}

/* ---- the table ---- */

static const lc_codec same = {.same = 1,
                              .wire_bytes = same_bytes,
                              .encode = same_encode,
                              .decode = same_decode,
                              .first = same_first,
                              .add = same_add,
                              .first_weighted = same_first_weighted,
                              .add_weighted = same_add_weighted};

static const lc_codec narrow = {.wire_bytes = narrow_bytes,
                                .encode = narrow_encode,
                                .decode = narrow_decode,
                                .first = narrow_first,
                                .add = same_add,
                                .first_weighted = narrow_first_weighted,
                                .add_weighted = same_add_weighted};

static const lc_codec low = {.wire_bytes = low_bytes,
                             .encode = low_encode,
                             .decode = low_decode,
                             .first = low_first,
                             .add = low_add,
                             .first_weighted = low_first_weighted,
                             .add_weighted = low_add_weighted};

static void make_same(lc_codec *c, int dtype, int simd) {
    *c = same;
    c->sums = c->wire = lc_kernels_of(dtype, simd);
    c->element_bytes = lc_element_bytes(dtype);
    c->acc_bytes = c->wire ? c->wire->acc_bytes : c->element_bytes;
    if (!c->wire) {
        c->first = NULL;
        c->add = NULL;
        c->first_weighted = NULL;
        c->add_weighted = NULL;
    }
}

static void make_narrow(lc_codec *c, int wire, int simd) {
    *c = narrow;
    c->sums = lc_kernels_of(LC_F32, simd);
    c->wire = lc_kernels_of(wire, simd);
    c->element_bytes = lc_element_bytes(LC_F32);
    c->acc_bytes = c->wire->acc_bytes;
}

static void make_low(lc_codec *c, unsigned bits, int encoding, int simd) {
    *c = low;
    c->sums = c->wire = lc_kernels_of(LC_F32, simd);
    c->element_bytes = c->acc_bytes = lc_element_bytes(LC_F32);
    c->low = (lc_lowbit_format){
        lc_lowbit_of(simd), (uint8_t)bits, encoding & LC_ENCODING_GROUP_32 ? 32 : LC_LOWBIT_GROUP,
        !!(encoding & LC_ENCODING_SPIKES), !!(encoding & LC_ENCODING_STOCHASTIC)};
}

/* Of one element's index; 0: it has none. */
static unsigned bits_of_index(int encoding) {
    static const uint8_t bits[] = {[LC_ENCODING_INT8] = 8, [LC_ENCODING_INT6] = 6,
                                   [LC_ENCODING_INT5] = 5, [LC_ENCODING_INT4] = 4,
                                   [LC_ENCODING_INT3] = 3, [LC_ENCODING_INT2] = 2};
    unsigned number = (unsigned)encoding & LC_ENCODING_NUMBER;
    if (encoding & ~(LC_ENCODING_NUMBER | LC_ENCODING_GROUP_32 | LC_ENCODING_SPIKES |
                     LC_ENCODING_STOCHASTIC) ||
        number >= sizeof bits)
        return 0;
    return bits[number];
}

int lc_codec_make(lc_codec *c, int encoding, int dtype, int simd) {
    if (!lc_element_bytes(dtype))
        return 0;
    unsigned bits = bits_of_index(encoding);
    if (bits && dtype == LC_F32)
        make_low(c, bits, encoding, simd);
    else if (encoding == LC_ENCODING_SAME)
        make_same(c, dtype, simd);
    else if (encoding == LC_ENCODING_BF16 && dtype == LC_F32)
        make_narrow(c, LC_BF16, simd);
    else if (encoding == LC_ENCODING_F16 && dtype == LC_F32)
        make_narrow(c, LC_F16, simd);
    else
        return 0;
    c->encoding = (uint8_t)(encoding & LC_ENCODING_NUMBER);
    c->dtype = (uint8_t)dtype;
    c->holds_divided = dtype == LC_F16;
    c->divides = c->holds_divided || encoding == LC_ENCODING_F16;
    return 1;
}

uint32_t lc_codec_elements(const lc_codec *c, uint16_t payload_bytes) {
    uint32_t fit = 0, beyond = 8u * payload_bytes + 1; /* an element takes a bit at least */
    while (beyond - fit > 1) {
        uint32_t n = fit + (beyond - fit) / 2;
        if (c->wire_bytes(c, n) <= payload_bytes)
            fit = n;
        else
            beyond = n;
    }
    uint32_t group = c->low.group;
    return group && fit > group ? fit - fit % group : fit;
}

/* ---- for callers that have no codec in hand ---- */

uint32_t lc_encoding_elements(int encoding, int dtype, uint16_t payload_bytes) {
    lc_codec c;
    return lc_codec_make(&c, encoding, dtype, 0) ? lc_codec_elements(&c, payload_bytes) : 0;
}

uint64_t lc_encoding_bytes(int encoding, int dtype, uint32_t n) {
    lc_codec c;
    return lc_codec_make(&c, encoding, dtype, 0) ? c.wire_bytes(&c, n) : 0;
}

int lc_encode(int encoding, int dtype, int simd, void *dst, const void *src, uint32_t n,
              uint64_t seed) {
    lc_codec c;
    if (!lc_codec_make(&c, encoding, dtype, simd))
        return LC_E_ARGUMENT;
    uint64_t floats = lc_floats_exact();
    (void)c.encode(&c, dst, src, n, 1.0, seed);
    lc_floats_as_before(floats);
    return LC_OK;
}

int lc_decode(int encoding, int dtype, int simd, void *dst, const void *src, uint32_t n) {
    lc_codec c;
    if (!lc_codec_make(&c, encoding, dtype, simd))
        return LC_E_ARGUMENT;
    uint64_t floats = lc_floats_exact();
    c.decode(&c, dst, src, n);
    lc_floats_as_before(floats);
    return LC_OK;
}

int lc_decode_add(int encoding, int dtype, int simd, void *acc, const void *own, const void *x,
                  double factor, uint32_t n) {
    lc_codec c;
    if (!lc_codec_make(&c, encoding, dtype, simd) || !c.add)
        return LC_E_ARGUMENT;
    uint64_t floats = lc_floats_exact();
    c.first_weighted(&c, acc, own, x, factor, n);
    lc_floats_as_before(floats);
    return LC_OK;
}
