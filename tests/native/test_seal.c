/* Sealing by itself: published vectors, what is opened again, and what is not. */
#include "check.h"
#include "lossycoll.h"
#include "seal_kit.h"

#include <stdlib.h>

enum { PAYLOAD = KIT_PAYLOAD, ROOM = LC_HEADER_BYTES + LC_TAG_BYTES + PAYLOAD };

static uint8_t payload[PAYLOAD], plain[ROOM];
static uint64_t now_ns = 1; /* of who opens */

/* Two ends of a path: what `a` seals, `b` opens. */
typedef struct {
    lc_sealing how;
    lc_seal *a, *b;
} ends;

static void ends_open(ends *e, int cipher, int clear) {
    lc_seal *both[2];
    *e = (ends){.how = {.cipher = (uint8_t)cipher, .clear = (uint8_t)clear, .filter = KIT_FILTER}};
    kit_open(&e->how, both);
    e->a = both[0];
    e->b = both[1];
}

static void ends_close(ends *e) {
    lc_seal_close(e->a);
    lc_seal_close(e->b);
}

/* Seals a packet of so many bytes; returns the datagram's. */
static uint32_t put(ends *e, uint32_t packet, uint32_t bytes, uint64_t now, uint8_t *to) {
    lc_header h = kit_header(packet, bytes);
    lc_wire_put(plain, &h);
    struct iovec pieces[2] = {{plain, LC_HEADER_BYTES}, {payload, bytes}};
    return lc_seal_put(e->a, pieces, now, to);
}

/* LC_GOOD only if the packet that was sealed is one of ours, too. */
static enum lc_verdict take(ends *e, const uint8_t *from, uint32_t n, uint8_t *to, lc_header *h) {
    enum lc_verdict verdict = kit_take(e->b, from, n, now_ns, to);
    return verdict == LC_GOOD ? lc_wire_get(to, n - LC_TAG_BYTES, &kit_expect, h) : verdict;
}

static enum lc_verdict verdict_on(ends *e, const uint8_t *from, uint32_t n) {
    static uint8_t to[ROOM];
    lc_header h;
    return take(e, from, n, to, &h);
}

/* Test case 1 of RFC 5869, from its PRK on. */
static void test_hkdf(void) {
    static const uint8_t prk[] = {0x07, 0x77, 0x09, 0x36, 0x2c, 0x2e, 0x32, 0xdf, 0x0d, 0xdc, 0x3f,
                                  0x0d, 0xc4, 0x7b, 0xba, 0x63, 0x90, 0xb6, 0xc7, 0x3b, 0xb5, 0x0f,
                                  0x9c, 0x31, 0x22, 0xec, 0x84, 0x4a, 0xd7, 0xc2, 0xb3, 0xe5};
    static const uint8_t info[] = {0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9};
    static const uint8_t okm[] = {0x3c, 0xb2, 0x5f, 0x25, 0xfa, 0xac, 0xd5, 0x7a, 0x90, 0x43, 0x4f,
                                  0x64, 0xd0, 0x36, 0x2f, 0x2a, 0x2d, 0x2d, 0x0a, 0x90, 0xcf, 0x1a,
                                  0x5a, 0x4c, 0x5d, 0xb0, 0x2d, 0x56, 0xec, 0xc4, 0xc5, 0xbf, 0x34,
                                  0x00, 0x72, 0x08, 0xd5, 0xb8, 0x87, 0x18, 0x58, 0x65};
    uint8_t out[sizeof okm];
    CHECK(lc_hkdf_expand(prk, info, sizeof info, out, sizeof out));
    CHECK(!memcmp(out, okm, sizeof okm));
    CHECK(!lc_hkdf_expand(prk, info, 65, out, sizeof out));
    CHECK(!lc_hkdf_expand(prk, info, sizeof info, out, 65));
}

/* Test case 4 of the GCM specification (McGrew, Viega). */
static void test_gcm(void) {
    static const uint8_t key[LC_SECRET_BYTES] = {0xfe, 0xff, 0xe9, 0x92, 0x86, 0x65, 0x73, 0x1c,
                                                 0x6d, 0x6a, 0x8f, 0x94, 0x67, 0x30, 0x83, 0x08};
    static const uint8_t iv[] = {0xca, 0xfe, 0xba, 0xbe, 0xfa, 0xce,
                                 0xdb, 0xad, 0xde, 0xca, 0xf8, 0x88};
    static uint8_t text[] = {
        0xd9, 0x31, 0x32, 0x25, 0xf8, 0x84, 0x06, 0xe5, 0xa5, 0x59, 0x09, 0xc5, 0xaf, 0xf5, 0x26,
        0x9a, 0x86, 0xa7, 0xa9, 0x53, 0x15, 0x34, 0xf7, 0xda, 0x2e, 0x4c, 0x30, 0x3d, 0x8a, 0x31,
        0x8a, 0x72, 0x1c, 0x3c, 0x0c, 0x95, 0x95, 0x68, 0x09, 0x53, 0x2f, 0xcf, 0x0e, 0x24, 0x49,
        0xa6, 0xb5, 0x25, 0xb1, 0x6a, 0xed, 0xf5, 0xaa, 0x0d, 0xe6, 0x57, 0xba, 0x63, 0x7b, 0x39};
    static uint8_t known[] = {0xfe, 0xed, 0xfa, 0xce, 0xde, 0xad, 0xbe, 0xef, 0xfe, 0xed,
                              0xfa, 0xce, 0xde, 0xad, 0xbe, 0xef, 0xab, 0xad, 0xda, 0xd2};
    static const uint8_t sealed[] = {
        0x42, 0x83, 0x1e, 0xc2, 0x21, 0x77, 0x74, 0x24, 0x4b, 0x72, 0x21, 0xb7, 0x84, 0xd0, 0xd4,
        0x9c, 0xe3, 0xaa, 0x21, 0x2f, 0x2c, 0x02, 0xa4, 0xe0, 0x35, 0xc1, 0x7e, 0x23, 0x29, 0xac,
        0xa1, 0x2e, 0x21, 0xd5, 0x14, 0xb2, 0x54, 0x66, 0x93, 0x1c, 0x7d, 0x8f, 0x6a, 0x5a, 0xac,
        0x84, 0xaa, 0x05, 0x1b, 0xa3, 0x0b, 0x39, 0x6a, 0x0a, 0xac, 0x97, 0x3d, 0x58, 0xe0, 0x91};
    static const uint8_t tag[] = {0x5b, 0xc9, 0x4f, 0xbc, 0x32, 0x21, 0xa5, 0xdb,
                                  0x94, 0xfa, 0xe9, 0x5a, 0xe7, 0x12, 0x1a, 0x47};
    uint8_t out[sizeof text], got[LC_TAG_BYTES];
    struct iovec header = {known, sizeof known};
    /* in two pieces, the first of no whole number of blocks */
    struct iovec pieces[2] = {{text, 23}, {text + 23, sizeof text - 23}};
    lc_aead *seals = lc_aead_open(LC_AES_128_GCM, 1, key);
    lc_aead *opens = lc_aead_open(LC_AES_128_GCM, 0, key);
    for (int again = 0; again < 2; again++) {
        CHECK(lc_aead_seal(seals, iv, header, pieces, 2, out, got));
        CHECK(!memcmp(out, sealed, sizeof out) && !memcmp(got, tag, sizeof got));
        CHECK(lc_aead_open_sealed(opens, iv, header, sealed, sizeof sealed, out, tag));
        CHECK(!memcmp(out, text, sizeof out));
        got[3] ^= 1;
        CHECK(!lc_aead_open_sealed(opens, iv, header, sealed, sizeof sealed, out, got));
    }
    lc_aead_close(seals);
    lc_aead_close(opens);
    CHECK(!lc_aead_open(LC_CIPHER_NONE, 1, key));
    CHECK(!lc_aead_open(LC_CIPHERS, 1, key));
}

/* Whether n bytes of the payload, from some place on, are in the datagram. */
static int shows(const uint8_t *datagram, uint32_t n, uint32_t some) {
    for (uint32_t at = 0; at + some <= n; at++)
        for (uint32_t k = 0; k + some <= PAYLOAD; k += some)
            if (!memcmp(datagram + at, payload + k, some))
                return 1;
    return 0;
}

static void test_opened_again(int cipher, int clear) {
    static const uint32_t sizes[] = {0, 1, 15, 16, 17, 64, 1000, PAYLOAD};
    uint8_t out[ROOM], to[ROOM];
    ends e;
    ends_open(&e, cipher, clear);
    CHECK(e.a && e.b);
    for (uint32_t i = 0; e.a && e.b && i < sizeof sizes / sizeof *sizes; i++) {
        uint32_t bytes = sizes[i];
        uint32_t n = put(&e, i, bytes, 1, out);
        lc_header h = {.type = 0};
        CHECK(n == LC_HEADER_BYTES + LC_TAG_BYTES + bytes);
        CHECK(take(&e, out, n, to, &h) == LC_GOOD);
        CHECK(!memcmp(to, plain, LC_HEADER_BYTES) && !memcmp(to + LC_HEADER_BYTES, payload, bytes));
        CHECK(h.packet == i && h.length == bytes && h.session == KIT_SESSION);
        CHECK(bytes < 64 || shows(out, n, 8) == clear);
    }
    ends_close(&e);
}

/* One text, sealed again and again, never looks alike: neither under one key nor under the next. */
static void test_never_alike(int cipher) {
    uint8_t out[4][ROOM];
    uint32_t n = LC_HEADER_BYTES + LC_TAG_BYTES;
    ends e;
    ends_open(&e, cipher, 0);
    for (int i = 0; i < 4; i++) {
        if (i == 2)
            atomic_fetch_add(&e.how.rekeys, 1);
        put(&e, 0, 64, 1, out[i]);
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++)
            for (uint32_t at = n; at < n + 64; at += 8)
                CHECK_AT(memcmp(out[i] + at, out[k] + at, 8) != 0, "%d, %d, %u", i, k, at);
    ends_close(&e);
}

/* A packet of control and one of data in one datagram: the second header is sealed as well. */
static void test_two_packets_in_one(void) {
    uint8_t first[2 * LC_HEADER_BYTES + 4 * LC_RECORD_BYTES], out[ROOM], to[ROOM];
    lc_header control = kit_header(0, 4 * LC_RECORD_BYTES), data = kit_header(3, 200);
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    control.type = LC_CONTROL;
    control.count = 4;
    uint32_t ahead = LC_HEADER_BYTES + control.length;
    memset(first, 0xA5, sizeof first);
    lc_wire_put(first, &control);
    lc_wire_put(first + ahead, &data);
    struct iovec pieces[2] = {{first, sizeof first}, {payload, 200}};
    uint32_t n = lc_seal_put(e.a, pieces, 1, out);
    CHECK(lc_seal_take(e.b, out, n, KIT_SESSION, now_ns, to) == LC_GOOD);
    CHECK(lc_wire_first(to, n - LC_TAG_BYTES) == ahead);
    CHECK(!memcmp(to, first, sizeof first) && !memcmp(to + sizeof first, payload, 200));
    ends_close(&e);
}

/* No bit can be changed, no byte cut or added; and what was tried in vain leaves nothing behind. */
static void test_changed(int cipher, int clear) {
    uint8_t out[ROOM], bad[ROOM + 1];
    ends e;
    ends_open(&e, cipher, clear);
    uint32_t n = put(&e, 0, 100, 1, out);
    for (uint32_t bit = 0; bit < 8 * n; bit++) {
        memcpy(bad, out, n);
        bad[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_AT(verdict_on(&e, bad, n) != LC_GOOD, "bit %u", bit);
    }
    for (uint32_t less = 0; less < n; less++)
        CHECK_AT(verdict_on(&e, out, less) != LC_GOOD, "%u bytes", less);
    memcpy(bad, out, n);
    bad[n] = 0;
    CHECK(verdict_on(&e, bad, n + 1) == LC_FORGED);
    CHECK(e.b->replay.next == 0 && e.b->in_epoch == 0);
    CHECK(verdict_on(&e, out, n) == LC_GOOD);
    CHECK(verdict_on(&e, out, n) == LC_REPLAYED);
    ends_close(&e);
}

/* A sender's own packets, and those of a plain host, aren't taken. */
static void test_from_others(void) {
    uint8_t out[ROOM], to[ROOM];
    uint16_t sender;
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    uint32_t n = put(&e, 0, 100, 1, out);
    CHECK(lc_seal_take(e.a, out, n, KIT_SESSION, now_ns, to) == LC_FORGED);
    CHECK(lc_wire_outer(plain, LC_HEADER_BYTES + 100, &kit_expect, &sender) == LC_MALFORMED);
    lc_header h;
    CHECK(lc_wire_get(out, n, &kit_expect, &h) == LC_MALFORMED);
    lc_expect other = kit_expect;
    other.filter ^= 1;
    CHECK(lc_wire_outer(out, n, &other, &sender) == LC_FOREIGN);
    other = kit_expect;
    other.process = 2;
    CHECK(lc_wire_outer(out, n, &other, &sender) == LC_FOREIGN);
    other.process = 0;
    CHECK(lc_wire_outer(out, n, &other, &sender) == LC_FOREIGN);
    ends_close(&e);
}

static uint64_t random_of(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Against a table of all numbers that have come. */
static void test_replay_window(void) {
    enum { NUMBERS = 200000 };
    static uint8_t came[NUMBERS];
    lc_replay r = {.next = 0};
    uint64_t state = 5, taken = 0, old = 0, highest = 0;
    CHECK(!lc_replay_is_new(&r, UINT64_MAX));
    for (int i = 0; i < 1000000; i++) {
        uint64_t centre = (uint64_t)i * NUMBERS / 1000000;
        uint64_t spread = i % 1000 == 0 ? 40000 : 300, off = random_of(&state) % spread;
        uint64_t number = off < centre ? centre - off : centre + off;
        if (number >= NUMBERS)
            continue;
        int too_old = highest >= LC_REPLAY_WINDOW && number <= highest - LC_REPLAY_WINDOW;
        int is_new = lc_replay_is_new(&r, number);
        CHECK_AT(is_new == (!came[number] && !too_old), "%d", i);
        old += too_old;
        if (!is_new)
            continue;
        lc_replay_note(&r, number);
        came[number] = 1;
        taken++;
        highest = number > highest ? number : highest;
    }
    CHECK(taken > NUMBERS / 2 && old > 100);
    lc_replay_note(&r, 1ull << 40); /* far beyond the ring: nothing of what was before is left */
    for (uint64_t k = 0; k < LC_REPLAY_WINDOW; k++)
        CHECK_AT(lc_replay_is_new(&r, (1ull << 40) - k) == (k != 0), "%u", (unsigned)k);
    CHECK(!lc_replay_is_new(&r, (1ull << 40) - LC_REPLAY_WINDOW));
}

static void rekey(ends *e) {
    atomic_fetch_add(&e->how.rekeys, 1);
}

static void test_new_keys(void) {
    uint8_t before[ROOM], last[ROOM], out[ROOM];
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    uint32_t n = put(&e, 0, 100, 1, before);
    rekey(&e);
    CHECK(put(&e, 1, 100, 1, last) == n);
    for (int i = 0; i < LC_EPOCHS_BACK; i++)
        rekey(&e), put(&e, 2, 100, 1, out);
    CHECK(e.a->out.epoch == 1 + LC_EPOCHS_BACK && e.a->out_number == 2 + LC_EPOCHS_BACK);
    /* the newest comes first: some epochs before it are still taken, and none that is older */
    CHECK(verdict_on(&e, out, n) == LC_GOOD && e.b->in_epoch == 1 + LC_EPOCHS_BACK);
    CHECK(verdict_on(&e, last, n) == LC_GOOD && e.b->in_epoch == 1 + LC_EPOCHS_BACK);
    CHECK(verdict_on(&e, before, n) == LC_FORGED);
    /* none of very many epochs arrives: the next one is taken all the same */
    now_ns += LC_CLAIM_NS;
    for (int i = 0; i < 65536 - 1 - LC_EPOCHS_BACK; i++) {
        rekey(&e);
        put(&e, 3, 100, 1, out);
    }
    CHECK(verdict_on(&e, out, n) == LC_GOOD && e.b->in_epoch == 65536);
    for (int i = 0; i < 300; i++) { /* past 16 bits, with one on the way each time */
        rekey(&e);
        put(&e, 4, 100, 1, last);
        put(&e, 4, 100, 1, out);
        rekey(&e);
        put(&e, 5, 100, 1, before);
        CHECK_AT(verdict_on(&e, out, n) == LC_GOOD, "%d", i);
        CHECK_AT(verdict_on(&e, before, n) == LC_GOOD, "%d", i);
        CHECK_AT(verdict_on(&e, last, n) == LC_GOOD, "%d", i);
    }
    ends_close(&e);
}

/* What claims an epoch that isn't, however often, doesn't cost the keys that are in use. */
static void test_claimed_epochs(void) {
    uint8_t out[ROOM], bad[ROOM];
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    uint32_t n = 0;
    for (uint32_t i = 0; i < 200; i++) {
        if (i % 50 == 49)
            rekey(&e);
        n = put(&e, i, 100, 1, out);
        memcpy(bad, out, n);
        bad[6] ^= (uint8_t)(1 + i);
        bad[7] ^= (uint8_t)(i >> 3);
        CHECK_AT(verdict_on(&e, bad, n) == LC_FORGED, "%u", i);
        CHECK_AT(verdict_on(&e, out, n) == LC_GOOD, "%u", i);
    }
    CHECK(e.b->in_epoch == 4);
    ends_close(&e);
}

/* Of claims that are false one in a while costs a key. What comes next in turn waits for none. */
static void test_claims_are_few(void) {
    uint8_t out[ROOM], far[ROOM], bad[ROOM];
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    uint32_t n = put(&e, 0, 100, 1, out);
    CHECK(verdict_on(&e, out, n) == LC_GOOD);
    memcpy(bad, out, n);
    bad[7] ^= 0x40;
    bad[9] ^= 0x40; /* a number that is new */
    CHECK(verdict_on(&e, bad, n) == LC_FORGED);
    for (int i = 0; i < 2; i++) {
        rekey(&e);
        put(&e, 1, 100, 1, out);
    }
    rekey(&e);
    put(&e, 2, 100, 1, far);
    CHECK(e.a->out.epoch == 3 && verdict_on(&e, far, n) == LC_FORGED);
    now_ns += LC_CLAIM_NS - 1;
    CHECK(verdict_on(&e, far, n) == LC_FORGED);
    now_ns += 1;
    CHECK(verdict_on(&e, far, n) == LC_GOOD && verdict_on(&e, out, n) == LC_GOOD);
    bad[7] ^= 0x20;
    for (int i = 0; i < 100; i++) { /* one after the other, with a false claim before each */
        bad[6]++;
        CHECK_AT(verdict_on(&e, bad, n) == LC_FORGED, "%d", i);
        rekey(&e);
        put(&e, 3, 100, 1, out);
        CHECK_AT(verdict_on(&e, out, n) == LC_GOOD, "%d", i);
    }
    ends_close(&e);
}

/* A key wears out by packets and by age. */
static void test_worn(void) {
    uint8_t out[ROOM];
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    e.a->out_number = LC_EPOCH_PACKETS - 1; /* as if so many had been sent */
    uint32_t n = put(&e, 0, 10, 1, out);
    CHECK(e.a->out.epoch == 0 && verdict_on(&e, out, n) == LC_GOOD);
    put(&e, 0, 10, 1, out);
    CHECK(e.a->out.epoch == 1 && verdict_on(&e, out, n) == LC_GOOD);
    put(&e, 0, 10, 1, out);
    CHECK(e.a->out.epoch == 1 && e.a->out_number == LC_EPOCH_PACKETS + 2);
    e.how.rekey_ns = 1000;
    put(&e, 0, 10, 1000, out);
    CHECK(e.a->out.epoch == 1);
    put(&e, 0, 10, 1001, out);
    CHECK(e.a->out.epoch == 2 && verdict_on(&e, out, n) == LC_GOOD);
    put(&e, 0, 10, 2000, out);
    CHECK(e.a->out.epoch == 2);
    ends_close(&e);
}

/* More than 24 bits of packets in one direction, under a new key after each 2^22. */
static void test_many(uint32_t packets) {
    uint8_t first[ROOM], out[ROOM];
    uint32_t refused = 0;
    ends e;
    ends_open(&e, LC_AES_128_GCM, 0);
    uint32_t n = put(&e, 0, 0, 1, first);
    CHECK(verdict_on(&e, first, n) == LC_GOOD);
    for (uint32_t i = 1; i < packets; i++)
        refused += verdict_on(&e, out, put(&e, i, 0, 1, out)) != LC_GOOD;
    CHECK(refused == 0);
    CHECK(e.a->out_number == packets && e.b->in_epoch == (packets - 1) / LC_EPOCH_PACKETS);
    CHECK(verdict_on(&e, first, n) == LC_REPLAYED);
    CHECK(verdict_on(&e, out, n) == LC_REPLAYED);
    ends_close(&e);
}

int main(int argc, char **argv) {
    if (lc_crypto_load(NULL)) {
        printf("test_seal: skipped, %s\n", lc_crypto_load(NULL));
        return 0;
    }
    for (int i = 0; i < PAYLOAD; i++)
        payload[i] = (uint8_t)(i * 31 + i / 256 * 17 + 1);
    CHECK(lc_crypto_version()[0]);
    test_hkdf();
    test_gcm();
    for (int cipher = LC_AES_128_GCM; cipher < LC_CIPHERS; cipher++) {
        test_never_alike(cipher);
        for (int clear = 0; clear < 2; clear++) {
            test_opened_again(cipher, clear);
            test_changed(cipher, clear);
        }
    }
    test_two_packets_in_one();
    test_from_others();
    test_replay_window();
    test_new_keys();
    test_claimed_epochs();
    test_claims_are_few();
    test_worn();
    test_many(argc > 1 && !strcmp(argv[1], "-sample") ? 1 << 16 : (1 << 24) + 1000);
    return check_result("test_seal");
}
