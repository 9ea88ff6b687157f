/* Speed of every kernel of every variant, in cache, per packet and out of cache.
 * Bytes per second count what is added, that is the wire bytes of x, once. */
#define _POSIX_C_SOURCE 200809L

#include "../../native/kernels.c"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TRIES = 5 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct {
    const lc_kernels *k;
    char *acc, *x;
    size_t total, packet; /* elements */
} job;

enum kernel { FIRST, ADD, FINISH, BLEND, N_KERNELS };

static void run_packet(const job *j, enum kernel which, size_t at) {
    size_t n = j->total - at < j->packet ? j->total - at : j->packet;
    char *acc = j->acc + at * j->k->acc_bytes, *x = j->x + at * j->k->element_bytes;
    if (which == FIRST)
        j->k->first(acc, x, x, n);
    else if (which == ADD)
        j->k->add(acc, x, n);
    else if (which == FINISH)
        j->k->finish(x, acc, n, 0.5);
    else
        j->k->blend(x, x, 0.25, acc, 0.25, n);
}

/* GB/s of the best of a few tries, each of at least 20 ms. */
static double speed(const job *j, enum kernel which) {
    double fastest = 0;
    for (int t = 0; t < TRIES; t++) {
        double start = now(), seconds;
        size_t bytes = 0;
        do {
            for (size_t at = 0; at < j->total; at += j->packet)
                run_packet(j, which, at);
            bytes += j->total * j->k->element_bytes;
            seconds = now() - start;
        } while (seconds < 0.02);
        if ((double)bytes / seconds > fastest)
            fastest = (double)bytes / seconds;
    }
    return fastest * 1e-9;
}

static void print_row(const variant *v, int dtype, const char *place, size_t total, size_t packet) {
    static const char *const names[] = {"f32", "f64", "f16", "bf16"};
    const lc_kernels *k = v->kernels[dtype];
    job j = {k, NULL, NULL, total, packet};
    /* One byte off, as a payload behind a header may be. */
    char *acc = calloc(total + 1, k->acc_bytes), *x = calloc(total + 1, k->element_bytes);
    if (!acc || !x)
        exit(1);
    j.acc = acc;
    j.x = x + 1;
    printf("%-7s %-5s %-22s", v->name, names[dtype], place);
    for (enum kernel which = 0; which < N_KERNELS; which++)
        printf(" %8.1f", speed(&j, which));
    printf("\n");
    free(acc);
    free(x);
}

int main(void) {
    printf("simd=1 selects %s; GB/s of wire bytes\n", lc_simd_name());
    printf("%-35s  %8s %8s %8s %8s\n", "", "first", "add", "finish", "blend");
    for (int v = 0; v < N_VARIANTS; v++) {
        if (!variants[v].runs())
            continue;
        for (int dtype = LC_F32; dtype <= LC_BF16; dtype++) {
            size_t bytes = lc_element_bytes(dtype);
            print_row(&variants[v], dtype, "64 KiB at once", 65536 / bytes, 65536 / bytes);
            print_row(&variants[v], dtype, "64 KiB, 1400 B packets", 65536 / bytes, 1400 / bytes);
            print_row(&variants[v], dtype, "64 MiB, 1400 B packets", (64u << 20) / bytes,
                      1400 / bytes);
        }
    }
    return 0;
}
