/* Drives a fuzz target where libFuzzer is missing: seeded mutations, without coverage to guide
 * them. Takes libFuzzer's -max_total_time=SECONDS and -seed=NUMBER, and ignores what else it is
 * given. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 1200, KEPT = 64, BETWEEN_CLOCKS = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct {
    uint8_t bytes[MOST];
    size_t size;
} input;

static uint64_t state;

static uint32_t below(uint32_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 32) * limit >> 32);
}

/* Parsers branch on small numbers and on extremes more than on others. */
static uint8_t any_byte(void) {
    static const uint8_t likely[] = {0, 0, 0, 1, 1, 2, 3, 4, 5, 0x7F, 0x80, 0xFF};
    return below(2) ? likely[below(sizeof likely)] : (uint8_t)below(256);
}

/* Short, long, or a flag byte, a header of 48 bytes and some whole records. */
static size_t any_size(void) {
    switch (below(3)) {
    case 0:
        return below(100);
    case 1:
        return below(MOST);
    default:
        return 1 + 48 + 32 * below(33);
    }
}

static void make(input *in) {
    in->size = any_size();
    for (size_t i = 0; i < in->size; i++)
        in->bytes[i] = any_byte();
}

static void mutate(input *in) {
    if (below(8) == 0) {
        size_t size = any_size();
        for (size_t i = in->size; i < size; i++)
            in->bytes[i] = any_byte();
        in->size = size;
    }
    for (uint32_t times = below(6); in->size && times; times--) {
        size_t at = below(below(4) ? 64 : MOST) % in->size;
        if (below(2))
            in->bytes[at] ^= (uint8_t)(1 << below(8));
        else
            in->bytes[at] = any_byte();
    }
    if (in->size && below(2))
        in->bytes[0] |= (uint8_t)below(256); /* the flags, which decide how deep it gets */
}

static long long option(int argc, char **argv, const char *name, long long otherwise) {
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], name, strlen(name)) == 0)
            return strtoll(argv[i] + strlen(name), NULL, 10);
    return otherwise;
}

int main(int argc, char **argv) {
    static input kept[KEPT];
    long long seconds = option(argc, argv, "-max_total_time=", 20);
    state = (uint64_t)option(argc, argv, "-seed=", 1);
    time_t start = time(NULL);
    unsigned long long runs = 0;
    while (time(NULL) - start < seconds)
        for (int i = 0; i < BETWEEN_CLOCKS; i++, runs++) {
            input *in = &kept[below(KEPT)];
            if (runs < KEPT || below(32) == 0)
                make(in);
            mutate(in);
            LLVMFuzzerTestOneInput(in->bytes, in->size);
        }
    printf("%llu inputs in %lld s\n", runs, seconds);
    return 0;
}
