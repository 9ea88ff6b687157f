/* Indices of a few bits: every variant gives the bytes of plain C, errors are at most half a step,
 * and whatever bytes come are decoded within bounds (the sanitizers watch). The format itself is
 * held by tests/plan/test_codec.py, against its twin in numpy. */
#include "check.h"

#include "../../native/lowbit.c"

#include <stdlib.h>

#include "../../native/codec.h"

/* Small_floats.h has functions of the same names. */
#define bits_of  bits_of_float
#define float_of float_of_bits
#include "small_floats.h"
#undef bits_of
#undef float_of

enum { MOST_ELEMENTS = 2500 };

static const uint8_t every_bits[] = {8, 6, 5, 4, 3, 2};
enum { N_BITS = sizeof every_bits };

static lc_lowbit_format format_of(int i, const lc_lowbit *loops) {
    return (lc_lowbit_format){loops, every_bits[i % N_BITS], i / N_BITS % 2 ? 32 : 128,
                              i / N_BITS / 2 % 2, i / N_BITS / 4 % 2};
}

static uint64_t next_seed;

static size_t some_number(void) {
    uint32_t most = random32() % 4 ? 300 : MOST_ELEMENTS;
    return 1 + random32() % most;
}

/* Of one kind, so that most groups are finite; now and then of any kind. */
static void draw(float *x, size_t n) {
    float size = ldexpf(1, (int)(random32() % 270) - 145), offset = 0;
    if (random32() % 3 == 0)
        offset = size * (float)(random32() % 64);
    int any = random32() % 8 == 0, few = random32() % 4 == 0;
    for (size_t i = 0; i < n; i++) {
        float unit = (float)random32() / 4294967296.0f - 0.5f;
        float third = (float)(random32() % 3) - 1;
        x[i] = any ? random_value() : offset + size * (few ? third : unit);
    }
}

static void decode_all(const lc_lowbit_format *f, float *dst, const uint8_t *src, size_t n) {
    lc_lowbit_packet p = lc_lowbit_packet_of(f, src, n);
    for (size_t at = 0; at < n;)
        at += lc_lowbit_decode(f, &p, at, (char *)(dst + at));
}

static uint32_t groups_not_finite(const lc_lowbit_format *f, const float *x, size_t n) {
    uint32_t found = 0;
    for (size_t at = 0; at < n; at += f->group) {
        int finite = 1;
        for (size_t i = at; i < n && i < at + f->group; i++)
            finite &= !!isfinite(x[i]);
        found += !finite;
    }
    return found;
}

/* Bytes on the heap, of the exact size, so that a sanitizer sees any beyond. */
static uint8_t *encoded(const lc_lowbit_format *f, const float *x, size_t n) {
    uint8_t *bytes = malloc(lc_lowbit_bytes(f, n));
    char *from = malloc(n * 4 + 1); /* at an odd address */
    if (!bytes || !from)
        exit(1);
    memcpy(from + 1, x, n * 4);
    CHECK(lc_lowbit_encode(f, bytes, from + 1, n, next_seed) == groups_not_finite(f, x, n));
    free(from);
    return bytes;
}

static int same_floats(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bits_of(a[i]) != bits_of(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            return 0;
    return 1;
}

static void test_variants_agree(const lc_lowbit *v) {
    static float x[MOST_ELEMENTS], one[MOST_ELEMENTS], other[MOST_ELEMENTS];
    for (int i = 0; i < 1200; i++) {
        lc_lowbit_format f = format_of(i, v), plain = format_of(i, lc_lowbit_of(0));
        size_t n = some_number();
        draw(x, n);
        next_seed = (uint64_t)random32() << 32 | random32();
        uint8_t *bytes = encoded(&f, x, n), *wanted = encoded(&plain, x, n);
        CHECK_AT(memcmp(bytes, wanted, lc_lowbit_bytes(&f, n)) == 0, "%s int%u/%u n %zu", v->name,
                 f.bits, f.group, n);
        decode_all(&f, one, bytes, n);
        decode_all(&plain, other, bytes, n);
        CHECK(same_floats(one, other, n));
        next_seed++;
        uint8_t *again = encoded(&f, one, n);
        decode_all(&f, other, again, n);
        CHECK_AT(same_floats(one, other, n), "%s int%u/%u n %zu: decoded, encoded, decoded",
                 v->name, f.bits, f.group, n);
        free(bytes);
        free(wanted);
        free(again);
    }
}

/* Where an element may be: half a step away, or a whole one, rounded at random. */
static double farthest(const lc_lowbit_format *f, header h) {
    double half = ldexp(h.step, -f->bits + h.exponent - TOP) * (1 + ldexp(1, -14));
    return f->stochastic ? 2 * half : half;
}

static void expect_group(const lc_lowbit_format *f, const lc_lowbit_packet *p, const float *x,
                         const float *got, size_t at) {
    size_t n = p->n - at < f->group ? p->n - at : f->group;
    header h = header_at(p, at / f->group);
    int finite = 1, alike = 1;
    for (size_t i = 0; i < n; i++) {
        finite &= !!isfinite(x[i]);
        alike &= x[i] == x[0];
    }
    double most = farthest(f, h);
    int rest_is_one = h.exponent == CONSTANT;
    for (size_t i = 0; i < n; i++) {
        int spike =
            f->spikes && (p->low_places[at / f->group] == i || p->high_places[at / f->group] == i);
        if (!finite)
            CHECK(isnan(got[i]));
        else if (spike) /* its last byte is cut off; subnormal, that is more of it */
            CHECK(fabs((double)got[i] - x[i]) <= ldexp(fabs((double)x[i]), -15) + ldexp(1, -141));
        else if (alike || rest_is_one)
            CHECK(got[i] == x[i]);
        else
            CHECK_AT(fabs((double)got[i] - x[i]) <= most, "int%u: %a not %a, within %a", f->bits,
                     (double)got[i], (double)x[i], most);
    }
}

static void test_half_a_step(const lc_lowbit *v) {
    static float x[MOST_ELEMENTS], got[MOST_ELEMENTS];
    for (int i = 0; i < 1200; i++) {
        lc_lowbit_format f = format_of(i, v);
        size_t n = some_number();
        draw(x, n);
        uint8_t *bytes = encoded(&f, x, n);
        lc_lowbit_packet p = lc_lowbit_packet_of(&f, bytes, n);
        decode_all(&f, got, bytes, n);
        for (size_t at = 0; at < n; at += f.group)
            expect_group(&f, &p, x + at, got + at, at);
        free(bytes);
    }
}

/* The mean of what elements become, rounded at random, is the elements: within 5 standard errors,
 * ten draws of those that are too rare to be counted on, and a unit for what lies within one of an
 * end. */
static void test_means(const lc_lowbit *v) {
    enum { TIMES = 2000, ELEMENTS = 96 };
    static float x[ELEMENTS], got[ELEMENTS];
    for (int i = 0; i < 6 * N_BITS; i++) {
        lc_lowbit_format f = format_of(4 * N_BITS + i % (4 * N_BITS), v);
        double sum[ELEMENTS] = {0}, square[ELEMENTS] = {0};
        float size = ldexpf(1, (int)(random32() % 240) - 120);
        for (int j = 0; j < ELEMENTS; j++)
            x[j] = size * ((float)random32() / 4294967296.0f - (i % 3 ? 0.5f : 0.01f));
        uint8_t *bytes = NULL;
        for (int t = 0; t < TIMES; t++) {
            next_seed = (uint64_t)random32() << 32 | random32();
            free(bytes);
            bytes = encoded(&f, x, ELEMENTS);
            decode_all(&f, got, bytes, ELEMENTS);
            for (int j = 0; j < ELEMENTS; j++) {
                double off = (double)got[j] - x[j];
                sum[j] += off;
                square[j] += off * off;
            }
        }
        int moved = 0;
        for (int j = 0; j < ELEMENTS; j++) {
            double rare = 10 * (double)size / ((1 << f.bits) - 1) / TIMES;
            double unit = ldexp(size, -14);
            CHECK_AT(fabs(sum[j] / TIMES) <= 5 * sqrt(square[j]) / TIMES + rare + unit,
                     "int%u/%u spikes %u: %a is %a off", f.bits, f.group, f.spikes, (double)x[j],
                     sum[j] / TIMES);
            moved += square[j] > 0;
        }
        CHECK(moved > ELEMENTS / 2);
        free(bytes);
    }
}

/* Nothing is written behind n floats, of which a place of a spike could be up to 254. */
static void expect_untouched(const float *x, size_t n) {
    const char *behind = (const char *)(x + n);
    for (size_t i = 0; i < 256 * sizeof *x; i++)
        CHECK(behind[i] == 0x5A);
}

static void test_any_bytes(const lc_lowbit *v) {
    for (int i = 0; i < 3000; i++) {
        lc_lowbit_format f = format_of(i, v);
        size_t n = some_number(), size = lc_lowbit_bytes(&f, n);
        uint8_t *bytes = malloc(size);
        float *x = malloc((n + 256) * sizeof *x);
        if (!bytes || !x)
            exit(1);
        memset(x, 0x5A, (n + 256) * sizeof *x);
        for (size_t j = 0; j < size; j++)
            bytes[j] = (uint8_t)(random32() % 5 ? random32() : 255);
        decode_all(&f, x, bytes, n);
        lc_lowbit_format plain = format_of(i, lc_lowbit_of(0));
        float *wanted = malloc(n * sizeof *x);
        if (!wanted)
            exit(1);
        decode_all(&plain, wanted, bytes, n);
        CHECK(same_floats(x, wanted, n));
        expect_untouched(x, n);
        free(bytes);
        free(x);
        free(wanted);
    }
}

/* What the codec adds is what it decodes, with a weight and without. */
static void test_sums(int encoding, int simd) {
    static float x[MOST_ELEMENTS], own[MOST_ELEMENTS], acc[MOST_ELEMENTS], part[MOST_ELEMENTS];
    lc_codec c;
    CHECK(lc_codec_make(&c, encoding, LC_F32, simd));
    size_t n = some_number();
    draw(x, n);
    for (size_t i = 0; i < n; i++)
        own[i] = acc[i] = (float)(random32() % 1000);
    uint8_t *bytes = malloc(c.wire_bytes(&c, n));
    if (!bytes)
        exit(1);
    c.encode(&c, bytes, x, n, 1, 0);
    c.decode(&c, part, bytes, n);
    c.add(&c, acc, bytes, n);
    for (size_t i = 0; i < n; i++)
        CHECK(acc[i] == own[i] + part[i] || isnan(part[i]));
    c.first(&c, acc, own, bytes, n);
    for (size_t i = 0; i < n; i++)
        CHECK(acc[i] == own[i] + part[i] || isnan(part[i]));
    c.first_weighted(&c, acc, NULL, bytes, 0.25, n);
    c.add_weighted(&c, acc, bytes, 2, n);
    for (size_t i = 0; i < n; i++)
        CHECK(acc[i] == part[i] * 0.25f + part[i] * 2.0f || isnan(part[i]) || isnan(acc[i]));
    free(bytes);
}

int main(void) {
    for (int i = 0; i < N_VARIANTS; i++) {
        if (!variants[i].runs()) {
            printf("this processor has no %s\n", variants[i].name);
            continue;
        }
        test_variants_agree(&variants[i]);
        test_half_a_step(&variants[i]);
        test_means(&variants[i]);
        test_any_bytes(&variants[i]);
    }
    for (int i = 0; i < 400; i++)
        test_sums((LC_ENCODING_INT8 + i % N_BITS) | (i / N_BITS % 2 ? LC_ENCODING_GROUP_32 : 0) |
                      (i / N_BITS / 2 % 2 ? LC_ENCODING_SPIKES : 0) |
                      (i / N_BITS / 4 % 2 ? LC_ENCODING_STOCHASTIC : 0),
                  i & 1);
    return check_result("lowbit");
}
