/* Speed of parity, by variant and beside isa-l, as lines of: variant, what, rows, GB/s of data. The
 * argument is the least time of a try in seconds (0.02).
 *
 * encode: a window of packets into the rows of its interleaved sets, one row, two, four and so on.
 * restore: as many packets of a set from as many rows, and GB/s of what is restored. Another's code
 * of the same operation is isa-l's ec_encode_data_update. */
#define _POSIX_C_SOURCE 200809L

#include "../../native/gf.c"

#include "isal.h"
#include "rs.h"

#include <stdlib.h>
#include <time.h>

enum { TRIES = 9, K = 64, SETS = 16, WINDOW_PACKETS = K * SETS, BYTES = 1448, MOST = 32 };

static uint8_t *data, *sums, *tables[MOST + 1];
static uint16_t counts[SETS][MOST];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* what others do on the core is not counted */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void encode(const lc_gf *gf, uint32_t m) {
    for (uint32_t i = 0; i < WINDOW_PACKETS; i++) {
        uint32_t set = i % SETS;
        lc_rs_rows rows = {sums + (size_t)set * m * BYTES, counts[set], BYTES};
        lc_rs_add(gf, &rows, NULL, m, i / SETS, data + (size_t)i * BYTES, BYTES, 3);
    }
}

static void encode_isal(const isal *other, uint32_t m) {
    for (uint32_t i = 0; i < WINDOW_PACKETS; i++) {
        unsigned char *into[MOST];
        for (uint32_t r = 0; r < m; r++)
            into[r] = sums + ((size_t)(i % SETS) * m + r) * BYTES;
        other->add(BYTES, K, (int)m, (int)(i / SETS), tables[m], data + (size_t)i * BYTES, into);
    }
}

static void restore(const lc_gf *gf, uint32_t e) {
    static uint8_t inverse[MOST * MOST], back[MOST * BYTES], which[MOST], columns[MOST];
    uint16_t back_counts[MOST];
    for (uint32_t i = 0; i < e; i++) {
        which[i] = (uint8_t)i;
        columns[i] = (uint8_t)(i * K / e);
    }
    for (uint32_t set = 0; set < SETS; set++) {
        lc_rs_rows rows = {sums + (size_t)set * e * BYTES, counts[set], BYTES};
        lc_rs_restore(gf, &rows, which, columns, e, BYTES, inverse, back, back_counts);
    }
}

static double least_seconds = 0.02;

/* GB/s of the best of a few tries. */
static double speed(const lc_gf *gf, const isal *other, int back, uint32_t m) {
    double fastest = 0;
    for (int t = 0; t < TRIES; t++) {
        double start = now(), seconds, bytes = 0;
        do {
            if (back)
                restore(gf, m);
            else if (gf)
                encode(gf, m);
            else
                encode_isal(other, m);
            bytes += back ? (double)SETS * m * BYTES : (double)WINDOW_PACKETS * BYTES;
            seconds = now() - start;
        } while (seconds < least_seconds);
        fastest = bytes / seconds > fastest ? bytes / seconds : fastest;
    }
    return fastest * 1e-9;
}

static void make_tables(const isal *other) {
    for (uint32_t m = 1; m <= MOST; m *= 2) {
        uint8_t factors[MOST * K];
        tables[m] = calloc((size_t)K * m, ISAL_TABLE);
        if (!tables[m])
            exit(1);
        for (uint32_t i = 0; i < m; i++)
            for (uint32_t j = 0; j < K; j++)
                factors[i * K + j] = lc_rs_factor(i, j);
        other->tables(K, (int)m, factors, tables[m]);
    }
}

int main(int argc, char **argv) {
    if (argc > 1)
        least_seconds = atof(argv[1]);
    isal other = isal_open();
    data = malloc((size_t)WINDOW_PACKETS * BYTES + 1);
    sums = calloc((size_t)SETS * MOST + 1, BYTES);
    if (!data || !sums)
        return 1;
    data++; /* one byte off, as a payload behind a header may be */
    for (size_t i = 0; i < (size_t)WINDOW_PACKETS * BYTES; i++)
        data[i] = (uint8_t)(i * i >> 3);
    if (other.library)
        make_tables(&other);
    for (uint32_t m = 1; m <= MOST; m *= 2) {
        for (int v = 0; v < N_VARIANTS; v++) {
            const lc_gf *gf = &variants[v].field;
            if (variants[v].runs()) {
                printf("%s,encode,%u,%.2f\n", gf->name, m, speed(gf, NULL, 0, m));
                printf("%s,restore,%u,%.2f\n", gf->name, m, speed(gf, NULL, 1, m));
            }
        }
        if (other.library)
            printf("isa-l,encode,%u,%.2f\n", m, speed(NULL, &other, 0, m));
    }
    return 0;
}
