/* What sealing costs: nanoseconds to seal and to open a packet, the best of many rounds.
 *
 * bench_seal [libcrypto's file] */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "lossycoll.h"
#include "seal_kit.h"

enum { PACKETS = 2000, ROUNDS = 60, ROOM = LC_HEADER_BYTES + LC_TAG_BYTES + KIT_PAYLOAD };

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    /* what others do on the core is not counted */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint8_t payload[KIT_PAYLOAD], plain[LC_HEADER_BYTES], sealed[PACKETS][ROOM];

static void measure(const char *name, int cipher, int clear, uint32_t bytes) {
    lc_sealing how = {.cipher = (uint8_t)cipher, .clear = (uint8_t)clear, .filter = KIT_FILTER};
    lc_seal *ends[2];
    kit_open(&how, ends);
    double best[2] = {1e9, 1e9};
    uint8_t to[ROOM];
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t begin = now(), good = 0;
        for (uint32_t i = 0; i < PACKETS; i++) {
            lc_header h = kit_header(i, bytes);
            lc_wire_put(plain, &h);
            struct iovec pieces[2] = {{plain, sizeof plain}, {payload, bytes}};
            lc_seal_put(ends[0], pieces, 1, sealed[i]);
        }
        uint64_t middle = now();
        for (uint32_t i = 0; i < PACKETS; i++)
            good += lc_seal_take(ends[1], sealed[i], LC_HEADER_BYTES + LC_TAG_BYTES + bytes,
                                 KIT_SESSION, 1, to) == LC_GOOD;
        uint64_t end = now();
        if (good != PACKETS)
            abort();
        double took[2] = {(double)(middle - begin) / PACKETS, (double)(end - middle) / PACKETS};
        for (int k = 0; k < 2; k++)
            best[k] = took[k] < best[k] ? took[k] : best[k];
    }
    printf("%-18s %-12s %4" PRIu32 " bytes: seal %4.0f ns, open %4.0f ns\n", name,
           clear ? "authenticate" : "encrypt", bytes, best[0], best[1]);
    lc_seal_close(ends[0]);
    lc_seal_close(ends[1]);
}

int main(int argc, char **argv) {
    const char *why = lc_crypto_load(argc > 1 ? argv[1] : NULL);
    if (why) {
        printf("bench_seal: skipped, %s\n", why);
        return 0;
    }
    static const char *const names[] = {[LC_AES_128_GCM] = "aes-128-gcm",
                                        [LC_AES_256_GCM] = "aes-256-gcm",
                                        [LC_CHACHA20_POLY1305] = "chacha20-poly1305"};
    printf("%s\n", lc_crypto_version());
    for (int cipher = LC_AES_128_GCM; cipher < LC_CIPHERS; cipher++)
        for (int clear = 0; clear < 2 && lc_crypto_has(cipher); clear++)
            for (int size = 0; size < 2; size++)
                measure(names[cipher], cipher, clear, size ? KIT_PAYLOAD : 32);
    return 0;
}
