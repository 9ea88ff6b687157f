/* How much may be under way in shared memory: two hosts that take turns, each until it has nothing
 * left to do. The more of its packets fit into the memory, the fewer turns a stream takes; on a
 * machine with many processes each of them is a wait for the core. */
#include "check.h"
#include "link_shm.h"
#include "lossycoll.h"
#include "step.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

enum { SMALL = 1424, LARGE = LC_SHARED_PAYLOAD, CHANGES_MOST = 2000, TURNS_MOST = 10000 };

static const uint64_t MS = 1000000, STEP_NS = 20000;

typedef struct {
    lc_host *host[2];
    lc_group *group[2];
    uint64_t now;
} pair;

static uint64_t now_of(void *context) {
    return *(const uint64_t *)context;
}

static void open_group(pair *p, uint16_t i) {
    lc_failure failure;
    lc_group_config g = {.number = 1,
                         .rank = i,
                         .size = 2,
                         .met = 1,
                         .deadline_min_ns = 10000 * MS,
                         .deadline_max_ns = 10000 * MS};
    p->group[i] = lc_group_open(p->host[i], &g, &failure);
    if (!CHECK(p->group[i] != NULL))
        abort();
}

static void open_pair(pair *p, const lc_clock *clock) {
    static const uint16_t processes[] = {0, 1};
    lc_address addresses[2];
    lc_failure failure;
    p->now = 1000 * MS;
    for (uint16_t i = 0; i < 2; i++) {
        lc_host_config c = {
            .address = "memory", .process = i, .processes = 2, .payload_bytes = SMALL};
        int descriptors[2];
        lc_link *link = lc_shm_open(&c, processes, 2, clock, descriptors, &failure);
        lc_setting setting = {clock, &link, 1};
        p->host[i] = link ? lc_host_open_in(&c, &setting, &failure) : NULL;
        if (!CHECK(p->host[i] != NULL))
            abort();
        addresses[i] = (lc_address){.memory = descriptors[0], .wake = descriptors[1]};
    }
    for (uint16_t i = 0; i < 2; i++) {
        CHECK(lc_host_start(p->host[i], 9, addresses) == LC_OK);
        open_group(p, i);
    }
}

/* Rank 0 sends a stream of each kind: so many packets of so many bytes. */
static int64_t submit(const pair *p, uint16_t i, const uint32_t packets[2], float *data) {
    static const uint32_t each[2] = {SMALL / 4, LARGE / 4};
    lc_edge edges[2] = {{(uint16_t)!i, 0}, {(uint16_t)!i, 1}};
    lc_slot_desc slots[2];
    uint64_t offset = 0;
    for (uint16_t k = 0; k < 2; k++) {
        slots[k] = (lc_slot_desc){.number = k,
                                  .level = (uint8_t)k,
                                  .offset = offset,
                                  .length = (uint64_t)packets[k] * each[k],
                                  .own = i == 0 ? LC_OWN_INPUT : LC_OWN_NONE,
                                  .own_offset = offset,
                                  .target = i == 0 ? LC_TARGET_NONE : LC_TARGET_OUT,
                                  .n_dests = i == 0,
                                  .n_sources = i == 1,
                                  .first_edge = k};
        offset += slots[k].length;
    }
    lc_call call = {.slots = slots,
                    .edges = edges,
                    .n_slots = 2,
                    .n_edges = 2,
                    .in = data,
                    .out = data,
                    .in_elements = offset,
                    .out_elements = offset,
                    .levels = {{.elements_per_packet = each[0]}, {.elements_per_packet = each[1]}},
                    .scale = 1,
                    .signature = 5};
    return lc_group_submit(p->group[i], &call);
}

static size_t elements(const uint32_t packets[2]) {
    return packets[0] * (size_t)(SMALL / 4) + packets[1] * (size_t)(LARGE / 4);
}

static float *numbered(size_t n, int filled) {
    float *data = calloc(n, sizeof *data);
    if (!data)
        abort();
    for (size_t i = 0; filled && i < n; i++)
        data[i] = (float)(i % 99991);
    return data;
}

/* Takes the turns of one after those of the other. Returns how often the one that sends began. */
static int change_places(pair *p, const int64_t tickets[2], lc_report reports[2]) {
    lc_failure failure;
    int ended[2] = {0, 0}, changes = 0;
    for (; !(ended[0] && ended[1]) && changes < CHANGES_MOST; changes++)
        for (int i = 0; i < 2; i++) {
            for (int turns = 0; lc_host_turn(p->host[i]) && turns < TURNS_MOST; turns++) {
            }
            ended[i] =
                lc_group_result(p->group[i], tickets[i], &reports[i], &failure) != LC_PENDING;
            p->now += STEP_NS;
        }
    CHECK(ended[0] && ended[1]);
    return changes;
}

/* Nothing is resent, so what has found no room is missing. */
static int run(uint32_t small, uint32_t large) {
    const uint32_t packets[2] = {small, large};
    const size_t n = elements(packets);
    float *data[2] = {numbered(n, 1), numbered(n, 0)};
    pair p;
    const lc_clock clock = {now_of, now_of, &p.now};
    int64_t tickets[2];
    lc_report reports[2];
    lc_stats stats;
    open_pair(&p, &clock);
    for (uint16_t i = 0; i < 2; i++)
        CHECK((tickets[i] = submit(&p, i, packets, data[i])) > 0);
    int changes = change_places(&p, tickets, reports);
    CHECK(reports[0].packets_sent == small + large);
    CHECK(reports[1].packets_missing == 0);
    CHECK(memcmp(data[0], data[1], n * sizeof *data[0]) == 0);
    for (int i = 0; i < 2; i++) {
        p.now += 1000 * MS;
        lc_host_turn(p.host[i]);
        lc_group_stats(p.group[i], &stats);
        CHECK(stats.socket_overflow == 0);
        lc_group_close(p.group[i]);
        free(data[i]);
    }
    for (int i = 0; i < 2; i++)
        lc_host_close(p.host[i]);
    return changes;
}

/* A MiB of an Ethernet's packets. */
static void test_small_packets_wait_seldom(void) {
    int changes = run((1 << 20) / SMALL, 0);
    CHECK_AT(changes <= 6, "%d", changes);
}

static void test_large_packets_find_room(void) {
    int changes = run(0, 200);
    CHECK_AT(changes >= 200 / LC_SHM_BUFFERS && changes <= 20, "%d", changes);
}

static void test_packets_of_both_kinds_find_room(void) {
    for (uint32_t i = 1; i <= 8; i++)
        (void)run(300 * i, 160 / i);
}

int main(void) {
    test_small_packets_wait_seldom();
    test_large_packets_find_room();
    test_packets_of_both_kinds_find_room();
    return check_result("test_shared_window");
}
