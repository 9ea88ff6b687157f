/* The wire format: what is put is got back, and nothing else is. */
#include "check.h"
#include "lossycoll.h"

/* The checksum's implementations are compared, so the test sees inside the file. */
#include "../../native/wire.c"

#include <stdlib.h>

enum { PAYLOAD = 1400, ROOM = 65536 + LC_HEADER_BYTES };

static const lc_expect expect = {
    .session = 0x1122334455667788, .process = 2, .processes = 5, .payload_bytes = PAYLOAD};

static uint8_t packet[ROOM];

static lc_header data_header(void) {
    return (lc_header){.session = expect.session,
                       .link_seq = 0xA1A2A3A4,
                       .op = 0xB1B2B3B4,
                       .packet = 0xC1C2C3C4,
                       .group = 7,
                       .time_us = 0xD1D2D3D4,
                       .slot = 0xE1E2,
                       .sender = 4,
                       .receiver = expect.process,
                       .length = 1000,
                       .count = 3,
                       .type = LC_DATA,
                       .round = 0xF1,
                       .format = LC_BF16,
                       .encoding = LC_MAX_ENCODING};
}

static lc_header control_header(void) {
    lc_header header = data_header();
    header.type = LC_CONTROL;
    header.encoding = header.format = header.round = 0;
    header.count = 4;
    header.length = 4 * LC_RECORD_BYTES;
    return header;
}

static lc_header parity_header(void) {
    lc_header header = data_header();
    header.type = LC_PARITY;
    header.round = 0;
    header.code = 0xABC;
    header.count = 0; /* an even number of packets of one count */
    return header;
}

static int same(const lc_header *a, const lc_header *b) {
    return a->session == b->session && a->link_seq == b->link_seq && a->op == b->op &&
           a->packet == b->packet && a->group == b->group && a->time_us == b->time_us &&
           a->slot == b->slot && a->sender == b->sender && a->receiver == b->receiver &&
           a->length == b->length && a->count == b->count && a->type == b->type &&
           a->round == b->round && a->format == b->format && a->code == b->code &&
           a->eager == b->eager && a->encoding == b->encoding;
}

static enum lc_verdict verdict_of_bytes(size_t n) {
    lc_header seen;
    return lc_wire_get(packet, n, &expect, &seen);
}

/* The verdict on a whole datagram that begins with this header, its checksum right. */
static enum lc_verdict verdict_of(lc_header header) {
    lc_wire_put(packet, &header);
    return verdict_of_bytes(LC_HEADER_BYTES + (size_t)header.length);
}

static void set_checksum(void) {
    put32(packet + OFFSET_CRC, checksum(packet));
}

static uint32_t crc_by_bits(const uint8_t *p, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n * 8; i++) {
        uint32_t bit = (crc ^ p[i / 8] >> i % 8) & 1;
        crc = crc >> 1 ^ (bit ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static void test_checksum(void) {
    CHECK(crc_by_bits((const uint8_t *)"123456789", 9) ==
          0xE3069283); /* the published check value */
    uint8_t bytes[LC_HEADER_BYTES + 1];
    for (uint32_t seed = 0; seed < 100; seed++) {
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)((seed * 2654435761u + i * 40503u) >> 7);
        uint64_t words[WORDS];
        for (size_t i = 0; i < WORDS; i++)
            words[i] = get64(bytes + 1 + 8 * i); /* misaligned on purpose */
        CHECK(~crc_plain(~0u, words, WORDS) == crc_by_bits(bytes + 1, LC_HEADER_BYTES));
        CHECK(crc_of(words) == crc_by_bits(bytes + 1, LC_HEADER_BYTES));
        CHECK(lc_records_check(bytes + 1, 1) == crc_by_bits(bytes + 1, LC_RECORD_BYTES));
        uint32_t of_any = checksum(bytes + 1);
        memset(bytes + 1 + OFFSET_CRC, 0, 4);
        CHECK(of_any == crc_by_bits(bytes + 1, LC_HEADER_BYTES));
    }
}

static void test_layout(void) {
    static const uint8_t bytes[] = {
        0x43, 0x4C, 8,    0x41, 0,    0,    0,    0,    /* magic version kind crc */
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, /* session */
        0xA4, 0xA3, 0xA2, 0xA1, 0xB4, 0xB3, 0xB2, 0xB1, /* link_seq op */
        0xC4, 0xC3, 0xC2, 0xC1, 0xE2, 0xE1, 4,    0,    /* packet slot sender */
        2,    0,    0xE8, 3,    3,    0,    0xF1, 3,    /* receiver length count round format */
        7,    0,    0,    0,    0xD4, 0xD3, 0xD2, 0xD1, /* group time_us */
    };
    lc_header header = data_header();
    lc_wire_put(packet, &header);
    CHECK(get32(packet + OFFSET_CRC) == crc_by_bits(bytes, sizeof bytes));
    put32(packet + OFFSET_CRC, 0);
    CHECK(sizeof bytes == LC_HEADER_BYTES && memcmp(packet, bytes, sizeof bytes) == 0);
}

static void test_round_trip(void) {
    lc_header headers[] = {data_header(), control_header(), parity_header()};
    for (size_t i = 0; i < 3; i++)
        for (size_t shift = 0; shift < 8; shift++) {
            lc_header seen = {0};
            size_t n = LC_HEADER_BYTES + (size_t)headers[i].length;
            lc_wire_put(packet + shift, &headers[i]);
            CHECK(lc_wire_get(packet + shift, n, &expect, &seen) == LC_GOOD);
            CHECK(same(&seen, &headers[i]));
        }
}

static lc_header h; /* the header that the next few tests change */

static void test_foreign(void) {
    h = data_header(), h.session ^= 1;
    CHECK(verdict_of(h) == LC_FOREIGN);
    h = data_header(), h.session ^= (uint64_t)1 << 63;
    CHECK(verdict_of(h) == LC_FOREIGN);
    h = data_header(), h.receiver = 1;
    CHECK(verdict_of(h) == LC_FOREIGN);
    h = data_header(), h.sender = expect.processes;
    CHECK(verdict_of(h) == LC_FOREIGN);
    h = data_header(), h.sender = 0xFFFF;
    CHECK(verdict_of(h) == LC_FOREIGN);
    h = data_header(), h.sender = expect.process;
    CHECK(verdict_of(h) == LC_FOREIGN);
    /* Another job's larger packets are not malformed. */
    h = data_header(), h.session++, h.length = PAYLOAD + 8, h.count = 100;
    CHECK(verdict_of(h) == LC_FOREIGN);
}

static void test_data_shape(void) {
    h = data_header(), h.type = 0;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.type = 4;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.eager = 1;
    CHECK(verdict_of(h) == LC_GOOD && h.eager);
    h = data_header(), h.format = LC_MAX_FORMAT;
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.format = LC_MAX_FORMAT + 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.encoding = 0;
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.encoding = LC_MAX_ENCODING + 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.encoding = 15;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.length = PAYLOAD;
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.length = PAYLOAD + 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.length = 0;
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.count = 0;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = data_header(), h.group++; /* whether the group is here is for the host to look up */
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.group = 0;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = parity_header(), h.group = 0;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.group = 0; /* about the path */
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.count = expect.processes;
    CHECK(verdict_of(h) == LC_GOOD);
    h = data_header(), h.count = (uint16_t)(expect.processes + 1);
    CHECK(verdict_of(h) == LC_MALFORMED);
}

/* The verdict on a packet whose bytes for round and format are these. */
static enum lc_verdict verdict_with(lc_header header, uint8_t round, uint8_t format) {
    lc_wire_put(packet, &header);
    packet[38] = round;
    packet[39] = format;
    set_checksum();
    return verdict_of_bytes(LC_HEADER_BYTES + (size_t)header.length);
}

/* Only the first round has parity, and parity always says of which kind it is. */
static void test_parity_shape(void) {
    lc_header seen;
    h = data_header(), h.round = 0, h.code = 0xFFF;
    CHECK(verdict_of(h) == LC_GOOD);
    CHECK(packet[38] == 0xFF && packet[39] == (0xF0 | FIRST | LC_BF16));
    h = data_header(), h.round = 1, h.code = 0xFFF; /* there is no room for it */
    lc_wire_put(packet, &h);
    CHECK(lc_wire_get(packet, LC_HEADER_BYTES + (size_t)h.length, &expect, &seen) == LC_GOOD);
    CHECK(seen.round == 1 && seen.code == 0);
    for (uint32_t format = 0; format < 256; format++) {
        int known = (format & FORMAT) <= LC_MAX_FORMAT, first = (format & FIRST) != 0;
        int high = format >> CODE_SHIFT != 0;
        for (uint8_t round = 0; round < 3; round++) {
            int good = known && (first || (round && !high));
            CHECK_AT(verdict_with(data_header(), round, (uint8_t)format) ==
                         (good ? LC_GOOD : LC_MALFORMED),
                     "format %u, round %u", format, round);
            good = known && first && (round || high);
            CHECK_AT(verdict_with(parity_header(), round, (uint8_t)format) ==
                         (good ? LC_GOOD : LC_MALFORMED),
                     "format %u, round %u", format, round);
            good = !format && !round;
            CHECK_AT(verdict_with(control_header(), round, (uint8_t)format) ==
                         (good ? LC_GOOD : LC_MALFORMED),
                     "format %u, round %u", format, round);
        }
    }
    h = parity_header(), h.round = 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = parity_header(), h.code = 0;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = parity_header(), h.count = 0xFFFF; /* the engine looks at what comes out of it */
    CHECK(verdict_of(h) == LC_GOOD);
    h = parity_header(), h.length = PAYLOAD + 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.eager = 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.encoding = 1;
    CHECK(verdict_of(h) == LC_MALFORMED);
}

static void test_control_shape(void) {
    h = control_header(), h.count = 3;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.count = 5;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.count = 0, h.length = 0;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.length--;
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(),
    h.count = PAYLOAD / LC_RECORD_BYTES, /* more than the size is right here */
        h.length = (uint16_t)(h.count * LC_RECORD_BYTES);
    CHECK(verdict_of(h) == LC_GOOD);
    h.count++, h.length = (uint16_t)(h.count * LC_RECORD_BYTES);
    CHECK(verdict_of(h) == LC_MALFORMED);
    h = control_header(), h.count = 2048 + 4; /* 32 * count wraps to length in 16 bits */
    CHECK(verdict_of(h) == LC_MALFORMED);
}

static void test_lengths(void) {
    lc_header headers[] = {data_header(), control_header()};
    for (size_t i = 0; i < 2; i++) {
        lc_wire_put(packet, &headers[i]);
        size_t whole = LC_HEADER_BYTES + (size_t)headers[i].length;
        for (size_t n = 0; n < whole + 64; n++)
            CHECK_AT(verdict_of_bytes(n) == (n == whole ? LC_GOOD : LC_MALFORMED), "n %zu", n);
        CHECK(verdict_of_bytes(whole + 65536) == LC_MALFORMED);
    }
}

/* What follows a control packet in its datagram is a packet of its own. */
static void test_two_in_one(void) {
    lc_header headers[] = {control_header(), data_header()};
    size_t whole[] = {LC_HEADER_BYTES + (size_t)headers[0].length,
                      LC_HEADER_BYTES + (size_t)headers[1].length};
    lc_wire_put(packet, &headers[0]);
    for (size_t n = 0; n < whole[0] + 2 * LC_HEADER_BYTES; n++)
        CHECK_AT(lc_wire_first(packet, n) == (n < whole[0] + LC_HEADER_BYTES ? n : whole[0]),
                 "n %zu", n);
    lc_wire_put(packet, &headers[1]);
    CHECK(lc_wire_first(packet, whole[1] + whole[0]) == whole[1] + whole[0]);
    headers[0].length = 65535;
    lc_wire_put(packet, &headers[0]);
    CHECK(lc_wire_first(packet, 65535) == 65535);
}

/* A datagram shorter than a header must not be read past its end: ASan watches the buffer. */
static void test_short_buffers(void) {
    lc_header header = data_header(), seen;
    uint8_t whole[LC_HEADER_BYTES];
    lc_wire_put(whole, &header);
    for (size_t n = 0; n < LC_HEADER_BYTES; n++) {
        uint8_t *exact = malloc(n ? n : 1);
        if (!CHECK(exact != NULL))
            return;
        memcpy(exact, whole, n);
        CHECK(lc_wire_get(exact, n, &expect, &seen) == LC_MALFORMED);
        free(exact);
    }
}

static void test_bit_flips(void) {
    lc_header headers[] = {data_header(), control_header()};
    for (size_t i = 0; i < 2; i++) {
        lc_wire_put(packet, &headers[i]);
        size_t n = LC_HEADER_BYTES + (size_t)headers[i].length;
        for (size_t bit = 0; bit < LC_HEADER_BYTES * 8; bit++) {
            packet[bit / 8] ^= (uint8_t)(1 << bit % 8);
            CHECK_AT(verdict_of_bytes(n) == LC_MALFORMED, "bit %zu", bit);
            packet[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        CHECK(verdict_of_bytes(n) == LC_GOOD);
    }
}

/* The same flips under a right checksum: refused, or said by a field that has no wrong values. */
static void test_flips_behind_the_checksum(void) {
    lc_header header = data_header(), seen;
    size_t n = LC_HEADER_BYTES + (size_t)header.length;
    for (size_t bit = 0; bit < LC_HEADER_BYTES * 8; bit++) {
        size_t byte = bit / 8;
        if (byte >= OFFSET_CRC && byte < OFFSET_CRC + 4)
            continue;
        lc_wire_put(packet, &header);
        packet[byte] ^= (uint8_t)(1 << bit % 8);
        set_checksum();
        enum lc_verdict verdict = lc_wire_get(packet, n, &expect, &seen);
        int is_magic_version = byte < 3, is_session = byte >= 8 && byte < 16;
        int is_receiver = byte == 32 || byte == 33, is_length = byte == 34 || byte == 35;
        int is_group = byte >= 40 && byte < 44;
        if (is_magic_version || is_length)
            CHECK_AT(verdict == LC_MALFORMED, "bit %zu", bit);
        if (is_session || is_receiver)
            CHECK_AT(verdict == LC_FOREIGN, "bit %zu", bit);
        if (is_group) /* for the host to look up */
            CHECK_AT(verdict == LC_GOOD && seen.group != header.group, "bit %zu", bit);
        if (verdict == LC_GOOD)
            CHECK_AT(!same(&seen, &header), "bit %zu", bit);
    }
}

static void test_refused_leaves_no_trace(void) {
    lc_header before = control_header(), seen = before;
    h = data_header(), h.session++;
    lc_wire_put(packet, &h);
    CHECK(lc_wire_get(packet, LC_HEADER_BYTES + (size_t)h.length, &expect, &seen) == LC_FOREIGN);
    CHECK(same(&seen, &before));
}

static void test_records(void) {
    for (int kind = 0; kind < 256; kind++) {
        lc_record put = {.c = 0x0102030405060708,
                         .d = 0x1112131415161718,
                         .op = 0x21222324,
                         .a = 0x31323334,
                         .b = 0x41424344,
                         .slot = 0x5152,
                         .kind = (uint8_t)kind,
                         .round = 0x61};
        lc_record got = {0};
        lc_record_put(packet + 1, &put);
        int known = kind >= LC_R_READY && kind <= LC_R_LAST;
        CHECK_AT(lc_record_get(packet + 1, &got) == (known ? LC_GOOD : LC_MALFORMED), "%d", kind);
        if (known)
            CHECK(got.c == put.c && got.d == put.d && got.op == put.op && got.a == put.a &&
                  got.b == put.b && got.slot == put.slot && got.kind == put.kind &&
                  got.round == put.round);
    }
    static const uint8_t bytes[LC_RECORD_BYTES] = {0,    0x61, 0x52, 0x51, 0x24, 0x23, 0x22, 0x21,
                                                   0x34, 0x33, 0x32, 0x31, 0x44, 0x43, 0x42, 0x41,
                                                   8,    7,    6,    5,    4,    3,    2,    1,
                                                   0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11};
    CHECK(memcmp(packet + 2, bytes + 1, sizeof bytes - 1) == 0);
}

int main(void) {
    test_checksum();
    test_layout();
    test_round_trip();
    test_foreign();
    test_data_shape();
    test_parity_shape();
    test_control_shape();
    test_lengths();
    test_two_in_one();
    test_short_buffers();
    test_bit_flips();
    test_flips_behind_the_checksum();
    test_refused_leaves_no_trace();
    test_records();
    return check_result("wire");
}
