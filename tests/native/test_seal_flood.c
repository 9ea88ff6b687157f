/* Many hostile datagrams: what a sender seals goes through somebody who copies, changes and
 * invents, and whoever opens takes each of the sender's once and nothing else.
 *
 *   test_seal_flood [-sample] [-packets=N] [-seed=N]
 *
 * A long run prints how far it is every 10 s. */
#include "check.h"
#include "lossycoll.h"
#include "seal_kit.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

enum {
    PAYLOAD = 96,
    DATAGRAM = LC_HEADER_BYTES + LC_TAG_BYTES + PAYLOAD,
    KEPT = 1024,    /* datagrams that the hostile one remembers */
    PER_SEALED = 40 /* hostile ones for each of the sender's */
};

typedef struct {
    uint8_t bytes[DATAGRAM];
    uint32_t n;
} datagram;

typedef struct {
    uint64_t sealed, taken, hostile;
    uint64_t verdicts[LC_REPLAYED + 1]; /* of hostile ones */
} counts;

static uint64_t state;

static uint32_t below(uint32_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 32) * limit >> 32);
}

static datagram kept[KEPT];

static datagram seal_one(lc_seal *seal, uint32_t number) {
    static uint8_t payload[PAYLOAD], header[LC_HEADER_BYTES];
    datagram d;
    uint32_t bytes = below(PAYLOAD + 1);
    lc_header h = kit_header(number, bytes);
    lc_wire_put(header, &h);
    struct iovec pieces[2] = {{header, sizeof header}, {payload, bytes}};
    payload[below(PAYLOAD)]++;
    d.n = lc_seal_put(seal, pieces, 1, d.bytes);
    return d;
}

static enum lc_verdict take(lc_seal *seal, const datagram *d) {
    static uint8_t to[DATAGRAM];
    static uint64_t now;
    return kit_take(seal, d->bytes, d->n, now += 1000, to);
}

static void flip(datagram *d, uint32_t from, uint32_t to) {
    d->bytes[from + below(to - from)] ^= (uint8_t)(1 + below(255));
}

/* A copy of one that went by, or of the next one, which hasn't come yet; changed but for `what` 0.
 */
static datagram hostile(const datagram *next, uint32_t what) {
    const datagram *one = below(2) ? next : &kept[below(KEPT)];
    datagram d = one->n && what ? *one : kept[below(KEPT)];
    if (!d.n)
        d = *next, what = 1;
    switch (what) {
    case 0: /* as it was */
        break;
    case 1: /* the number */
        flip(&d, 8, 16);
        break;
    case 2: /* the epoch */
        flip(&d, 6, 8);
        break;
    case 3: /* the tag */
        flip(&d, LC_HEADER_BYTES, LC_HEADER_BYTES + LC_TAG_BYTES);
        break;
    case 4: /* what is sealed, or the tag where nothing is */
        flip(&d,
             d.n > LC_HEADER_BYTES + LC_TAG_BYTES ? LC_HEADER_BYTES + LC_TAG_BYTES
                                                  : LC_HEADER_BYTES,
             d.n);
        break;
    case 5: /* the rest of the header */
        flip(&d, 16, LC_HEADER_BYTES);
        break;
    case 6: /* its length: always another one */
        d.n = below(2) && d.n < DATAGRAM ? d.n + 1 : below(d.n);
        break;
    default: /* noise of the right form */
        for (uint32_t i = 16; i < d.n; i++)
            d.bytes[i] = (uint8_t)below(256);
        d.bytes[30] = 0, d.bytes[31] = 0, d.bytes[32] = 1, d.bytes[33] = 0;
    }
    return d;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void show(const counts *c, double took) {
    printf("%" PRIu64 " datagrams in %.0f s: %" PRIu64 " of %" PRIu64
           " sealed ones taken; of %" PRIu64 " hostile ones %" PRIu64 " taken, %" PRIu64
           " malformed, %" PRIu64 " foreign, %" PRIu64 " forged, %" PRIu64 " replayed\n",
           c->sealed + c->hostile, took, c->taken, c->sealed, c->hostile, c->verdicts[LC_GOOD],
           c->verdicts[LC_MALFORMED], c->verdicts[LC_FOREIGN], c->verdicts[LC_FORGED],
           c->verdicts[LC_REPLAYED]);
    fflush(stdout);
}

static counts flood(lc_sealing *how, uint64_t packets, int loud) {
    lc_seal *both[2];
    kit_open(how, both);
    lc_seal *a = both[0], *b = both[1];
    counts c = {.sealed = 0};
    double begin = seconds(), told = begin;
    while (a && b && c.sealed + c.hostile < packets) {
        if (below(20000) == 0)
            atomic_fetch_add(&how->rekeys, 1);
        datagram next = seal_one(a, (uint32_t)c.sealed);
        for (uint32_t i = 0; i < PER_SEALED; i++) {
            datagram bad = hostile(&next, below(8));
            c.verdicts[take(b, &bad)]++;
            c.hostile++;
        }
        c.sealed++;
        c.taken += take(b, &next) == LC_GOOD;
        kept[below(KEPT)] = next;
        if (loud && seconds() - told >= 10) {
            told = seconds();
            show(&c, told - begin);
        }
    }
    show(&c, seconds() - begin);
    lc_seal_close(a);
    lc_seal_close(b);
    return c;
}

int main(int argc, char **argv) {
    uint64_t packets = check_samples(argc, argv) ? 200000 : 5000000;
    state = 1;
    int loud = 0;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-packets=", 9)) {
            packets = strtoull(argv[i] + 9, NULL, 10);
            loud = 1;
        } else if (!strncmp(argv[i], "-seed=", 6)) {
            state = strtoull(argv[i] + 6, NULL, 10);
        }
    }
    if (lc_crypto_load(NULL)) {
        printf("test_seal_flood: skipped, %s\n", lc_crypto_load(NULL));
        return 0;
    }
    lc_sealing how = {.cipher = LC_AES_128_GCM, .filter = KIT_FILTER};
    counts c = flood(&how, packets, loud);
    CHECK(c.taken == c.sealed && c.verdicts[LC_GOOD] == 0);
    for (int verdict = LC_MALFORMED; verdict <= LC_REPLAYED; verdict++)
        CHECK_AT(c.verdicts[verdict] > packets / 200, "verdict %d", verdict);
    return check_result("test_seal_flood");
}
