/* Headers and records to bytes and back; nothing unchecked gets past lc_wire_get. */
#include "wire.h"

#include <string.h>

#include "lossycoll.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32) && !defined(__AARCH64EB__)
#include <arm_acle.h>
#endif

/* ---- little-endian fields, whatever the host and the alignment ---- */

static void put16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static void put32(uint8_t *p, uint32_t v) {
    put16(p, (uint16_t)v);
    put16(p + 2, (uint16_t)(v >> 16));
}

static void put64(uint8_t *p, uint64_t v) {
    put32(p, (uint32_t)v);
    put32(p + 4, (uint32_t)(v >> 32));
}

static uint16_t get16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t get32(const uint8_t *p) {
    return get16(p) | (uint32_t)get16(p + 2) << 16;
}

static uint64_t get64(const uint8_t *p) {
    return get32(p) | (uint64_t)get32(p + 4) << 32;
}

/* ---- CRC32C of a header, and of records ----
 *
 * It is computed from words, which stay in registers: bytes that were just written one by one can't
 * be read as a word before all that was stored earlier has left the processor, and that is what was
 * summed or copied of the packet before. */

enum {
    OFFSET_CRC = 4,
    WORDS = LC_HEADER_BYTES / 8,
    FORMAT = 0x07,
    FIRST = 0x08, /* of the first round */
    CODE_SHIFT = 4,
    TYPE = 0x07,
    ENCODING_SHIFT = 3,
    EAGER = 0x80,
    SEALED = 0x80
};

static uint32_t crc_table[256];

/* Before main and before any thread, so that the table needs no lock. */
__attribute__((constructor)) static void make_crc_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        crc_table[i] = crc;
    }
}

static uint32_t crc_plain(uint32_t crc, const uint64_t *words, int n) {
    for (int i = 0; i < 8 * n; i++)
        crc = crc >> 8 ^ crc_table[(crc ^ (uint32_t)(words[i / 8] >> (i % 8 * 8))) & 0xFF];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2,crc32"))) static uint32_t crc_sse42(uint32_t before,
                                                                  const uint64_t *words, int n) {
    uint64_t crc = before;
    for (int i = 0; i < n; i++)
        crc = _mm_crc32_u64(crc, words[i]);
    return (uint32_t)crc;
}
#elif defined(__ARM_FEATURE_CRC32) && !defined(__AARCH64EB__)
static uint32_t crc_arm(uint32_t crc, const uint64_t *words, int n) {
    for (int i = 0; i < n; i++)
        crc = __crc32cd(crc, words[i]);
    return crc;
}
#endif

/* The processor is asked once, when the program loads; here it is a load and a predicted branch. */
static uint32_t crc_on(uint32_t crc, const uint64_t *words, int n) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2"))
        return crc_sse42(crc, words, n);
#elif defined(__ARM_FEATURE_CRC32) && !defined(__AARCH64EB__)
    return crc_arm(crc, words, n);
#endif
    return crc_plain(crc, words, n);
}

static uint32_t crc_of(const uint64_t words[WORDS]) {
    return ~crc_on(~0u, words, WORDS);
}

/* Of a header as if its checksum were 0. */
static uint32_t checksum(const uint8_t *src) {
    uint64_t words[WORDS];
    words[0] = get32(src);
    for (int i = 1; i < WORDS; i++)
        words[i] = get64(src + (size_t)i * 8);
    return crc_of(words);
}

/* ---- headers ---- */

void lc_wire_put(uint8_t *dst, const lc_header *header) {
    uint8_t kind =
        (uint8_t)(header->type | header->encoding << ENCODING_SHIFT | (header->eager ? EAGER : 0));
    int first = (header->type == LC_DATA || header->type == LC_PARITY) && !header->round;
    uint8_t format =
        (uint8_t)(header->format | (first ? FIRST | header->code >> 8 << CODE_SHIFT : 0));
    uint8_t round = first ? (uint8_t)header->code : header->round;
    uint64_t words[WORDS] = {
        LC_MAGIC | LC_WIRE_VERSION << 16 | (uint64_t)kind << 24,
        header->session,
        header->link_seq | (uint64_t)header->op << 32,
        header->packet | (uint64_t)header->slot << 32 | (uint64_t)header->sender << 48,
        header->receiver | (uint64_t)header->length << 16 | (uint64_t)header->count << 32 |
            (uint64_t)round << 48 | (uint64_t)format << 56,
        header->group | (uint64_t)header->time_us << 32};
    words[0] |= (uint64_t)crc_of(words) << (8 * OFFSET_CRC);
    for (int i = 0; i < WORDS; i++)
        put64(dst + (size_t)i * 8, words[i]);
}

static void read_fields(const uint8_t *src, lc_header *header) {
    header->type = src[3] & TYPE;
    header->encoding = (uint8_t)((src[3] & ~EAGER) >> ENCODING_SHIFT);
    header->eager = (src[3] & EAGER) != 0;
    header->session = get64(src + 8);
    header->link_seq = get32(src + 16);
    header->op = get32(src + 20);
    header->packet = get32(src + 24);
    header->slot = get16(src + 28);
    header->sender = get16(src + 30);
    header->receiver = get16(src + 32);
    header->length = get16(src + 34);
    header->count = get16(src + 36);
    uint32_t high = src[39] >> CODE_SHIFT;
    header->format = src[39] & FORMAT;
    header->round = src[39] & FIRST ? 0 : src[38];
    header->code = src[39] & FIRST ? (uint16_t)(src[38] | high << 8) : 0;
    header->group = get32(src + 40);
    header->time_us = get32(src + 44);
}

size_t lc_wire_first(const uint8_t *src, size_t n) {
    if (n < 2 * LC_HEADER_BYTES || src[3] != LC_CONTROL)
        return n;
    size_t first = LC_HEADER_BYTES + (size_t)get16(src + 34);
    return first + LC_HEADER_BYTES <= n ? first : n;
}

/* True of a datagram that is a packet of this version, intact, whoever it is for. */
static int well_formed(const uint8_t *src, size_t n) {
    return n >= LC_HEADER_BYTES && get16(src) == LC_MAGIC && src[2] == LC_WIRE_VERSION &&
           get32(src + OFFSET_CRC) == checksum(src);
}

static int is_ours(const lc_header *header, const lc_expect *expect) {
    return header->session == expect->session && header->receiver == expect->process &&
           header->sender < expect->processes && header->sender != expect->process;
}

/* Of data: either of the first round, or with the number of another one and no code. */
static int has_round(const uint8_t *src, const lc_header *header) {
    return src[39] & FIRST || (header->round && !(src[39] >> CODE_SHIFT));
}

/* A record about the path, and nothing behind it. */
static int is_probe(const lc_header *header) {
    return !header->group && header->count == 1 && header->length > LC_RECORD_BYTES;
}

/* Whether the fields that describe the payload agree with it and with each other. */
static int has_shape(const uint8_t *src, const lc_header *header, size_t payload) {
    if (header->length != payload || header->format > LC_MAX_FORMAT ||
        header->encoding > LC_MAX_ENCODING)
        return 0;
    switch (header->type) {
    case LC_CONTROL:
        return header->count && !src[38] && !src[39] && !header->eager && !header->encoding &&
               (header->length == (uint32_t)header->count * LC_RECORD_BYTES || is_probe(header));
    case LC_PIECE:
        return header->length && header->count > 1 && header->slot < header->count && !src[38] &&
               !src[39] && !header->eager && !header->encoding;
    case LC_DATA:
        return header->count && header->group && has_round(src, header);
    case LC_PARITY:
        return header->code && header->group;
    default:
        return 0;
    }
}

/* Whether the header stays within what the processes agreed on. */
static int in_range(const lc_header *header, const lc_expect *expect) {
    int believable = header->type != LC_DATA || header->count <= expect->processes;
    return believable && header->length <= expect->payload_bytes;
}

/* Foreign is asked before the ranges: another job may have larger packets and more ranks, and is
 * then foreign, not malformed. */
enum lc_verdict lc_wire_get(const uint8_t *src, size_t n, const lc_expect *expect,
                            lc_header *header) {
    if (!well_formed(src, n))
        return LC_MALFORMED;
    lc_header seen;
    read_fields(src, &seen);
    if (!has_shape(src, &seen, n - LC_HEADER_BYTES))
        return LC_MALFORMED;
    if (!is_ours(&seen, expect))
        return LC_FOREIGN;
    if (!in_range(&seen, expect))
        return LC_MALFORMED;
    *header = seen;
    return LC_GOOD;
}

/* ---- sealed ---- */

enum lc_verdict lc_wire_outer(const uint8_t *src, size_t n, const lc_expect *expect,
                              uint16_t *sender) {
    if (n < LC_HEADER_BYTES + LC_TAG_BYTES || get16(src) != LC_MAGIC ||
        src[2] != (LC_WIRE_VERSION | SEALED))
        return LC_MALFORMED;
    *sender = get16(src + 30);
    if (get16(src + 4) != expect->filter || get16(src + 32) != expect->process ||
        *sender >= expect->processes || *sender == expect->process)
        return LC_FOREIGN;
    return LC_GOOD;
}

uint64_t lc_wire_number(const uint8_t *src, uint16_t *epoch) {
    *epoch = get16(src + 6);
    return get64(src + 8);
}

void lc_wire_seal(uint8_t *header, uint16_t filter, uint16_t epoch, uint64_t number) {
    header[2] = LC_WIRE_VERSION | SEALED;
    put16(header + 4, filter);
    put16(header + 6, epoch);
    put64(header + 8, number);
}

void lc_wire_unseal(uint8_t *header, uint64_t session) {
    header[2] = LC_WIRE_VERSION;
    put64(header + 8, session);
    put32(header + OFFSET_CRC, 0);
    put32(header + OFFSET_CRC, checksum(header));
}

/* ---- records: u8 kind, u8 round, u16 slot, u32 op, u32 a, u32 b, u64 c, u64 d ---- */

void lc_record_put(uint8_t *dst, const lc_record *record) {
    dst[0] = record->kind;
    dst[1] = record->round;
    put16(dst + 2, record->slot);
    put32(dst + 4, record->op);
    put32(dst + 8, record->a);
    put32(dst + 12, record->b);
    put64(dst + 16, record->c);
    put64(dst + 24, record->d);
}

uint32_t lc_records_check(const uint8_t *records, uint32_t n) {
    uint32_t crc = ~0u;
    for (uint32_t i = 0; i < n; i++, records += LC_RECORD_BYTES) {
        uint64_t words[LC_RECORD_BYTES / 8];
        for (int k = 0; k < LC_RECORD_BYTES / 8; k++)
            words[k] = get64(records + (size_t)k * 8);
        crc = crc_on(crc, words, LC_RECORD_BYTES / 8);
    }
    return ~crc;
}

enum lc_verdict lc_record_get(const uint8_t *from, lc_record *record) {
    uint8_t src[LC_RECORD_BYTES]; /* in shared memory its sender can still write it */
    memcpy(src, from, sizeof src);
    if (src[0] < LC_R_READY || src[0] > LC_R_LAST)
        return LC_MALFORMED;
    record->kind = src[0];
    record->round = src[1];
    record->slot = get16(src + 2);
    record->op = get32(src + 4);
    record->a = get32(src + 8);
    record->b = get32(src + 12);
    record->c = get64(src + 16);
    record->d = get64(src + 24);
    return LC_GOOD;
}
