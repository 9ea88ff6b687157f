/* What an encoder makes of a slot's packets restores, in a decoder, as many of each set as rows
 * have come: whatever the order, what is void, and how many rows each path is sent. */
#include "check.h"
#include "parity.h"

#include <stdlib.h>
#include <string.h>

enum { N_MOST = 2100, BYTES = 52, ROOM = 9000 };

static uint64_t state = 1;

static uint32_t below(uint32_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % limit;
}

static uint8_t payload[N_MOST][BYTES], received[N_MOST][BYTES];
static uint16_t count[N_MOST], counted[N_MOST];
static uint64_t arrived[N_MOST / 64 + 1];
static uint32_t order[N_MOST];

static struct {
    uint8_t rows[ROOM * BYTES], n_rows[ROOM];
    uint16_t counts[ROOM], left[ROOM];
    uint64_t came[ROOM / 64 + 1], begun[4], sends[4];
    uint32_t open[4], due[4], due_at[4];
} sent, got;

static lc_restorer restorer;

static int bit(const uint64_t *bits, uint32_t i) {
    return bits[i / 64] >> (i % 64) & 1;
}

static void set_bit(uint64_t *bits, uint32_t i) {
    bits[i / 64] |= (uint64_t)1 << (i % 64);
}

static uint32_t bytes_of(uint32_t n, uint32_t k) {
    return k + 1 < n ? BYTES : BYTES - 11;
}

static void draw(uint32_t n, int voids, int in_order) {
    for (uint32_t k = 0; k < n; k++) {
        for (uint32_t i = 0; i < BYTES; i++)
            payload[k][i] = i < bytes_of(n, k) ? (uint8_t)below(256) : 0;
        count[k] = (uint16_t)(voids && below(8) == 0 ? 0 : 1 + below(700));
        order[k] = k;
    }
    for (uint32_t k = n - 1; k > 0 && !in_order; k--) {
        uint32_t j = below(k + 1), kept = order[k];
        order[k] = order[j];
        order[j] = kept;
    }
}

static lc_encoder encoder_of(uint32_t n, int in_order) {
    memset(sent.rows, 0xA5, sizeof sent.rows); /* it clears what it uses */
    memset(sent.counts, 0, sizeof sent.counts);
    memset(sent.begun, 0, sizeof sent.begun);
    memset(sent.sends, 0, sizeof sent.sends);
    lc_encoder e = {.rows = sent.rows,
                    .counts = sent.counts,
                    .begun = sent.begun,
                    .sends = sent.sends,
                    .open = in_order ? NULL : sent.open,
                    .due = sent.due,
                    .due_at = sent.due_at};
    lc_encoder_prepare(&e, n);
    return e;
}

static lc_decoder decoder_of(uint16_t code, uint32_t n, int keeps) {
    memset(got.rows, 0x5A, sizeof got.rows);
    memset(got.counts, 0, sizeof got.counts);
    memset(got.left, 0, sizeof got.left);
    memset(got.n_rows, 0, sizeof got.n_rows);
    memset(got.came, 0, sizeof got.came);
    memset(got.begun, 0, sizeof got.begun);
    memset(arrived, 0, sizeof arrived);
    lc_decoder d = {.rows = got.rows,
                    .counts = got.counts,
                    .left = got.left,
                    .n_rows = got.n_rows,
                    .came = got.came,
                    .begun = got.begun,
                    .keeps = (uint8_t)keeps};
    lc_decoder_begin(&d, code, n, 0);
    return d;
}

static void arrives(uint32_t k, const uint8_t *bytes, uint16_t weight) {
    memcpy(received[k], bytes, BYTES);
    counted[k] = weight;
    set_bit(arrived, k);
}

/* As the engine does. Returns how many came back. */
static uint32_t restore(lc_decoder *d, uint32_t n, uint32_t set) {
    uint32_t back = 0;
    if (!lc_decoder_can(d, set))
        return 0;
    CHECK(lc_decoder_find(d, set, arrived, &restorer));
    d->left[set] = 0;
    lc_rs_rows rows = lc_decoder_rows(d, set, BYTES);
    for (uint32_t i = 0; d->keeps && i < lc_shape_columns(&d->shape, set); i++) {
        uint32_t k = lc_shape_packet(&d->shape, set, i);
        if (bit(arrived, k))
            lc_rs_add(lc_gf_of(1), &rows, restorer.which, restorer.e, i, received[k],
                      bytes_of(n, k), counted[k]);
    }
    CHECK(lc_decoder_solve(d, set, &restorer));
    for (uint32_t j = 0; j < restorer.e; j += LC_RESTORED) {
        uint32_t some = restorer.e - j < LC_RESTORED ? restorer.e - j : LC_RESTORED;
        lc_decoder_restore(d, lc_gf_of(1), set, &restorer, j, some, BYTES);
        for (uint32_t i = 0; i < some; i++) {
            uint32_t k = lc_shape_packet(&d->shape, set, restorer.columns[j + i]);
            if (!restorer.counts[j + i])
                continue;
            arrives(k, restorer.packets + (size_t)i * BYTES, restorer.counts[j + i]);
            back++;
        }
    }
    return back;
}

/* Sends as a stream of this code does, and loses some; code has no more rows than the slot's. */
static void test_stream(uint16_t slot, uint16_t code, uint32_t n, int in_order, int keeps,
                        uint32_t loss) {
    static uint32_t lacks[N_MOST], has[N_MOST];
    draw(n, !in_order, in_order);
    lc_encoder e = encoder_of(n, in_order);
    lc_decoder d = decoder_of(code, n, keeps);
    lc_shape shape = lc_shape_of(code, n);
    lc_encoder_begin(&e, slot, n);
    memset(lacks, 0, sizeof lacks);
    memset(has, 0, sizeof has);
    uint32_t n_ready = 0, windows = 0, packets = 0, seen = 0, back = 0, wanted = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = order[i], set = lc_shape_data(&shape, k).set;
        n_ready += count[k] > 0;
        if (!in_order)
            lc_encoder_settled(&e, k, n_ready, !count[k]);
        int comes = count[k] && below(1000) >= loss;
        if (count[k])
            lc_encoder_add(&e, lc_gf_of(0), k, payload[k], bytes_of(n, k), BYTES, count[k]);
        lacks[set] += !comes;
        if (comes) {
            arrives(k, payload[k], count[k]);
            CHECK(lc_decoder_add(&d, lc_gf_of(1), k, payload[k], bytes_of(n, k), BYTES, count[k]) ==
                  set);
            back += restore(&d, n, set);
        }
        while (lc_encoder_is_due(&e, windows, n_ready)) {
            lc_encoded row = lc_encoder_row(&e, code, &windows, &packets);
            lc_place at = lc_shape_row(&shape, row.number);
            CHECK(row.number < shape.parity && !bit(got.came, row.number));
            CHECK(row.longest == lc_shape_packet(&shape, at.set, 0));
            seen++;
            if (below(1000) < loss)
                continue;
            has[at.set]++;
            set_bit(got.came, row.number);
            CHECK(lc_decoder_add_row(&d, lc_gf_of(1), row.number, sent.rows + row.at * BYTES,
                                     bytes_of(n, row.longest), BYTES,
                                     sent.counts[row.at]) == at.set);
            back += restore(&d, n, at.set);
        }
    }
    CHECK(windows == lc_encoder_windows(&e) && packets == 0);
    CHECK(seen <= shape.parity && (!in_order || seen == shape.parity));
    for (uint32_t k = 0; k < n; k++) {
        uint32_t set = lc_shape_data(&shape, k).set;
        int comes = bit(arrived, k);
        if (comes)
            CHECK_AT(counted[k] == count[k] && memcmp(received[k], payload[k], BYTES) == 0,
                     "code %u of %u, packet %u of %u", code, slot, k, n);
        wanted += count[k] && lacks[set] <= has[set];
        if (count[k] && lacks[set] <= has[set])
            CHECK_AT(comes, "code %u, packet %u of %u: %u lack, %u rows", code, k, n, lacks[set],
                     has[set]);
    }
    CHECK(back <= wanted);
}

static void test_streams(void) {
    static const uint32_t sizes[] = {1, 2, 3, 5, 16, 63, 64, 65, 200, 1024, 1025, N_MOST};
    static const uint16_t codes[][3] = {{1, 1, 1},     {4, 1, 1},   {8, 3, 3},
                                        {8, 3, 1},     {64, 6, 6},  {64, 25, 6},
                                        {224, 31, 31}, {24, 12, 2}, {128, 127, 127}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof codes / sizeof *codes; j++) {
            uint16_t slot = lc_code(codes[j][0], codes[j][1]);
            uint16_t code = lc_code(codes[j][0], codes[j][2]);
            if (lc_shape_of(slot, sizes[i]).parity > ROOM)
                continue;
            for (int how = 0; how < 4; how++)
                test_stream(slot, code, sizes[i], how & 1, how >> 1, 50 + below(300));
        }
}

/* What is given for a level is room enough for any code that it allows, and for no more. */
static void test_room(void) {
    for (uint32_t n = 0; n <= 3000; n = n < 70 ? n + 1 : n + 331) {
        for (uint32_t code = 0; code < 1 << 10; code++) {
            lc_level fixed = {.code = (uint16_t)code};
            if (!lc_code_valid(code))
                continue;
            uint32_t room = lc_parity_room(&fixed, n);
            uint16_t fitted = lc_code_fitted((uint16_t)code, n);
            CHECK(room == lc_shape_of(fitted, n).parity && (!room == (!code || !n)));
            CHECK(lc_parity_allows(&fixed, fitted, n));
            CHECK(lc_parity_allows(&fixed, code ^ 1, n) == ((code ^ 1) == fitted));
        }
        for (uint8_t most = 1; most <= 64 && n; most = (uint8_t)(most * 2)) {
            lc_level free = {.choose = LC_CHOOSE_PARITY, .most = most};
            uint32_t room = lc_parity_room(&free, n);
            CHECK(room >= 1 && room <= (uint64_t)n * most / 64 + 3);
            CHECK(lc_parity_allows(&free, 0, n));
            for (uint32_t code = 1; code < 5000; code += 7)
                CHECK(lc_parity_allows(&free, code, n) ==
                      (lc_code_valid(code) && lc_shape_of((uint16_t)code, n).parity <= room));
        }
    }
    lc_level free = {.choose = LC_CHOOSE_PARITY, .most = 64}; /* its parity is 2^32 and a little */
    CHECK(!lc_parity_allows(&free, lc_code(1, 127), 0x2040811));
}

/* A packet came before the stream's code did: what its set's rows hold is never the rest. */
static void test_unprotected(void) {
    draw(8, 0, 1);
    lc_decoder d = decoder_of(lc_code(8, 1), 8, 0);
    memset(got.left, 0, sizeof got.left);
    lc_decoder_begin(&d, lc_code(8, 1), 8, 1);
    for (uint32_t k = 0; k < 7; k++)
        (void)lc_decoder_add(&d, lc_gf_of(1), k, payload[k], BYTES, BYTES, 1);
    (void)lc_decoder_add_row(&d, lc_gf_of(1), 0, payload[0], BYTES, BYTES, 1);
    CHECK(!lc_decoder_can(&d, 0));
}

int main(void) {
    test_streams();
    test_room();
    test_unprotected();
    return check_result("parity");
}
