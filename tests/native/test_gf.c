/* The field by its definition, every variant against it, and isa-l where it is there. */
#include "../../native/gf.c"

#include "check.h"
#include "isal.h"

#include <stdlib.h>

static uint64_t state = 1;

static uint8_t byte(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint8_t)(state >> 56);
}

/* A product of polynomials, bit by bit. */
static uint8_t product(unsigned a, unsigned b) {
    unsigned sum = 0;
    for (unsigned bit = 0; bit < 8; bit++)
        sum ^= b >> bit & 1 ? a << bit : 0;
    for (unsigned bit = 15; bit > 7; bit--)
        sum ^= sum >> bit & 1 ? 0x11Du << (bit - 8) : 0;
    return (uint8_t)sum;
}

static void test_products(const isal *other) {
    for (unsigned a = 0; a < 256; a++) {
        for (unsigned b = 0; b < 256; b++) {
            uint8_t found = lc_gf_times((uint8_t)a, (uint8_t)b);
            CHECK_AT(found == product(a, b), "%u * %u is %u", a, b, found);
            if (other->library)
                CHECK_AT(found == other->times((uint8_t)a, (uint8_t)b), "%u * %u in isa-l", a, b);
        }
        uint8_t inverse = lc_gf_inverse((uint8_t)a);
        CHECK_AT(product(a, inverse) == (a != 0), "1 / %u is %u", a, inverse);
        if (other->library && a)
            CHECK(inverse == other->inverse((uint8_t)a));
    }
}

enum { ROWS = 41, BYTES = 384 };
static uint8_t source[BYTES], rows[ROWS][BYTES], want[ROWS][BYTES];

/* Nothing beside the bytes that are meant changes. */
static void test_mad(const lc_gf *gf, uint32_t n_rows, size_t n, size_t from, size_t to) {
    uint8_t factors[ROWS], *into[ROWS];
    for (size_t i = 0; i < BYTES; i++)
        source[i] = byte();
    for (uint32_t r = 0; r < n_rows; r++) {
        factors[r] = r == 0 && n % 2 ? 1 : n % 5 ? byte() : 0;
        into[r] = rows[r] + to;
        for (size_t i = 0; i < BYTES; i++)
            want[r][i] = rows[r][i] = byte();
        for (size_t i = 0; i < n; i++)
            want[r][to + i] ^= product(factors[r], source[from + i]);
    }
    gf->mad(into, factors, n_rows, source + from, n);
    CHECK_AT(memcmp(rows, want, n_rows * BYTES) == 0, "%s: %u rows of %zu bytes, from %zu to %zu",
             gf->name, n_rows, n, from, to);
}

static void test_variant(const lc_gf *gf) {
    for (size_t n = 0; n <= 200; n++)
        test_mad(gf, 1 + (uint32_t)n % 6, n, n % 67, n % 61);
    for (size_t at = 0; at < 64; at++) { /* every alignment of either */
        test_mad(gf, 4, 150, at, 0);
        test_mad(gf, 3, 150, 0, at);
    }
    for (uint32_t n_rows = 1; n_rows < ROWS; n_rows++)
        test_mad(gf, n_rows, 97, 1, 2);
    uint8_t *into = rows[0];
    for (unsigned factor = 0; factor < 256; factor++) {
        uint8_t f = (uint8_t)factor;
        for (unsigned i = 0; i < 256; i++) {
            source[i] = (uint8_t)i;
            rows[0][i] = 0;
        }
        gf->mad(&into, &f, 1, source, 256);
        for (unsigned i = 0; i < 256; i++)
            CHECK_AT(rows[0][i] == product(factor, i), "%s: %u * %u", gf->name, factor, i);
    }
}

static void test_agrees(const isal *other, const lc_gf *gf) {
    static uint8_t tables[ROWS * ISAL_TABLE], theirs[ROWS][BYTES];
    uint8_t factors[ROWS], *into[ROWS], *to[ROWS];
    for (int n_rows = 1; n_rows < ROWS; n_rows += 3) {
        memset(rows, 0, sizeof rows);
        memset(theirs, 0, sizeof theirs);
        for (int r = 0; r < n_rows; r++) {
            factors[r] = byte();
            into[r] = rows[r];
            to[r] = theirs[r];
        }
        other->tables(1, n_rows, factors, tables);
        other->add(BYTES, 1, n_rows, 0, tables, source, to);
        gf->mad(into, factors, (uint32_t)n_rows, source, BYTES);
        CHECK_AT(memcmp(rows, theirs, sizeof rows) == 0, "%s: %d rows", gf->name, n_rows);
    }
}

int main(void) {
    isal other = isal_open();
    test_products(&other);
    int run = 0;
    for (int v = 0; v < N_VARIANTS; v++) {
        if (!variants[v].runs())
            continue;
        run++;
        test_variant(&variants[v].field);
        if (other.library)
            test_agrees(&other, &variants[v].field);
    }
    CHECK(run >= 1 && lc_gf_of(1) == &best->field);
    CHECK(strcmp(lc_gf_of(0)->name, "plain") == 0);
    return check_result("gf");
}
