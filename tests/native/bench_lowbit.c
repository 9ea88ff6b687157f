/* Speed of encoding, decoding and adding indices of a few bits, by packets of 1400 bytes out of and
 * into 64 KiB of floats. Bytes per second count the float32. */
#define _POSIX_C_SOURCE 200809L

#include "../../native/lowbit.c"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../../native/codec.h"

enum { TRIES = 5, ELEMENTS = 16384, PAYLOAD = 1400 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* others may want the core */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

enum way { ENCODE, DECODE, ADD, N_WAYS };

static void run(const lc_codec *c, enum way way, char *floats, char *packets) {
    size_t each = lc_codec_elements(c, PAYLOAD), packet = 0;
    for (size_t at = 0; at < ELEMENTS; at += each, packet++) {
        size_t n = ELEMENTS - at < each ? ELEMENTS - at : each;
        char *bytes = packets + packet * PAYLOAD, *x = floats + at * 4;
        if (way == ENCODE)
            c->encode(c, bytes, x, n, 1, 0);
        else if (way == DECODE)
            c->decode(c, x, bytes, n);
        else
            c->add(c, x, bytes, n);
    }
}

/* GB/s of the best of a few tries, each of at least 20 ms. */
static double speed(const lc_codec *c, enum way way, char *floats, char *packets) {
    double fastest = 0;
    for (int t = 0; t < TRIES; t++) {
        double start = now(), seconds, bytes = 0;
        do {
            run(c, way, floats, packets);
            bytes += ELEMENTS * 4;
            seconds = now() - start;
        } while (seconds < 0.02);
        fastest = bytes / seconds > fastest ? bytes / seconds : fastest;
    }
    return fastest * 1e-9;
}

static void print_row(const lc_lowbit *v, int encoding, char *floats, char *packets) {
    lc_codec c;
    if (!lc_codec_make(&c, encoding, LC_F32, 1))
        exit(1);
    c.low.loops = v;
    uint32_t state = 1;
    for (size_t i = 0; i < ELEMENTS; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(state >> 8) / (1 << 24) - 0.5f;
        memcpy(floats + 4 * i, &x, 4);
    }
    printf("%-6s int%u, groups of %-4u%-7s", v->name, c.low.bits, c.low.group,
           c.low.spikes       ? "spikes"
           : c.low.stochastic ? "random"
                              : "");
    run(&c, ENCODE, floats, packets);
    for (enum way way = 0; way < N_WAYS; way++)
        printf(" %8.1f", speed(&c, way, floats, packets));
    printf("\n");
}

int main(void) {
    char *floats = calloc(ELEMENTS, 4), *packets = calloc(ELEMENTS / 32, PAYLOAD);
    if (!floats || !packets)
        return 1;
    printf("%-32s  %8s %8s %8s   GB/s of float32\n", "", "encode", "decode", "add");
    for (int v = 0; v < N_VARIANTS; v++)
        for (int e = LC_ENCODING_INT8; e <= LC_ENCODING_INT2 && variants[v].runs(); e++) {
            print_row(&variants[v], e, floats, packets);
            print_row(&variants[v], e | LC_ENCODING_STOCHASTIC, floats, packets);
            print_row(&variants[v], e | LC_ENCODING_GROUP_32, floats, packets);
            print_row(&variants[v], e | LC_ENCODING_GROUP_32 | LC_ENCODING_SPIKES, floats, packets);
        }
    free(floats);
    free(packets);
    return 0;
}
