/* The sums: every variant that this processor runs, against a scalar reference, bit for bit.
 * NaNs only need to be NaNs where an addition made them: which operand's payload survives is the
 * compiler's choice. Conversions keep payloads and are compared whole. */
#include "check.h"

/* All variants are tested, not only the one that is selected. */
#include "../../native/kernels.c"

#include <math.h>
#include <stdlib.h>

#include "small_floats.h"

enum { MOST = 1100, GUARD = 64, SHIFTS = 3 };

typedef struct {
    char bytes[GUARD + MOST * 8 + GUARD];
} buffer;

static double read_wire(int dtype, const char *p, size_t i) {
    float x;
    double y;
    uint16_t h;
    if (dtype == LC_F64)
        return memcpy(&y, p + i * 8, 8), y;
    if (dtype == LC_F32)
        return memcpy(&x, p + i * 4, 4), (double)x;
    memcpy(&h, p + i * 2, 2);
    return (double)decode(dtype == LC_F16 ? half : brain, h);
}

static double read_acc(int dtype, const char *p, size_t i) {
    return read_wire(dtype == LC_F64 ? LC_F64 : LC_F32, p, i);
}

/* What the value is once it stands on the wire. */
static double on_wire(int dtype, double x) {
    if (dtype == LC_F16 || dtype == LC_BF16) {
        format f = dtype == LC_F16 ? half : brain;
        return (double)decode(f, encode(f, (float)x));
    }
    return x;
}

/* One rounding each, to the accumulator's type. */
static double add(int dtype, double a, double b) {
    return dtype == LC_F64 ? a + b : (double)((float)a + (float)b);
}

static double multiply(int dtype, double a, double b) {
    return dtype == LC_F64 ? a * b : (double)((float)a * (float)b);
}

static int alike(double a, double b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

/* ---- inputs ---- */

static void fill_wire(int dtype, char *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float x = random_value();
        double y = (double)x * (1 + random32() * 0x1p-40);
        uint16_t h = encode(dtype == LC_F16 ? half : brain, x);
        if (dtype == LC_F64)
            memcpy(p + i * 8, &y, 8);
        else if (dtype == LC_F32)
            memcpy(p + i * 4, &x, 4);
        else
            memcpy(p + i * 2, &h, 2);
    }
}

static void fill_acc(int dtype, char *p, size_t n) {
    fill_wire(dtype == LC_F64 ? LC_F64 : LC_F32, p, n);
}

/* ---- the kernels ---- */

typedef struct {
    const variant *v;
    const lc_kernels *k;
    int dtype;
    size_t n;
    char *own, *x, *acc, *out; /* out is as it was before: filled with 0xA5 */
} trial;

static void expect_wire(const trial *t, const char *out, size_t i, double wanted, int line) {
    double got = read_wire(t->dtype, out, i);
    if (!check_that(alike(got, on_wire(t->dtype, wanted)), __FILE__, line, "kernel is right"))
        fprintf(stderr, "    %s dtype %d n %zu [%zu]: %a not %a\n", t->v->name, t->dtype, t->n, i,
                got, on_wire(t->dtype, wanted));
}

static void expect_acc(const trial *t, const char *acc, size_t i, double wanted, int line) {
    double got = read_acc(t->dtype, acc, i);
    if (!check_that(alike(got, wanted), __FILE__, line, "kernel is right"))
        fprintf(stderr, "    %s dtype %d n %zu [%zu]: %a not %a\n", t->v->name, t->dtype, t->n, i,
                got, wanted);
}

/* That n elements were written, and not a byte around them. */
static void expect_bounds(const char *written, size_t bytes) {
    int touched = 0;
    for (size_t i = 0; i < GUARD - SHIFTS; i++)
        touched |= written[-1 - (long)i] != (char)0xA5 || written[bytes + i] != (char)0xA5;
    CHECK(!touched);
}

static void try_first(const trial *t) {
    int d = t->dtype;
    t->k->first(t->out, t->own, t->x, t->n);
    for (size_t i = 0; i < t->n; i++)
        expect_acc(t, t->out, i, add(d, read_wire(d, t->own, i), read_wire(d, t->x, i)), __LINE__);
    expect_bounds(t->out, t->n * t->k->acc_bytes);
    t->k->first(t->out, NULL, t->x, t->n);
    for (size_t i = 0; i < t->n; i++)
        expect_acc(t, t->out, i, read_wire(d, t->x, i), __LINE__);
    expect_bounds(t->out, t->n * t->k->acc_bytes);
    if (t->k->acc_bytes != t->k->element_bytes)
        return;
    memcpy(t->out, t->own, t->n * t->k->acc_bytes); /* acc may be own */
    t->k->first(t->out, t->out, t->x, t->n);
    for (size_t i = 0; i < t->n; i++)
        expect_acc(t, t->out, i, add(d, read_wire(d, t->own, i), read_wire(d, t->x, i)), __LINE__);
}

static void try_add(const trial *t) {
    int d = t->dtype;
    memcpy(t->out, t->acc, t->n * t->k->acc_bytes);
    t->k->add(t->out, t->x, t->n);
    for (size_t i = 0; i < t->n; i++)
        expect_acc(t, t->out, i, add(d, read_acc(d, t->acc, i), read_wire(d, t->x, i)), __LINE__);
    expect_bounds(t->out, t->n * t->k->acc_bytes);
}

static void try_weighted(const trial *t) {
    static const double factors[] = {0, 1, 1.0 / 0.7, 20};
    int d = t->dtype;
    for (size_t f = 0; f < sizeof factors / sizeof *factors; f++)
        for (int with = 0; with < 3; with++) { /* nothing, own, the sum so far */
            memset(t->out, 0xA5, t->n * t->k->acc_bytes);
            if (with == 2) {
                memcpy(t->out, t->acc, t->n * t->k->acc_bytes);
                t->k->add_weighted(t->out, t->x, factors[f], t->n);
            } else {
                t->k->first_weighted(t->out, with ? t->own : NULL, t->x, factors[f], t->n);
            }
            for (size_t i = 0; i < t->n; i++) {
                double part = multiply(d, read_wire(d, t->x, i), factors[f]);
                double wanted = with == 2   ? add(d, read_acc(d, t->acc, i), part)
                                : with == 1 ? add(d, read_wire(d, t->own, i), part)
                                            : part;
                expect_acc(t, t->out, i, wanted, __LINE__);
            }
            expect_bounds(t->out, t->n * t->k->acc_bytes);
        }
}

static void try_finish(const trial *t) {
    static const double factors[] = {1, 0.5, 1.0 / 3, 7.0 / 5};
    int d = t->dtype;
    for (size_t f = 0; f < sizeof factors / sizeof *factors; f++)
        for (int in_place = 0; in_place < 2; in_place++) {
            memset(t->out, 0xA5, t->n * t->k->acc_bytes);
            if (in_place)
                memcpy(t->out, t->acc, t->n * t->k->acc_bytes);
            t->k->finish(t->out, in_place ? t->out : t->acc, t->n, factors[f]);
            for (size_t i = 0; i < t->n; i++)
                expect_wire(t, t->out, i, multiply(d, read_acc(d, t->acc, i), factors[f]),
                            __LINE__);
            size_t written = in_place ? t->k->acc_bytes : t->k->element_bytes;
            expect_bounds(t->out, t->n * written);
        }
}

static double blended(const trial *t, size_t i, double own_factor, int with_acc,
                      double acc_factor) {
    double own = multiply(t->dtype, read_wire(t->dtype, t->own, i), own_factor);
    if (!with_acc)
        return own;
    return add(t->dtype, own, multiply(t->dtype, read_acc(t->dtype, t->acc, i), acc_factor));
}

/* alias: 0 apart, 1 out is own, 2 out is acc. */
static void try_blend(const trial *t, int with_acc, int alias) {
    const char *own = alias == 1 ? t->out : t->own, *acc = alias == 2 ? t->out : t->acc;
    memset(t->out, 0xA5, t->n * t->k->acc_bytes);
    if (alias == 1)
        memcpy(t->out, t->own, t->n * t->k->element_bytes);
    if (alias == 2)
        memcpy(t->out, t->acc, t->n * t->k->acc_bytes);
    t->k->blend(t->out, own, 1.0 / 3, with_acc ? acc : NULL, 2.0 / 7, t->n);
    for (size_t i = 0; i < t->n; i++)
        expect_wire(t, t->out, i, blended(t, i, 1.0 / 3, with_acc, 2.0 / 7), __LINE__);
    size_t written = alias == 2 ? t->k->acc_bytes : t->k->element_bytes;
    expect_bounds(t->out, t->n * written);
}

static void try_kernels(const variant *v, int dtype, size_t n, size_t shift) {
    static buffer own, x, acc, out;
    trial t = {v, v->kernels[dtype], dtype, n, NULL, NULL, NULL, NULL};
    t.own = own.bytes + GUARD + shift;
    t.x = x.bytes + GUARD + (shift + 1) % (SHIFTS + 1);
    t.acc = acc.bytes + GUARD + (shift + 2) % (SHIFTS + 1);
    t.out = out.bytes + GUARD + (shift + 3) % (SHIFTS + 1);
    fill_wire(dtype, t.own, n);
    fill_wire(dtype, t.x, n);
    fill_acc(dtype, t.acc, n);
    memset(&out, 0xA5, sizeof out);
    try_first(&t);
    try_add(&t);
    try_weighted(&t);
    try_finish(&t);
    try_blend(&t, 0, 0);
    try_blend(&t, 1, 0);
    try_blend(&t, 0, 1);
    try_blend(&t, 1, 1);
    try_blend(&t, 1, 2);
}

static void test_kernels(const variant *v) {
    for (int dtype = LC_F32; dtype <= LC_BF16; dtype++) {
        for (size_t shift = 0; shift <= SHIFTS; shift++)
            for (size_t n = 0; n <= 70; n++)
                try_kernels(v, dtype, n, shift);
        try_kernels(v, dtype, MOST - 1, 1);
    }
}

/* ---- conversions ---- */

static void test_widening(const variant *v, int dtype) {
    static uint16_t all[65536];
    static float got[65536];
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    v->kernels[dtype]->first(got, NULL, all, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        uint32_t wanted = bits_of(decode(dtype == LC_F16 ? half : brain, (uint16_t)i));
        CHECK_AT(bits_of(got[i]) == wanted, "%s dtype %d: %04x to %08x, not %08x", v->name, dtype,
                 i, bits_of(got[i]), wanted);
    }
}

/* Factor 1 is exact, and quiets NaNs as conversion would. */
static void narrow(const variant *v, int dtype, const float *x, uint16_t *out, size_t n) {
    v->kernels[dtype]->finish(out, x, n, 1);
}

static void expect_narrow(const variant *v, int dtype, const float *x, size_t n) {
    static uint16_t got[4096];
    narrow(v, dtype, x, got, n);
    for (size_t i = 0; i < n; i++) {
        uint16_t wanted = encode(dtype == LC_F16 ? half : brain, x[i]);
        CHECK_AT(got[i] == wanted, "%s dtype %d: %a to %04x, not %04x", v->name, dtype,
                 (double)x[i], got[i], wanted);
    }
}

/* Every value of the small format, every tie between two of them, and the floats beside those. */
static void test_ties(const variant *v, int dtype) {
    format f = dtype == LC_F16 ? half : brain;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float at = decode(f, (uint16_t)bits), next = decode(f, (uint16_t)(bits + 1));
        float tie = (float)(((double)at + (double)next) / 2);
        if ((bits & 0x7FFF) == (uint32_t)f.infinity - 1) /* the step to where infinity would be */
            tie = (bits & 0x8000 ? -1.0f : 1.0f) * (dtype == LC_F16 ? 65520.0f : 0x1.FFp127f);
        float x[6] = {at, tie};
        for (size_t i = 0; i < 2; i++) {
            x[2 + i] = float_of(bits_of(x[i]) + 1);
            x[4 + i] = float_of(bits_of(x[i]) - 1);
        }
        expect_narrow(v, dtype, x, 6);
    }
}

/* Floats of all kinds, evenly over the bit patterns. */
static void test_narrowing(const variant *v, int dtype) {
    enum { STRIDE = 4099 };
    static float x[4096];
    size_t n = 0;
    for (uint64_t bits = random32() % STRIDE; bits < (uint64_t)1 << 32; bits += STRIDE) {
        x[n++] = float_of((uint32_t)bits);
        if (n == 4096 || bits + STRIDE >= (uint64_t)1 << 32) {
            expect_narrow(v, dtype, x, n);
            n = 0;
        }
    }
}

static void test_conversions(const variant *v) {
    for (int dtype = LC_F16; dtype <= LC_BF16; dtype++) {
        test_widening(v, dtype);
        test_ties(v, dtype);
        test_narrowing(v, dtype);
    }
}

/* Arithmetic has made every NaN quiet before the kernels narrow it, so what the plain conversion
 * does with a signalling one shows only here: without its quiet bit it could become an infinity. */
static void test_signalling(void) {
    for (uint32_t payload = 1; payload < 1u << 22; payload += 4093) {
        vf32_plain x;
        uint32_t bits[4] = {0x7F800000u | payload, 0xFF800000u | payload, 0x7F800001u, 0xFFBFFFFFu};
        uint16_t f16[4], bf16[4];
        memcpy(&x, bits, sizeof x);
        vu16_plain narrow_half = narrow_f16_plain(x), narrow_brain = narrow_bf16_plain(x);
        memcpy(f16, &narrow_half, sizeof f16);
        memcpy(bf16, &narrow_brain, sizeof bf16);
        for (int i = 0; i < 4; i++) {
            CHECK(f16[i] == encode(half, float_of(bits[i])));
            CHECK(bf16[i] == encode(brain, float_of(bits[i])));
        }
    }
}

/* All 2^32 floats, variants against each other; minutes, so only when asked for. */
static void test_every_float(const variant *v) {
    enum { BLOCK = 4096 };
    static float x[BLOCK];
    static uint16_t got[BLOCK], wanted[BLOCK];
    for (int dtype = LC_F16; dtype <= LC_BF16; dtype++)
        for (uint64_t base = 0; base < (uint64_t)1 << 32; base += BLOCK) {
            for (uint32_t i = 0; i < BLOCK; i++)
                x[i] = float_of((uint32_t)base + i);
            narrow(v, dtype, x, got, BLOCK);
            narrow(&variants[N_VARIANTS - 1], dtype, x, wanted, BLOCK);
            CHECK_AT(memcmp(got, wanted, sizeof got) == 0, "%s dtype %d: from %08llx", v->name,
                     dtype, (unsigned long long)base);
        }
}

static void test_selection(void) {
    CHECK(lc_kernels_of(LC_BYTES, 1) == NULL && lc_kernels_of(-1, 1) == NULL &&
          lc_kernels_of(99, 0) == NULL);
    CHECK(lc_element_bytes(LC_BYTES) == 1 && lc_element_bytes(-1) == 0 &&
          lc_element_bytes(LC_BYTES + 1) == 0);
    for (int dtype = LC_F32; dtype <= LC_BF16; dtype++) {
        const lc_kernels *k = lc_kernels_of(dtype, 1);
        CHECK(k == best->kernels[dtype]);
        CHECK(lc_kernels_of(dtype, 0) == kernels_plain[dtype]);
        CHECK(k->element_bytes == lc_element_bytes(dtype));
        CHECK(k->acc_bytes == (dtype == LC_F64 ? 8 : 4));
    }
    CHECK(strcmp(lc_simd_name(), best->name) == 0);
}

int main(int argc, char **argv) {
    int every = argc > 1 && strcmp(argv[1], "every") == 0;
    test_selection();
    test_signalling();
    for (int i = 0; i < N_VARIANTS; i++) {
        if (!variants[i].runs()) {
            printf("this processor has no %s\n", variants[i].name);
            continue;
        }
        test_kernels(&variants[i]);
        test_conversions(&variants[i]);
        if (every)
            test_every_float(&variants[i]);
    }
    return check_result("reduce");
}
