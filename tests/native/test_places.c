/* A host with numbers for thousands of processes of which few are there, in virtual time: what
 * nobody has costs neither memory nor turns, and what is reached works as it does elsewhere. */
#include "check.h"
#include "path.h"
#include "virtual_net.h"

enum {
    PLACES = 4096,
    RANKS = 3, /* of the net: the third one is silent */
    PAYLOAD = 256,
    PART = 20 * PAYLOAD,
    NOBODY = 4095,
    EAGER_BYTES = 1 << 20,
    MOST_TURNS = 20000 /* of all, until whatever is waited for; far fewer are needed */
};

static const uint64_t US = 1000, MS = 1000000, SECOND = 1000000000;

typedef struct {
    memory_net *net;
    lc_host *host[RANKS];
    uint8_t in[RANKS][PART], out[RANKS][PART];
} places;

static void open_all(places *p, int absent) {
    static lc_address at[PLACES];
    *p = (places){.net = memory_net_new(RANKS, LC_HEADER_BYTES + PAYLOAD, 4096, 7)};
    for (uint16_t i = 0; i < RANKS; i++) {
        lc_host_config c = {.address = "memory",
                            .process = i,
                            .processes = PLACES,
                            .payload_bytes = PAYLOAD,
                            .eager_bytes = EAGER_BYTES};
        lc_link *link = memory_link_open(p->net, i);
        lc_setting setting = {memory_clock(p->net), &link, 1};
        lc_failure failure;
        p->host[i] = lc_host_open_in(&c, &setting, &failure);
        for (uint16_t k = 0; k < PLACES; k++)
            at[k] = (lc_address){.absent = absent ? k != i : k >= RANKS};
        if (!p->host[i] || lc_host_start(p->host[i], 9, at) != LC_OK)
            abort();
    }
}

static void close_all(places *p) {
    for (uint16_t i = 0; i < RANKS; i++)
        lc_host_close(p->host[i]);
    memory_net_free(p->net);
}

static void meet(places *p, uint16_t a, uint16_t b) {
    const lc_address there = {.port = 0};
    CHECK(lc_host_admit(p->host[a], b, &there, NULL) == LC_OK);
    CHECK(lc_host_admit(p->host[b], a, &there, NULL) == LC_OK);
}

/* A group of two, or with a third member that nobody has reached. */
static lc_group *group(const places *p, uint16_t at, uint32_t number, uint16_t size) {
    const uint16_t members[] = {0, 1, NOBODY};
    lc_group_config c = {.number = number,
                         .rank = at,
                         .size = size,
                         .members = members,
                         .deadline_min_ns = SECOND,
                         .deadline_max_ns = SECOND,
                         .link_ns = 20 * SECOND,
                         .met = 1};
    lc_failure failure;
    lc_group *g = lc_group_open(p->host[at], &c, &failure);
    CHECK(g != NULL);
    return g;
}

/* Each of the others gets what this one has, and it gets what they have, a part for each. */
static int64_t submit(places *p, lc_group *g, uint16_t rank, uint16_t size) {
    lc_edge edges[2 * RANKS];
    lc_slot_desc slots[1 + RANKS];
    uint32_t part = PART / RANKS, n = 0, s = 1;
    slots[0] = (lc_slot_desc){
        .number = rank, .length = part, .own = LC_OWN_INPUT, .n_dests = (uint16_t)(size - 1)};
    for (uint16_t k = 0; k < size; k++)
        if (k != rank)
            edges[n++] = (lc_edge){k, (uint16_t)(RANKS + rank)};
    for (uint16_t k = 0; k < size; k++) {
        if (k == rank)
            continue;
        edges[n] = (lc_edge){k, k};
        slots[s++] = (lc_slot_desc){.number = (uint16_t)(RANKS + k),
                                    .offset = k * part,
                                    .length = part,
                                    .target = LC_TARGET_OUT,
                                    .first_edge = n++,
                                    .n_sources = 1};
    }
    memset(p->in[rank], 1 + rank, PART);
    memset(p->out[rank], 0, PART);
    lc_call call = {.slots = slots,
                    .edges = edges,
                    .n_slots = s,
                    .n_edges = n,
                    .in = p->in[rank],
                    .out = p->out[rank],
                    .in_elements = PART,
                    .out_elements = PART,
                    .levels = {{.elements_per_packet = PAYLOAD, .repair = 1}},
                    .dtype = LC_BYTES,
                    .scale = 1,
                    .signature = 5,
                    .timeout_ns = 60 * SECOND};
    return lc_group_submit(g, &call);
}

/* Returns how many turns the hosts took. */
static uint64_t go_on(places *p, uint64_t ns) {
    uint64_t end = memory_now(p->net) + ns, turns = 0;
    while (memory_now(p->net) < end && turns < MOST_TURNS) {
        uint64_t next = end, now = memory_now(p->net);
        for (uint16_t i = 0; i < RANKS; i++) {
            do
                turns++;
            while (lc_host_turn(p->host[i]));
            uint64_t idle = lc_host_idle_ns(p->host[i]), arrives = memory_next(p->net, i);
            next = idle < next - now ? now + idle : next;
            next = arrives < next ? arrives : next;
        }
        memory_set_now(p->net, next > now ? next : now);
    }
    return turns;
}

static int ends(places *p, lc_group *const g[2], const int64_t tickets[2]) {
    int ended = 0;
    for (int i = 0; i < 10000 && !ended; i++) {
        lc_report report;
        lc_failure failure;
        go_on(p, 100 * US);
        ended = 1;
        for (uint16_t r = 0; r < 2; r++)
            ended &= lc_group_result(g[r], tickets[r], &report, &failure) == LC_OK;
    }
    return ended;
}

static void close_both(lc_group *g[2]) {
    for (uint16_t r = 0; r < 2; r++)
        lc_group_close(g[r]);
}

/* ---- tests ---- */

static uint32_t count(const lc_host *h, int begun) {
    uint32_t n = 0;
    for (uint16_t i = 0; i < PLACES; i++)
        n += begun ? h->paths[i].interface != NULL : h->paths[i].records != NULL;
    return n;
}

static void test_only_who_is_reached_costs_memory(void) {
    static places p;
    open_all(&p, 1);
    CHECK(count(p.host[0], 1) == 1 && count(p.host[0], 0) == 0); /* its own is begun */
    for (int turn = 0; turn < 3; turn++) {
        meet(&p, 0, 1);
        CHECK(count(p.host[0], 1) == 2 && count(p.host[0], 0) == 1);
        CHECK(p.host[0]->paths[1].records && p.host[0]->paths[1].early);
        CHECK(p.host[0]->interfaces[0].n_paths == 1);
        CHECK(lc_host_admit(p.host[0], 1, NULL, NULL) == LC_OK);
        CHECK(count(p.host[0], 0) == 0 && p.host[0]->interfaces[0].n_paths == 0);
    }
    const lc_address there = {.port = 0};
    CHECK(lc_host_admit(p.host[0], NOBODY, &there, NULL) == LC_E_ARGUMENT); /* the net is smaller */
    CHECK(p.host[0]->interfaces[0].n_paths == 0);
    close_all(&p);
}

static void test_a_place_more_takes_no_cell_from_others(void) {
    static places p;
    open_all(&p, 1);
    const lc_interface *via = &p.host[0]->interfaces[0];
    CHECK_AT(via->eager >= via->cells.n_cells / 128, "%u of %u", via->eager, via->cells.n_cells);
    close_all(&p);
}

static void test_who_is_reached_exchanges(void) {
    static places p;
    open_all(&p, 1);
    meet(&p, 0, 1);
    lc_group *g[2] = {group(&p, 0, 3, 2), group(&p, 1, 3, 2)};
    for (int turn = 0; turn < 5; turn++) {
        int64_t tickets[2] = {submit(&p, g[0], 0, 2), submit(&p, g[1], 1, 2)};
        CHECK(tickets[0] > 0 && ends(&p, g, tickets));
        CHECK(p.out[0][PART / RANKS] == 2 && p.out[1][0] == 1);
        for (uint16_t r = 0; r < 2; r++)
            lc_group_release(g[r], tickets[r]);
    }
    close_both(g);
    close_all(&p);
}

/* Streams to a member that was never reached wait without keeping the host awake, what is told to
 * it is dropped, and the others go on when it counts as dead: before the call, or in it. */
static void test_a_member_that_nobody_reached(int before) {
    static places p;
    open_all(&p, 1);
    meet(&p, 0, 1);
    lc_group *g[2] = {group(&p, 0, 3, 3), group(&p, 1, 3, 3)};
    CHECK(count(p.host[0], 1) == 3 && count(p.host[0], 0) == 1);
    for (uint16_t r = 0; r < 2 && before; r++)
        lc_group_peer_dead(g[r], 2);
    int64_t tickets[2] = {submit(&p, g[0], 0, 3), submit(&p, g[1], 1, 3)};
    CHECK(tickets[0] > 0 && tickets[1] > 0);
    uint64_t turns = before ? 0 : go_on(&p, 500 * MS);
    CHECK_AT(turns < MOST_TURNS, "%lu turns", (unsigned long)turns);
    CHECK(p.host[0]->paths[NOBODY].n_records == 0);
    CHECK(lc_host_admit(p.host[0], NOBODY, NULL, NULL) == LC_E_ARGUMENT); /* it is a member */
    for (uint16_t r = 0; r < 2 && !before; r++)
        lc_group_peer_dead(g[r], 2);
    CHECK(ends(&p, g, tickets));
    CHECK(p.out[0][PART / RANKS] == 2 && p.out[1][0] == 1);
    close_both(g);
    close_all(&p);
}

/* Packets of a process that isn't reached are nobody's, though its link would believe them. */
static void test_who_is_not_reached_is_foreign(void) {
    static places p;
    open_all(&p, 1);
    const lc_address there = {.port = 0};
    CHECK(lc_host_admit(p.host[0], 1, &there, NULL) == LC_OK); /* and not the other way */
    lc_group *g[2] = {group(&p, 0, 3, 2), group(&p, 1, 3, 2)};
    int64_t ticket = submit(&p, g[0], 0, 2);
    CHECK(ticket > 0);
    go_on(&p, 200 * MS);
    lc_stats stats;
    lc_group_stats(g[1], &stats);
    CHECK(stats.foreign > 0 && stats.packets_received == 0);
    CHECK(count(p.host[1], 0) == 0);
    close_both(g);
    close_all(&p);
}

/* Those that are known from the start have memory, and some may come later all the same. */
static void test_some_are_there_from_the_start(void) {
    static places p;
    open_all(&p, 0);
    CHECK(count(p.host[0], 1) == RANKS && count(p.host[0], 0) == RANKS - 1);
    lc_group *g[2] = {group(&p, 0, 3, 2), group(&p, 1, 3, 2)};
    int64_t tickets[2] = {submit(&p, g[0], 0, 2), submit(&p, g[1], 1, 2)};
    CHECK(ends(&p, g, tickets) && p.out[0][PART / RANKS] == 2);
    close_both(g);
    close_all(&p);
}

int main(void) {
    test_only_who_is_reached_costs_memory();
    test_a_place_more_takes_no_cell_from_others();
    test_who_is_reached_exchanges();
    test_a_member_that_nobody_reached(0);
    test_a_member_that_nobody_reached(1);
    test_who_is_not_reached_is_foreign();
    test_some_are_there_from_the_start();
    return check_result("test_places");
}
