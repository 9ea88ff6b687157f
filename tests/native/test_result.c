/* An operation's result before its end (lc_group_wait_result), in virtual time: two ranks send each
 * other what they have. What rank 0 sends is lost for long, so its operation goes on when it has
 * all that it is to get. */
#include <string.h>

#include "check.h"
#include "virtual_net.h"

enum { RANKS = 2, PAYLOAD = 64, PACKETS = 40, PART = PAYLOAD * PACKETS };

static const uint64_t MS = 1000000, SECOND = 1000000000, US = 1000;

/* What rank 0 sends is resent until it comes; what it gets is resent, or not. */
enum { TO_1 = 0, TO_0 = 1 };

typedef struct {
    virtual_net v;
    int in_place, waits, reliable; /* the latter: of what rank 0 gets */
    uint8_t rounds;                /* of what both get; then rank 1 may lose some, too */
    uint8_t missing;               /* lc_missing */
    uint8_t in[RANKS][PART], out[RANKS][RANKS * PART];
    int64_t ticket[RANKS];
} exchange;

static int64_t submit(exchange *e, uint16_t rank) {
    uint16_t other = (uint16_t)(1 - rank);
    uint8_t *own = e->in_place ? e->out[rank] + rank * PART : e->in[rank];
    const lc_edge edges[] = {{other, 1}, {other, 0}};
    const lc_slot_desc slots[] = {{.offset = (uint64_t)rank * PART,
                                   .length = PART,
                                   .own = LC_OWN_INPUT,
                                   .target = LC_TARGET_OUT,
                                   .n_dests = 1,
                                   .level = rank ? TO_0 : TO_1},
                                  {.number = 1,
                                   .offset = (uint64_t)other * PART,
                                   .length = PART,
                                   .target = LC_TARGET_OUT,
                                   .missing = e->missing,
                                   .first_edge = 1,
                                   .n_sources = 1,
                                   .level = rank ? TO_1 : TO_0}};
    lc_call call = {
        .slots = slots,
        .edges = edges,
        .n_slots = 2,
        .n_edges = 2,
        .in = own,
        .out = e->out[rank],
        .in_elements = PART,
        .out_elements = RANKS * PART,
        .levels = {{.elements_per_packet = PAYLOAD, .repair = e->rounds, .reliable = !e->rounds},
                   {.elements_per_packet = PAYLOAD,
                    .repair = e->rounds,
                    .reliable = (uint8_t)e->reliable}},
        .dtype = LC_BYTES,
        .waits = (uint8_t)(e->waits && rank == 0),
        .scale = 1,
        .signature = 5,
        .timeout_ns = 60 * SECOND};
    return lc_group_submit(e->v.group[rank], &call);
}

static void begin_over(exchange *e, const virtual_setup *how, double loss_to_1, double loss_to_0) {
    virtual_open(&e->v, how);
    memory_path_of(e->v.net, 0, 1)->loss = loss_to_1;
    memory_path_of(e->v.net, 1, 0)->loss = loss_to_0;
    for (uint16_t i = 0; i < RANKS; i++) {
        memset(e->in[i], i + 1, PART);
        memset(e->out[i], 0xEE, sizeof e->out[i]);
        memset(e->out[i] + i * PART, i + 1, PART);
        e->ticket[i] = submit(e, i);
        if (e->waits && i == 0) /* a turn */
            CHECK(lc_group_wait(e->v.group[0], e->ticket[0], 0) == LC_PENDING);
    }
}

static void begin(exchange *e, double loss_to_0) {
    const virtual_setup how = {
        .size = RANKS,
        .payload = PAYLOAD,
        .capacity = 4096,
        .delay_ns = 20 * US,
        .group = {.deadline_max_ns = 10 * SECOND, .link_ns = 20 * SECOND, .met = 1}};
    begin_over(e, &how, 0.7, loss_to_0);
}

static int wait_for(const exchange *e, uint16_t rank) {
    return lc_group_wait(e->v.group[rank], e->ticket[rank], 0);
}

static int wait_for_result(const exchange *e, uint16_t rank) {
    return lc_group_wait_result(e->v.group[rank], e->ticket[rank], 0);
}

/* Until rank 0 has its result. Returns whether that was before its operation's end. */
static int go_on_until_result(exchange *e) {
    uint8_t arrived[PACKETS];
    int turns = 0;
    while (wait_for_result(e, 0) == LC_PENDING && turns++ < 100000) {
        CHECK(wait_for(e, 0) == LC_PENDING);
        CHECK(lc_group_arrived(e->v.group[0], e->ticket[0], 1, 1, arrived, PACKETS) == LC_PENDING);
        virtual_go_on(&e->v, 20 * US);
    }
    CHECK_AT(wait_for_result(e, 0) == LC_OK, "in place %d, missing %d, %d turns: %d", e->in_place,
             e->missing, turns, wait_for_result(e, 0));
    return wait_for(e, 0) == LC_PENDING;
}

/* Each packet from rank 1 is there, or as it was, or filled. Returns how many are there. */
static int check_result_of_0(const exchange *e, uint8_t otherwise) {
    uint8_t arrived[PACKETS];
    int n = 0;
    CHECK(lc_group_arrived(e->v.group[0], e->ticket[0], 1, 1, arrived, PACKETS) == LC_OK);
    for (int k = 0; k < PACKETS; k++) {
        const uint8_t *packet = e->out[0] + PART + k * PAYLOAD;
        uint8_t value = arrived[k] ? 2 : otherwise;
        n += arrived[k];
        for (int i = 0; i < PAYLOAD; i++)
            CHECK(packet[i] == value);
    }
    for (int i = 0; i < PART; i++)
        CHECK(e->out[0][i] == 1);
    return n;
}

static void test_result_comes_before_the_end(int in_place) {
    static exchange e;
    e = (exchange){.in_place = in_place, .reliable = 1};
    begin(&e, 0);
    CHECK(go_on_until_result(&e));
    CHECK(check_result_of_0(&e, 0) == PACKETS);
    CHECK(wait_for(&e, 1) == LC_PENDING && wait_for_result(&e, 1) == LC_PENDING);
    virtual_go_on(&e.v, SECOND);
    CHECK(wait_for(&e, 0) == LC_OK && wait_for_result(&e, 0) == LC_OK);
    CHECK(wait_for(&e, 1) == LC_OK && memcmp(e.out[0], e.out[1], sizeof e.out[0]) == 0);
    lc_group_release(e.v.group[0], e.ticket[0]);
    virtual_close(&e.v);
}

/* What is missing is filled before the result is shown, once; in place it isn't shown before the
 * end, since packets to the peer are read from there. */
static void test_gaps(uint8_t missing, int in_place) {
    static exchange e;
    uint8_t otherwise = missing == LC_MISSING_ZERO ? 0 : 0xEE;
    int is_shown = !(in_place && missing == LC_MISSING_ZERO);
    e = (exchange){.in_place = in_place, .missing = missing};
    begin(&e, 0.3);
    CHECK_AT(go_on_until_result(&e) == is_shown, "missing %d, in place %d", missing, in_place);
    int n = check_result_of_0(&e, otherwise);
    CHECK_AT(n > 0 && n < PACKETS, "%d packets came", n);
    virtual_go_on(&e.v, 2 * SECOND);
    CHECK(wait_for(&e, 0) == LC_OK && wait_for(&e, 1) == LC_OK);
    CHECK(check_result_of_0(&e, otherwise) == n);
    virtual_close(&e.v);
}

/* A result stays one, whatever ends the operation; its end is told as ever. */
static void test_failure_after_the_result(void) {
    static exchange e;
    e = (exchange){.reliable = 1};
    begin(&e, 0);
    CHECK(go_on_until_result(&e));
    lc_group_abort(e.v.group[0], LC_E_ABORTED, 1);
    virtual_go_on(&e.v, MS);
    CHECK(wait_for_result(&e, 0) == LC_OK && wait_for(&e, 0) == LC_E_ABORTED);
    CHECK(check_result_of_0(&e, 0) == PACKETS);
    virtual_close(&e.v);
}

static void test_failure_before_the_result(void) {
    static exchange e;
    e = (exchange){.reliable = 1};
    begin(&e, 0);
    lc_group_abort(e.v.group[0], LC_E_ABORTED, 1);
    virtual_go_on(&e.v, MS);
    CHECK(wait_for_result(&e, 0) == LC_E_ABORTED && wait_for(&e, 0) == LC_E_ABORTED);
    virtual_close(&e.v);
}

/* Nothing is owed to the dead. */
static void test_peer_dies_after_the_result(void) {
    static exchange e;
    e = (exchange){.reliable = 1};
    begin(&e, 0);
    CHECK(go_on_until_result(&e));
    lc_group_peer_dead(e.v.group[0], 1);
    virtual_go_on(&e.v, MS);
    CHECK(wait_for(&e, 0) == LC_OK && check_result_of_0(&e, 0) == PACKETS);
    virtual_close(&e.v);
}

/* Who waits for the end at once isn't woken for less. */
static void test_who_waits_for_the_end(void) {
    static exchange e;
    e = (exchange){.reliable = 1, .waits = 1};
    begin(&e, 0);
    CHECK(!go_on_until_result(&e));
    virtual_close(&e.v);
}

/* Who has all says so by itself. FIN would have to wait for a READY, which is as long under way as
 * the packets that were sent ahead of it: the end would be half a round trip later. */
static void test_the_end_follows_what_came(void) {
    static exchange e;
    const uint64_t way = 10 * MS;
    const virtual_setup how = {
        .size = RANKS,
        .payload = PAYLOAD,
        .capacity = 4096,
        .eager_bytes = 1 << 20,
        .delay_ns = way,
        .group = {.deadline_max_ns = 10 * SECOND, .link_ns = 20 * SECOND, .met = 1}};
    e = (exchange){.rounds = 2};
    begin_over(&e, &how, 0, 0);
    virtual_go_on(&e.v, 10 * way); /* the peer's window is known by then */
    for (uint16_t i = 0; i < RANKS; i++)
        e.ticket[i] = submit(&e, i);
    virtual_go_on(&e.v, way + way / 4);
    CHECK(wait_for_result(&e, 0) == LC_OK && wait_for_result(&e, 1) == LC_OK);
    CHECK(wait_for(&e, 0) == LC_PENDING && wait_for(&e, 1) == LC_PENDING);
    virtual_go_on(&e.v, way);
    CHECK(wait_for(&e, 0) == LC_OK && wait_for(&e, 1) == LC_OK);
    virtual_close(&e.v);
}

int main(void) {
    test_the_end_follows_what_came();
    for (int in_place = 0; in_place < 2; in_place++) {
        test_result_comes_before_the_end(in_place);
        test_gaps(LC_MISSING_KEEP, in_place);
        test_gaps(LC_MISSING_ZERO, in_place);
    }
    test_failure_after_the_result();
    test_failure_before_the_result();
    test_peer_dies_after_the_result();
    test_who_waits_for_the_end();
    return check_result("test_result");
}
