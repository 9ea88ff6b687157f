/* Fuzzes the parser of datagrams. The first byte of an input says what is put right about the rest,
 * so that the checks behind a checksum or a session are reached as well as those before them. */
/* The checksum is private to the file. */
#include "../../native/wire.c"

#include <stdio.h>
#include <stdlib.h>

#include "seal_kit.h"

enum repair {
    FIX_CHECKSUM = 1, /* always last, when asked for */
    FIX_MAGIC = 2,
    FIX_GROUP = 4,
    FIX_ENDS = 8,
    FIX_LENGTH = 16,
    FIX_TYPE = 32,
    FIX_RECORDS = 64,
    FIX_SEALED = 128
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const lc_expect expect = {.session = 0x0123456789ABCDEF,
                                 .process = 3,
                                 .processes = 9,
                                 .payload_bytes = 1024,
                                 .filter = 0x5EA1};

static unsigned long verdicts[3], records, sealed, opened;

/* What the first seals, the second opens; NULL: there is no libcrypto. */
static lc_sealing how = {.cipher = LC_AES_128_GCM, .filter = 0x5EA1};
static lc_seal *ends[2];

/* Fuzzing that never gets in has tested nothing. */
__attribute__((destructor)) static void report(void) {
    unsigned long total = verdicts[0] + verdicts[1] + verdicts[2];
    printf("fuzz_wire: %lu good, %lu malformed, %lu foreign; %lu records; %lu look sealed, %lu "
           "opened\n",
           verdicts[LC_GOOD], verdicts[LC_MALFORMED], verdicts[LC_FOREIGN], records, sealed,
           opened);
    if (total > 1000000 && (!verdicts[LC_GOOD] || !verdicts[LC_FOREIGN] || !records || !sealed))
        abort();
    if (total > 1000000 && ends[0] && !opened)
        abort();
}

static void must(int ok, const char *what) {
    if (ok)
        return;
    fprintf(stderr, "fuzz_wire: not true: %s\n", what);
    abort();
}

#define MUST(condition) must(condition, #condition)

static void put_right(uint8_t *p, size_t n, uint8_t what) {
    if (n < LC_HEADER_BYTES)
        return;
    size_t payload = n - LC_HEADER_BYTES;
    if (what & FIX_MAGIC) {
        put16(p, LC_MAGIC);
        p[2] = LC_WIRE_VERSION;
    }
    if (what & FIX_GROUP) {
        put64(p + 8, expect.session);
        put32(p + 40, 0x5A5A5A5A);
    }
    if (what & FIX_ENDS) {
        put16(p + 30, p[30] % (expect.processes + 1)); /* now and then no rank, or the receiver */
        put16(p + 32, expect.process);
    }
    if (what & FIX_TYPE)
        p[3] = (uint8_t)((p[3] & 0xF8) | (1 + (p[3] & TYPE) % LC_PARITY));
    if (what & FIX_LENGTH)
        put16(p + 34, (uint16_t)payload);
    if (what & FIX_RECORDS) {
        put16(p + 36, (uint16_t)(payload / LC_RECORD_BYTES));
        p[39] = (uint8_t)((p[39] & 0xF8) | (p[39] & 7) % (LC_MAX_FORMAT + 1));
        uint8_t encoding = (uint8_t)((p[3] & 0x78) >> ENCODING_SHIFT) % (LC_MAX_ENCODING + 1);
        p[3] = (uint8_t)((p[3] & (EAGER | TYPE)) | encoding << ENCODING_SHIFT);
        if (p[3] == LC_CONTROL)
            p[38] = p[39] = 0;
        else if ((p[3] & TYPE) == LC_PARITY || !p[38])
            p[39] |= FIRST;
        else if (!(p[39] & FIRST))
            p[39] &= FORMAT;
    }
    if (what & FIX_CHECKSUM)
        put32(p + OFFSET_CRC, checksum(p));
    if (what & FIX_SEALED) {
        p[2] |= SEALED;
        put16(p + 4, expect.filter);
    }
}

/* What a stranger made up isn't opened; no byte is written beyond what it would have had. */
static void check_refused(const uint8_t *p, size_t n) {
    static uint64_t now;
    uint8_t *to = malloc(n - LC_TAG_BYTES);
    if (ends[1] && to)
        MUST(lc_seal_take(ends[1], p, (uint32_t)n, expect.session, now += 100, to) != LC_GOOD);
    free(to);
}

/* What looks sealed is not a plain packet, and names a process that could have sent it. */
static void check_sealed(const uint8_t *p, size_t n) {
    uint16_t sender = 0xFFFF, epoch;
    if (lc_wire_outer(p, n, &expect, &sender) != LC_GOOD)
        return;
    lc_header header;
    sealed++;
    MUST(lc_wire_get(p, n, &expect, &header) == LC_MALFORMED);
    MUST(n >= LC_HEADER_BYTES + LC_TAG_BYTES);
    MUST(sender < expect.processes && sender != expect.process);
    uint8_t again[LC_HEADER_BYTES], plain[LC_HEADER_BYTES];
    memcpy(again, p, sizeof again);
    uint64_t number = lc_wire_number(p, &epoch);
    check_refused(p, n);
    lc_wire_seal(again, expect.filter, epoch, number);
    MUST(memcmp(again, p, sizeof again) == 0);
    memcpy(plain, p, sizeof plain);
    lc_wire_unseal(plain, expect.session);
    MUST(well_formed(plain, sizeof plain) && get64(plain + 8) == expect.session);
}

/* An accepted header keeps every promise that lc_wire_get makes, and says all that the bytes say.
 */
static void check_good(const uint8_t *p, size_t n, const lc_header *header) {
    MUST(n == LC_HEADER_BYTES + (size_t)header->length);
    MUST(header->length <= expect.payload_bytes);
    MUST(header->session == expect.session);
    int is_piece = header->type == LC_PIECE;
    int of_stream = header->type == LC_DATA || header->type == LC_PARITY;
    MUST(header->group || !of_stream);
    MUST(header->receiver == expect.process && header->sender != expect.process);
    MUST(header->sender < expect.processes);
    MUST(header->format <= LC_MAX_FORMAT && header->code < 0x1000);
    MUST(header->encoding <= (of_stream ? LC_MAX_ENCODING : 0));
    MUST(of_stream || is_piece || header->type == LC_CONTROL);
    MUST(!is_piece || (header->length && header->slot < header->count && header->count > 1));
    MUST(header->type == LC_PARITY || header->count >= 1);
    MUST(header->type != LC_DATA || header->count <= expect.processes);
    MUST(header->eager <= of_stream);
    MUST(!header->code || (of_stream && !header->round));
    uint8_t again[LC_HEADER_BYTES];
    lc_wire_put(again, header);
    MUST(memcmp(again, p, sizeof again) == 0);
}

static void check_record(const uint8_t *p) {
    lc_record record;
    memset(&record, 0xA5, sizeof record);
    lc_record before = record;
    if (lc_record_get(p, &record) != LC_GOOD) {
        MUST(memcmp(&record, &before, sizeof record) == 0);
        return;
    }
    records++;
    MUST(record.kind >= LC_R_READY && record.kind <= LC_R_LAST);
    uint8_t again[LC_RECORD_BYTES];
    lc_record_put(again, &record);
    MUST(memcmp(again, p, sizeof again) == 0);
}

static void check_datagram(const uint8_t *p, size_t n) {
    lc_header header;
    memset(&header, 0xA5, sizeof header);
    lc_header before = header;
    enum lc_verdict verdict = lc_wire_get(p, n, &expect, &header);
    verdicts[verdict]++;
    if (verdict != LC_GOOD) {
        MUST(memcmp(&header, &before, sizeof header) == 0);
        return;
    }
    check_good(p, n, &header);
    for (size_t i = 0; header.type == LC_CONTROL && i < header.count; i++)
        check_record(p + LC_HEADER_BYTES + i * LC_RECORD_BYTES);
}

/* Whatever is sealed comes out as it was, but for what sealing takes the place of: so what is read
 * then is what a member of the job may have made up. */
static void check_opened(const uint8_t *p, size_t n) {
    if (n < LC_HEADER_BYTES || !ends[0])
        return;
    uint8_t *out = malloc(n + LC_TAG_BYTES), *to = malloc(n);
    uint8_t header[LC_HEADER_BYTES];
    struct iovec pieces[2] = {{(void *)(uintptr_t)p, n}, {NULL, 0}};
    if (out && to) {
        MUST(lc_seal_put(ends[0], pieces, 1, out) == n + LC_TAG_BYTES);
        MUST(lc_seal_take(ends[1], out, (uint32_t)n + LC_TAG_BYTES, expect.session, 1, to) ==
             LC_GOOD);
        MUST(!memcmp(to + LC_HEADER_BYTES, p + LC_HEADER_BYTES, n - LC_HEADER_BYTES));
        memcpy(header, to, sizeof header);
        MUST(get64(header + 8) == expect.session);
        opened++;
        check_datagram(to, n);
    }
    free(out);
    free(to);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1)
        return 0;
    size_t n = size - 1;
    /* A buffer of just that size, so that ASan sees a read one byte beyond. */
    uint8_t *datagram = malloc(n ? n : 1);
    if (!datagram)
        return 0;
    memcpy(datagram, data + 1, n);
    if (!ends[0] && !lc_crypto_load(NULL))
        kit_open(&how, ends);
    put_right(datagram, n, data[0]);
    check_sealed(datagram, n);
    check_opened(datagram, n);
    size_t first = lc_wire_first(datagram, n);
    MUST(first == n || (first >= LC_HEADER_BYTES && first + LC_HEADER_BYTES <= n));
    check_datagram(datagram, first);
    if (first < n)
        check_datagram(datagram + first, n - first);
    if (n >= LC_RECORD_BYTES)
        check_record(datagram);
    free(datagram);
    return 0;
}
