/* The codecs, in every variant that this processor runs, against the floats' definitions, bit for
 * bit. Sums are compared as in test_kernels.c: a NaN only needs to be one. */
#include "check.h"

/* All variants are tested, not only the one that is selected. */
#include "../../native/codec.c"
#include "../../native/kernels.c"
#include "small_floats.h"

#include <stdlib.h>

enum { MOST = 70, GUARD = 16, SHIFTS = 3 };

typedef struct {
    char bytes[GUARD + SHIFTS + MOST * 8 + GUARD];
} buffer;

typedef struct {
    const char *variant;
    lc_codec c;
    size_t n;
    float own[MOST];
    uint16_t x[MOST]; /* encoded */
    char *out;        /* at any alignment; filled with 0xA5 before each call */
    buffer *around;
} trial;

static format format_of(const lc_codec *c) {
    return c->encoding == LC_ENCODING_F16 ? half : brain;
}

static lc_codec codec_of(const variant *v, int encoding) {
    lc_codec c;
    CHECK(lc_codec_make(&c, encoding, LC_F32, 1));
    c.wire = v->kernels[encoding == LC_ENCODING_F16 ? LC_F16 : LC_BF16];
    return c;
}

static void clear(trial *t) {
    memset(t->around, 0xA5, sizeof *t->around);
}

/* That so many bytes were written, and none around them. */
static void expect_bounds(const trial *t, size_t bytes) {
    for (const char *p = t->around->bytes; p < t->around->bytes + sizeof *t->around; p++)
        if (p < t->out || p >= t->out + bytes)
            CHECK_AT(*p == (char)0xA5, "%s encoding %d n %zu", t->variant, t->c.encoding, t->n);
}

static float float_at(const char *p, size_t i) {
    float x;
    memcpy(&x, p + i * sizeof x, sizeof x);
    return x;
}

static void expect_sum(const trial *t, size_t i, float wanted, int line) {
    float got = float_at(t->out, i);
    int alike = (isnan(got) && isnan(wanted)) || bits_of(got) == bits_of(wanted);
    if (!check_that(alike, __FILE__, line, "the sum is right"))
        fprintf(stderr, "    %s encoding %d n %zu [%zu]: %a not %a\n", t->variant, t->c.encoding,
                t->n, i, (double)got, (double)wanted);
}

static void try_encode(trial *t) {
    clear(t);
    t->c.encode(&t->c, t->out, t->own, t->n, 1.0, 0);
    for (size_t i = 0; i < t->n; i++) {
        uint16_t got, wanted = encode(format_of(&t->c), t->own[i]);
        memcpy(&got, t->out + i * 2, 2);
        CHECK_AT(got == wanted, "%s encoding %d: %a to %04x, not %04x", t->variant, t->c.encoding,
                 (double)t->own[i], got, wanted);
    }
    expect_bounds(t, t->c.wire_bytes(&t->c, t->n));
}

static void try_decode(trial *t) {
    clear(t);
    t->c.decode(&t->c, t->out, t->x, t->n);
    for (size_t i = 0; i < t->n; i++)
        CHECK(bits_of(float_at(t->out, i)) == bits_of(decode(format_of(&t->c), t->x[i])));
    expect_bounds(t, t->n * sizeof(float));
}

enum own { NONE, APART, IN_PLACE, N_OWN };

/* The own addend, where `with` says; the sum begins with it. */
static const void *begin(trial *t, enum own with) {
    clear(t);
    if (with != IN_PLACE)
        return with == APART ? t->own : NULL;
    memcpy(t->out, t->own, t->n * sizeof *t->own);
    return t->out;
}

static void expect_sums(const trial *t, enum own with, double factor, int line) {
    for (size_t i = 0; i < t->n; i++) {
        float x = decode(format_of(&t->c), t->x[i]) * (float)factor;
        expect_sum(t, i, with == NONE ? x : t->own[i] + x, line);
    }
    expect_bounds(t, t->n * sizeof(float));
}

static void try_sums(trial *t) {
    static const double factors[] = {0, 1, 1.0 / 0.7, 20};
    for (enum own with = NONE; with < N_OWN; with++) {
        const void *own = begin(t, with);
        t->c.first(&t->c, t->out, own, t->x, t->n);
        expect_sums(t, with, 1, __LINE__);
        for (size_t f = 0; f < sizeof factors / sizeof *factors; f++) {
            own = begin(t, with);
            t->c.first_weighted(&t->c, t->out, own, t->x, factors[f], t->n);
            expect_sums(t, with, factors[f], __LINE__);
        }
    }
    begin(t, IN_PLACE);
    t->c.add(&t->c, t->out, t->x, t->n);
    expect_sums(t, IN_PLACE, 1, __LINE__);
    begin(t, IN_PLACE);
    t->c.add_weighted(&t->c, t->out, t->x, factors[2], t->n);
    expect_sums(t, IN_PLACE, factors[2], __LINE__);
}

static void test_narrow(const variant *v, int encoding) {
    static buffer around;
    trial t = {.variant = v->name, .c = codec_of(v, encoding), .around = &around};
    for (size_t shift = 0; shift <= SHIFTS; shift++)
        for (t.n = 0; t.n <= MOST; t.n++) {
            t.out = around.bytes + GUARD + shift;
            for (size_t i = 0; i < t.n; i++) {
                t.own[i] = random_value();
                t.x[i] = encode(format_of(&t.c), random_value());
            }
            try_encode(&t);
            try_decode(&t);
            try_sums(&t);
        }
}

/* Every pattern is decoded as defined, and what a codec has decoded it encodes as it was: so
 * whoever stores what it has sent can send it on. */
static void test_every_pattern(const variant *v, int encoding) {
    static uint16_t all[65536], again[65536];
    static float x[65536];
    lc_codec c = codec_of(v, encoding);
    format f = format_of(&c);
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    c.decode(&c, x, all, 65536);
    c.encode(&c, again, x, 65536, 1.0, 0);
    for (uint32_t i = 0; i < 65536; i++) {
        int signalling = isnan(decode(f, all[i])) && !(i & 1u << (f.fraction_bits - 1));
        CHECK_AT(bits_of(x[i]) == bits_of(decode(f, all[i])), "%s encoding %d: %04x to %08x",
                 v->name, encoding, i, bits_of(x[i]));
        CHECK_AT(signalling ? isnan(decode(f, again[i])) : again[i] == i,
                 "%s encoding %d: %04x and back to %04x", v->name, encoding, i, again[i]);
    }
}

/* Signalling NaNs of which rounding, or cutting off, would leave a number. */
static void test_nans(const variant *v, int encoding) {
    lc_codec c = codec_of(v, encoding);
    for (uint32_t payload = 1; payload < 1u << 22; payload = payload * 2 + 1) {
        float x[2] = {float_of(0x7F800000u | payload), float_of(0xFF800000u | payload)};
        uint16_t got[2];
        c.encode(&c, got, x, 2, 1.0, 0);
        for (int i = 0; i < 2; i++)
            CHECK(got[i] == encode(format_of(&c), x[i]) && isnan(decode(format_of(&c), got[i])));
    }
}

/* ---- same ---- */

static void test_same(const variant *v, int dtype) {
    enum { N = 37 };
    lc_codec c;
    CHECK(lc_codec_make(&c, LC_ENCODING_SAME, dtype, 1) && c.same);
    CHECK(c.element_bytes == lc_element_bytes(dtype));
    CHECK(c.wire_bytes(&c, N) == N * lc_element_bytes(dtype));
    char x[N * 8], encoded[N * 8 + 1], decoded[N * 8 + 1];
    size_t bytes = c.wire_bytes(&c, N);
    for (size_t i = 0; i < sizeof x; i++)
        x[i] = (char)random32();
    encoded[bytes] = decoded[bytes] = 0x5A;
    c.encode(&c, encoded, x, N, 1.0, 0);
    c.decode(&c, decoded, encoded, N);
    CHECK(memcmp(encoded, x, bytes) == 0 && memcmp(decoded, x, bytes) == 0);
    CHECK(encoded[bytes] == 0x5A && decoded[bytes] == 0x5A);
    if (dtype == LC_BYTES) {
        CHECK(!c.sums && !c.first && !c.add && !c.first_weighted && !c.add_weighted);
        return;
    }
    const lc_kernels *k = c.wire = v->kernels[dtype];
    char own[N * 8], wanted[N * 8], got[N * 8];
    memset(x, 0x35, sizeof x); /* small numbers in every type */
    memset(own, 0x34, sizeof own);
    size_t acc = N * k->acc_bytes;
    CHECK(c.acc_bytes == k->acc_bytes && c.sums == lc_kernels_of(dtype, 1));
    k->first(wanted, own, x, N);
    c.first(&c, got, own, x, N);
    CHECK(memcmp(got, wanted, acc) == 0);
    k->add(wanted, x, N);
    c.add(&c, got, x, N);
    CHECK(memcmp(got, wanted, acc) == 0);
    k->add_weighted(wanted, x, 3, N);
    c.add_weighted(&c, got, x, 3, N);
    CHECK(memcmp(got, wanted, acc) == 0);
    k->first_weighted(wanted, own, x, 5, N);
    c.first_weighted(&c, got, own, x, 5, N);
    CHECK(memcmp(got, wanted, acc) == 0);
}

/* ---- which there are, and how many elements a packet carries ---- */

static void test_which(void) {
    lc_codec c;
    for (int encoding = -1; encoding <= 144; encoding++)
        for (int dtype = -1; dtype <= LC_BYTES + 1; dtype++) {
            int known = dtype >= LC_F32 && dtype <= LC_BYTES;
            int narrow_one = encoding == LC_ENCODING_BF16 || encoding == LC_ENCODING_F16;
            int number = encoding & LC_ENCODING_NUMBER,
                group = encoding & LC_ENCODING_GROUP_32 ? 32 : 128;
            int low_one = encoding >= 0 && encoding < 128 && number >= LC_ENCODING_INT8 &&
                          number <= LC_ENCODING_INT2;
            int wanted = known && (encoding == LC_ENCODING_SAME ||
                                   ((narrow_one || low_one) && dtype == LC_F32));
            CHECK_AT(lc_codec_make(&c, encoding, dtype, 1) == wanted, "encoding %d dtype %d",
                     encoding, dtype);
            if (!wanted) {
                CHECK(lc_encoding_elements(encoding, dtype, 1408) == 0);
                CHECK(lc_encoding_bytes(encoding, dtype, 7) == 0);
                CHECK(lc_encode(encoding, dtype, 1, NULL, NULL, 0, 0) == LC_E_ARGUMENT);
                CHECK(lc_decode(encoding, dtype, 1, NULL, NULL, 0) == LC_E_ARGUMENT);
                continue;
            }
            CHECK(c.encoding == number && c.dtype == dtype);
            CHECK(c.low.group == (low_one ? group : 0));
            for (uint32_t payload = 0; payload <= 65535; payload += payload < 70 ? 1 : 997) {
                uint32_t fit = lc_codec_elements(&c, (uint16_t)payload);
                uint32_t more = low_one && (int)fit >= group ? fit + (uint32_t)group : fit + 1;
                CHECK(c.wire_bytes(&c, fit) <= payload && c.wire_bytes(&c, more) > payload);
                CHECK(lc_encoding_elements(encoding, dtype, (uint16_t)payload) == fit);
            }
        }
    CHECK(lc_encoding_bytes(LC_ENCODING_BF16, LC_F32, 7) == 14);
    CHECK(lc_decode_add(LC_ENCODING_SAME, LC_BYTES, 1, NULL, NULL, NULL, 1, 0) == LC_E_ARGUMENT);
}

int main(void) {
    test_which();
    for (int i = 0; i < N_VARIANTS; i++) {
        if (!variants[i].runs()) {
            printf("this processor has no %s\n", variants[i].name);
            continue;
        }
        for (int dtype = LC_F32; dtype <= LC_BYTES; dtype++)
            test_same(&variants[i], dtype);
        for (int encoding = LC_ENCODING_BF16; encoding <= LC_ENCODING_F16; encoding++) {
            test_narrow(&variants[i], encoding);
            test_every_pattern(&variants[i], encoding);
            test_nans(&variants[i], encoding);
        }
    }
    return check_result("codec");
}
