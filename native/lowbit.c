/* Groups in a few bits; see lowbit.h. The loops over elements are lowbit_target.h's. */
#include "lowbit.h"

#include <string.h>

#include "lowbit_planes.h"
#include "variants.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    LANES_MOST = 16,
    CONSTANT = 255, /* in place of an exponent: anchor and step are the halves of a float */
    MOST = 32767,   /* the largest anchor, in units */
    TOP = 141,      /* a unit is 2 to the power of the exponent less this */
    NO_PLACE = 255, /* in place of a spike's: the group has none */
};

#define INFINITE     0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u
#define ROUNDER      12582912.0f /* 1.5 * 2^23 */
#define DRAW_FIRST   0x7FEB352Du
#define DRAW_SECOND  0x846CA68Bu
#define DRAW_THIRD   0x9E3779B9u
#define DRAW_UNIT    0x1p-14f
#define DRAW_LEAST   (0x1p-15f - 0.5f)

/* Of a group's elements; special: one of them is infinite or a NaN. */
typedef struct {
    float low, high;
    int special;
} range;

/* What an element is multiplied by and subtracted from to become an index. */
typedef struct {
    float first, second, anchor, inverse, levels;
    float first_end, last_end; /* the elements at index 0 and at the last one */
    int coarse; /* the grid goes on beyond the group, as a step is two units at least */
} scale;

/* What an index stands for. */
typedef struct {
    float anchor, step, unit;
} grid;

/* Where the random numbers of a group begin: one for each element, by its counter. */
typedef struct {
    uint32_t counter, key;
} draws;

struct lc_lowbit {
    const char *name;
    range (*find)(const char *x, size_t n);
    void (*encode)(uint8_t *indices, const char *x, size_t n, const scale *s);
    void (*encode_stochastic)(uint8_t *indices, const char *x, size_t n, const scale *s,
                              draws from);
    void (*decode)(char *x, const uint8_t *indices, size_t n, const grid *g);
    int (*runs)(void); /* whether this processor and kernel can execute it */
};

#define TARGET
#define VARIANT      plain
#define VECTOR_BYTES 16
#include "lowbit_target.h"

#if defined(__x86_64__)
/* Eight numbers below 256 as bytes; the compiler would take them one by one. */
__attribute__((target("avx2"), always_inline)) static inline uint64_t narrow_avx2(__m256i v) {
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs));
}

#define TARGET       __attribute__((target("avx2")))
#define VARIANT      avx2
#define VECTOR_BYTES 32
#define MIN(a, b)    ((vf32_avx2)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MAX(a, b)    ((vf32_avx2)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define NARROW(v)    narrow_avx2((__m256i)(v))
#include "lowbit_target.h"

static int runs_avx2(void) {
    return __builtin_cpu_supports("avx2");
}
#endif

static int always(void) {
    return 1;
}

/* Best first; the last runs everywhere. */
static const lc_lowbit variants[] = {
#if defined(__x86_64__)
    {"avx2", find_avx2, encode_avx2, encode_stochastic_avx2, decode_avx2, runs_avx2},
#endif
    {"plain", find_plain, encode_plain, encode_stochastic_plain, decode_plain, always},
};

enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

static const lc_lowbit *best;

/* Before main and before any thread, so that the choice needs no lock. */
__attribute__((constructor)) static void choose_best(void) {
    best = variants;
    while (!best->runs())
        best++;
}

const lc_lowbit *lc_lowbit_of(int simd) {
    return simd ? best : &variants[N_VARIANTS - 1];
}

/* ---- layout ---- */

/* The widths that an index is split into, those of its low bits first; 0: no more. */
typedef struct {
    uint8_t width[2];
} planes;

static planes planes_of(unsigned bits) {
    static const planes of[] = {[2] = {{2}},    [3] = {{2, 1}}, [4] = {{4}},
                                [5] = {{4, 1}}, [6] = {{4, 2}}, [8] = {{8}}};
    return of[bits];
}

static size_t planes_bytes(unsigned bits, size_t n) {
    planes p = planes_of(bits);
    return lc_plane_bytes(n, p.width[0]) + lc_plane_bytes(n, p.width[1]);
}

static size_t groups_of(const lc_lowbit_format *f, size_t n) {
    return (n + f->group - 1) / f->group;
}

size_t lc_lowbit_bytes(const lc_lowbit_format *f, size_t n) {
    return planes_bytes(f->bits, n) + (f->spikes ? 5 + 8 : 5) * groups_of(f, n);
}

lc_lowbit_packet lc_lowbit_packet_of(const lc_lowbit_format *f, const uint8_t *src, size_t n) {
    size_t groups = groups_of(f, n);
    const uint8_t *anchors = src + planes_bytes(f->bits, n), *spikes = anchors + 5 * groups;
    return (lc_lowbit_packet){.planes = src,
                              .anchors = anchors,
                              .steps = anchors + 2 * groups,
                              .exponents = anchors + 4 * groups,
                              .lows = spikes,
                              .highs = spikes + 3 * groups,
                              .low_places = spikes + 6 * groups,
                              .high_places = spikes + 7 * groups,
                              .n = n};
}

/* ---- encode ---- */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 2^power, from -149 to 127. */
static float power_of_two(int power) {
    return float_of(power < -126 ? 1u << (power + 149) : (uint32_t)(power + 127) << 23);
}

/* To the nearest, halves to even; below 2^22. */
static float nearest(float x) {
    return x + ROUNDER - ROUNDER;
}

/* A group as it stands in a packet. */
typedef struct {
    uint16_t anchor, step;
    uint8_t exponent;
} header;

static header constant_header(float value) {
    uint32_t bits = bits_of(value);
    return (header){(uint16_t)(bits >> 16), (uint16_t)bits, CONSTANT};
}

static int is_not_a_number(header h) {
    return h.exponent == CONSTANT && (h.anchor & 0x7FFF) > INFINITE >> 16;
}

/* The last index is at the other end, but no farther from zero than the anchor: then what a group
 * is decoded to has the same grid. */
static int step_of(float anchor, float other, unsigned bits) {
    int levels = (1 << bits) - 1;
    int most = ((int)anchor << bits) / levels;
    int wanted = (int)nearest((anchor - other) * (float)(1 << (bits - 1)) / (float)levels);
    return wanted < most ? wanted : most;
}

/* The grid of a group, and in *s how its elements get their indices. */
static header header_of(range r, unsigned bits, scale *s) {
    if (r.special)
        return constant_header(float_of(NOT_A_NUMBER));
    float low = r.low + 0.0f, high = r.high + 0.0f; /* no negative zeros */
    if (low == high)
        return constant_header(low);
    int upper = high >= -low;
    int exponent = (int)(bits_of(upper ? high : -low) >> 23);
    exponent = exponent > 1 ? exponent : 1;
    int power = TOP - exponent, first = power < 127 ? power : 127;
    s->first = power_of_two(first);
    s->second = power_of_two(power - first); /* one factor may be beyond float32 */
    float sign = upper ? 1.0f : -1.0f;
    float near = (upper ? high : -low) * s->first * s->second;
    float other = (upper ? low : -high) * s->first * s->second;
    float anchor = nearest(near) < MOST ? nearest(near) : MOST;
    int step = step_of(anchor, other, bits), least = 1 << bits;
    s->coarse = step < least;
    step = s->coarse ? least : step;
    s->first_end = upper ? high : low;
    s->last_end = upper ? low : high;
    s->anchor = sign * anchor;
    s->inverse = sign * ((float)(1u << (bits - 1)) / (float)step);
    s->levels = (float)((1u << bits) - 1);
    return (header){(uint16_t)(int16_t)s->anchor, (uint16_t)step, (uint8_t)exponent};
}

static size_t lanes_of(size_t n) {
    return (n + LANES_MOST - 1) / LANES_MOST * LANES_MOST;
}

/* A short group is filled up with its first element, which changes no range. */
static const char *filled(char *room, const char *x, size_t n) {
    size_t lanes = lanes_of(n);
    if (lanes == n)
        return x;
    memcpy(room, x, n * 4);
    for (size_t i = n; i < lanes; i++)
        memcpy(room + i * 4, x, 4);
    return room;
}

static range range_of(const lc_lowbit_format *f, const char *x, size_t n) {
    char room[LC_LOWBIT_GROUP * 4];
    return f->loops->find(filled(room, x, n), lanes_of(n));
}

/* What a group has beside its grid: the upper three bytes of floats, and where they stand. */
typedef struct {
    uint32_t low, high;
    uint8_t low_place, high_place;
} spikes;

/* Outward, so that no element is beyond a spike, in what is decoded as well; but not to infinity.
 */
static uint32_t cut_down(float x) {
    uint32_t bits = bits_of(x + 0.0f);
    bits += bits >> 31 ? 255 : 0;
    return (bits & INFINITE) == INFINITE ? 0xFF7FFF : bits >> 8;
}

static uint32_t cut_up(float x) {
    uint32_t bits = cut_down(-x);
    return bits ? bits ^ 0x800000 : 0;
}

static int is_among(const char *x, float value) {
    float eight[8];
    int found = 0;
    memcpy(eight, x, sizeof eight);
    for (int i = 0; i < 8; i++)
        found |= eight[i] == value;
    return found;
}

static uint8_t place_of(const char *x, size_t n, float value) {
    size_t i = 0;
    while (i + 8 <= n && !is_among(x + 4 * i, value))
        i += 8;
    for (; i < n; i++) {
        float there;
        memcpy(&there, x + 4 * i, 4);
        if (there == value)
            return (uint8_t)i;
    }
    return NO_PLACE;
}

/* Takes the spikes out of a group of n elements, where others stand for them. Returns whether any
 * others are left. */
static int take_spikes(char *rest, const char *x, size_t n, range r, spikes *s) {
    s->low_place = place_of(x, n, r.low);
    s->high_place = place_of(x, n, r.high);
    s->low = cut_down(r.low);
    s->high = cut_up(r.high);
    size_t other = 0;
    while (other < n && (other == s->low_place || other == s->high_place))
        other++;
    if (other == n)
        return 0;
    memcpy(rest, x, 4 * n);
    memcpy(rest + 4 * s->low_place, x + 4 * other, 4);
    memcpy(rest + 4 * s->high_place, x + 4 * other, 4);
    return 1;
}

/* The group that is left without its spikes; x itself where it has none. NULL: none
 * is. */
static const char *without_spikes(const lc_lowbit_format *f, char *room, const char *x, size_t n,
                                  spikes *s) {
    *s = (spikes){.low_place = NO_PLACE, .high_place = NO_PLACE};
    if (!f->spikes)
        return x;
    range r = range_of(f, x, n);
    if (r.special || r.low == r.high)
        return x;
    return take_spikes(room, x, n, r, s) ? room : NULL;
}

static header encode_group(const lc_lowbit_format *f, uint8_t *indices, const char *x, size_t n,
                           draws from, spikes *taken) {
    char room[LC_LOWBIT_GROUP * 4], rest[LC_LOWBIT_GROUP * 4];
    size_t lanes = lanes_of(n);
    scale s;
    header h = constant_header(0); /* where nothing is left */
    x = without_spikes(f, rest, x, n, taken);
    if (x) {
        x = filled(room, x, n);
        h = header_of(f->loops->find(x, lanes), f->bits, &s);
    }
    if (h.exponent == CONSTANT)
        memset(indices, 0, lanes);
    else if (f->stochastic && !s.coarse)
        f->loops->encode_stochastic(indices, x, lanes, &s, from);
    else
        f->loops->encode(indices, x, lanes, &s);
    memset(indices + n, 0, lanes - n);
    if (taken->low_place != NO_PLACE)
        indices[taken->low_place] = indices[taken->high_place] = 0;
    return h;
}

static void put_planes(uint8_t *const *plane, const uint8_t *indices, size_t at, size_t n,
                       unsigned bits) {
    switch (bits) { /* constant widths, which the compiler knows */
    case 8:
        memcpy(plane[0] + at, indices, n);
        return;
    case 6:
        lc_plane_put(plane[1] + at / 4, indices, n, 2, 4);
        break;
    case 5:
        lc_plane_put(plane[1] + at / 8, indices, n, 1, 4);
        break;
    case 3:
        lc_plane_put(plane[1] + at / 8, indices, n, 1, 2);
        break;
    }
    if (bits >= 4)
        lc_nibbles_put(plane[0] + at / 2, indices, n);
    else
        lc_plane_put(plane[0] + at / 4, indices, n, 2, 0);
}

static void put_header(uint8_t *headers, size_t groups, size_t g, header h) {
    memcpy(headers + 2 * g, &h.anchor, 2);
    memcpy(headers + 2 * (groups + g), &h.step, 2);
    headers[4 * groups + g] = h.exponent;
}

static void put_spikes(uint8_t *to, size_t groups, size_t g, spikes s) {
    memcpy(to + 3 * g, &s.low, 3);
    memcpy(to + 3 * (groups + g), &s.high, 3);
    to[6 * groups + g] = s.low_place;
    to[7 * groups + g] = s.high_place;
}

uint32_t lc_lowbit_encode(const lc_lowbit_format *f, uint8_t *dst, const char *src, size_t n,
                          uint64_t seed) {
    uint8_t indices[LC_LOWBIT_CHUNK];
    uint8_t *plane[2] = {dst, dst + lc_plane_bytes(n, planes_of(f->bits).width[0])};
    size_t groups = groups_of(f, n);
    uint8_t *headers = dst + planes_bytes(f->bits, n);
    uint32_t not_numbers = 0;
    for (size_t at = 0; at < n; at += LC_LOWBIT_CHUNK) {
        size_t here = n - at < LC_LOWBIT_CHUNK ? n - at : LC_LOWBIT_CHUNK;
        for (size_t i = 0; i < here; i += f->group) {
            size_t g = (at + i) / f->group;
            size_t members = here - i < f->group ? here - i : f->group;
            spikes taken;
            draws from = {(uint32_t)seed + (uint32_t)(at + i), (uint32_t)(seed >> 32)};
            header h = encode_group(f, indices + i, src + (at + i) * 4, members, from, &taken);
            put_header(headers, groups, g, h);
            not_numbers += is_not_a_number(h);
            if (f->spikes)
                put_spikes(headers + 5 * groups, groups, g, taken);
        }
        put_planes(plane, indices, at, here, f->bits);
    }
    return not_numbers;
}

/* ---- decode ---- */

static void get_planes(uint8_t *indices, const uint8_t *first, const uint8_t *second, size_t n,
                       unsigned bits) {
    if (bits == 8)
        memcpy(indices, first, n);
    else if (bits >= 4)
        lc_nibbles_get(indices, first, n);
    else
        lc_crumbs_get(indices, first, n, 0);
    if (bits == 6)
        lc_crumbs_get(indices, second, n, 4);
    else if (bits == 5)
        lc_bits_get(indices, second, n, 4);
    else if (bits == 3)
        lc_bits_get(indices, second, n, 2);
}

static header header_at(const lc_lowbit_packet *p, size_t g) {
    header h = {.exponent = p->exponents[g]};
    memcpy(&h.anchor, p->anchors + 2 * g, 2);
    memcpy(&h.step, p->steps + 2 * g, 2);
    return h;
}

static void fill(char *dst, uint32_t bits, size_t n) {
    for (size_t i = 0; i < n; i++)
        memcpy(dst + 4 * i, &bits, 4);
}

/* Whole registers, through a buffer where the group ends within one. */
static void decode_group(const lc_lowbit_format *f, header h, const uint8_t *indices, char *dst,
                         size_t n) {
    if (h.exponent == CONSTANT) {
        fill(dst, (uint32_t)h.anchor << 16 | h.step, n);
        return;
    }
    int16_t anchor = (int16_t)h.anchor;
    float part = power_of_two(1 - f->bits);
    grid g = {anchor, (float)h.step * (anchor < 0 ? -part : part), power_of_two(h.exponent - TOP)};
    size_t lanes = n / LANES_MOST * LANES_MOST;
    f->loops->decode(dst, indices, lanes, &g);
    if (lanes == n)
        return;
    char rest[LANES_MOST * 4];
    f->loops->decode(rest, indices + lanes, LANES_MOST, &g);
    memcpy(dst + 4 * lanes, rest, 4 * (n - lanes));
}

static float spike_at(const uint8_t *from, size_t g) {
    uint32_t bits = 0;
    memcpy((char *)&bits + 1, from + 3 * g, 3);
    return float_of(bits);
}

static void put_float(char *dst, size_t i, size_t n, float x) {
    if (i < n) /* a place beyond the group is nobody's */
        memcpy(dst + 4 * i, &x, 4);
}

/* A grid may end beyond the spikes, but no element does. */
static void decode_spikes(const lc_lowbit_packet *p, size_t g, char *dst, size_t n) {
    if (p->low_places[g] == NO_PLACE)
        return;
    float low = spike_at(p->lows, g), high = spike_at(p->highs, g);
    for (size_t i = 0; i < n; i++) {
        float x;
        memcpy(&x, dst + 4 * i, 4);
        x = x < low ? low : x;
        x = x > high ? high : x;
        memcpy(dst + 4 * i, &x, 4);
    }
    put_float(dst, p->low_places[g], n, low);
    put_float(dst, p->high_places[g], n, high);
}

size_t lc_lowbit_decode(const lc_lowbit_format *f, const lc_lowbit_packet *p, size_t at,
                        char *dst) {
    uint8_t indices[LC_LOWBIT_CHUNK + LANES_MOST] = {0};
    size_t n = p->n - at < LC_LOWBIT_CHUNK ? p->n - at : LC_LOWBIT_CHUNK;
    planes w = planes_of(f->bits);
    const uint8_t *second = p->planes + lc_plane_bytes(p->n, w.width[0]);
    get_planes(indices, p->planes + at * w.width[0] / 8, second + at * w.width[1] / 8, n, f->bits);
    for (size_t i = 0; i < n; i += f->group) {
        size_t members = n - i < f->group ? n - i : f->group;
        size_t g = (at + i) / f->group;
        decode_group(f, header_at(p, g), indices + i, dst + 4 * i, members);
        if (f->spikes)
            decode_spikes(p, g, dst + 4 * i, members);
    }
    return n;
}
