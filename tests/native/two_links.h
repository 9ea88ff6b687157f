/* Hosts with two links each, in virtual time: processes 0 and 1 reach each other by the first link,
 * and process 2 by the second. Groups of them, and what these do. */
#ifndef LC_TWO_LINKS_H
#define LC_TWO_LINKS_H

#include "link_memory.h"
#include "net.h"
#include "step.h"
#include "wire.h"

enum { PROCESSES = 3, LINKS = 2, PARTS = 16, ROUNDS_MOST = 100000, TURNS_MOST = 10000 };

static const uint64_t DELAY_NS = 100000, DEADLINE_NS = 10000000000u;

/* One process in one operation. */
typedef struct {
    uint16_t process;
    lc_group *group;
    int64_t ticket;
    float *data;
    int ended, code, sys_errno;
} part;

typedef struct {
    memory_net *net[LINKS];
    lc_host *host[PROCESSES];
    lc_group *group[4][PROCESSES]; /* by number, process */
    uint64_t wake_ns[PROCESSES];
    part parts[PARTS];
    int n_parts;
} world;

static inline uint64_t now_of(const world *w) {
    return memory_now(w->net[0]);
}

static inline uint16_t link_between(uint16_t a, uint16_t b) {
    return a == 2 || b == 2;
}

static inline lc_host_config config_of(uint16_t process) {
    return (lc_host_config){
        .address = "memory", .process = process, .processes = 3, .payload_bytes = NET_PAYLOAD};
}

static inline void make_nets(world *w) {
    *w = (world){.n_parts = 0};
    for (uint16_t n = 0; n < LINKS; n++) {
        w->net[n] = memory_net_new(PROCESSES, LC_HEADER_BYTES + NET_PAYLOAD, 4000, n + 1u);
        memory_set_same_host(w->net[n], 1); /* congestion control has no part in this */
        for (uint16_t i = 0; i < PROCESSES; i++)
            for (uint16_t j = 0; j < PROCESSES; j++)
                memory_path_of(w->net[n], i, j)->delay_ns = DELAY_NS;
    }
}

static inline void free_nets(world *w) {
    for (int n = 0; n < LINKS; n++)
        memory_net_free(w->net[n]);
}

static inline void open_hosts_on(world *w, double pace) {
    for (uint16_t i = 0; i < PROCESSES; i++) {
        lc_host_config c = config_of(i);
        lc_link *links[] = {memory_link_open(w->net[0], i), memory_link_open(w->net[1], i)};
        lc_setting setting = {memory_clock(w->net[0]), links, LINKS};
        lc_failure failure;
        c.pace_bytes_per_s = pace;
        w->host[i] = lc_host_open_in(&c, &setting, &failure);
        if (!CHECK(w->host[i] != NULL))
            abort();
    }
}

static inline void open_hosts(world *w, double pace) {
    make_nets(w);
    open_hosts_on(w, pace);
}

static inline int start(world *w, uint16_t process, const uint16_t *links) {
    lc_address peers[PROCESSES] = {{.port = 0}};
    for (uint16_t j = 0; j < PROCESSES; j++)
        peers[j].link = links ? links[j] : link_between(process, j);
    return lc_host_start(w->host[process], NET_SESSION, peers);
}

static inline void open_all(world *w, double pace) {
    open_hosts(w, pace);
    for (uint16_t i = 0; i < PROCESSES; i++)
        CHECK(start(w, i, NULL) == LC_OK);
}

static inline void close_all(world *w) {
    for (uint16_t i = 0; i < PROCESSES; i++)
        lc_host_close(w->host[i]);
    free_nets(w);
    for (int i = 0; i < w->n_parts; i++)
        free(w->parts[i].data);
}

/* ---- groups and what they do ---- */

static inline void open_group(world *w, uint32_t number, const uint16_t *members, uint16_t size) {
    for (uint16_t rank = 0; rank < size; rank++) {
        lc_group_config c = {.number = number + 1,
                             .rank = rank,
                             .size = size,
                             .members = members,
                             .deadline_min_ns = DEADLINE_NS,
                             .deadline_max_ns = DEADLINE_NS,
                             .link_ns = DEADLINE_NS,
                             .met = 1};
        lc_failure failure;
        uint16_t process = members[rank];
        w->group[number][process] = lc_group_open(w->host[process], &c, &failure);
        if (!CHECK(w->group[number][process] != NULL))
            abort();
    }
}

static inline part *submit_plan(world *w, uint32_t number, uint16_t process, uint16_t size,
                                uint16_t rank, uint32_t segment, int reliable, table t) {
    part *p = &w->parts[w->n_parts++];
    p->process = process;
    p->group = w->group[number][process];
    p->data = malloc((size_t)size * segment * sizeof(float));
    fill(p->data, (size_t)size * segment, rank);
    lc_call call = {
        .slots = t.slots,
        .edges = t.edges,
        .n_slots = t.n_slots,
        .n_edges = t.n_edges,
        .in = p->data,
        .out = p->data,
        .in_elements = (uint64_t)size * segment,
        .out_elements = (uint64_t)size * segment,
        .levels = {{.elements_per_packet = NET_PAYLOAD / 4, .reliable = (uint8_t)reliable}},
        .scale = 1,
        .signature = 1000 + segment,
        .timeout_ns = 600 * SECOND};
    p->ticket = lc_group_submit(p->group, &call);
    p->ended = p->ticket < 0;
    p->code = p->ended ? (int)p->ticket : LC_PENDING;
    return p;
}

/* The mean of all members' elements, at one of them. */
static inline part *submit_at(world *w, uint32_t number, uint16_t process, uint16_t size,
                              uint16_t rank, uint32_t segment, int reliable) {
    table t;
    plan_transpose(&t, size, rank, segment);
    return submit_plan(w, number, process, size, rank, segment, reliable, t);
}

/* A rank's part in this: rank 0 sends what it has to rank 1. */
static inline part *submit_copy_at(world *w, uint32_t number, uint16_t rank, uint32_t segment,
                                   int reliable) {
    table t = {.n_slots = 0};
    lc_slot_desc *s = add_slot(&t, 0, 0, segment);
    s->missing = LC_MISSING_KEEP;
    if (rank == 0) {
        own_at(s, 0, LC_TARGET_NONE);
        add_dest(&t, s, 1, 0);
    } else {
        add_source(&t, s, 0);
    }
    return submit_plan(w, number, rank, 2, rank, segment, reliable, t);
}

/* Returns the part of rank 0. */
static inline part *submit_copy(world *w, uint32_t number, uint32_t segment) {
    part *first = submit_copy_at(w, number, 0, segment, 0);
    (void)submit_copy_at(w, number, 1, segment, 0);
    return first;
}

/* At each of them. Returns the first of their parts; one follows for each member. */
static inline part *submit(world *w, uint32_t number, const uint16_t *members, uint16_t size,
                           uint32_t segment) {
    part *first = &w->parts[w->n_parts];
    for (uint16_t rank = 0; rank < size; rank++)
        (void)submit_at(w, number, members[rank], size, rank, segment, 0);
    return first;
}

static inline void take_turns(world *w, uint16_t i) {
    int turns = 0;
    while (lc_host_turn(w->host[i]) && turns < TURNS_MOST)
        turns++;
    CHECK_AT(turns < TURNS_MOST, "process %u always has something to do", i);
    uint64_t idle = lc_host_idle_ns(w->host[i]);
    w->wake_ns[i] = idle < UINT64_MAX - now_of(w) ? now_of(w) + idle : UINT64_MAX;
    for (int k = 0; k < w->n_parts; k++) {
        part *p = &w->parts[k];
        lc_report report;
        lc_failure failure;
        if (p->ended || p->process != i ||
            lc_group_result(p->group, p->ticket, &report, &failure) == LC_PENDING)
            continue;
        p->ended = 1;
        p->code = failure.code;
        p->sys_errno = failure.sys_errno;
    }
}

/* Time goes on until n parts have ended, or so much of it has passed. Returns whether they have. */
static inline int run(world *w, const part *parts, int n, uint64_t longest_ns) {
    uint64_t end = now_of(w) + longest_ns;
    for (int round = 0; round < ROUNDS_MOST; round++) {
        uint64_t next = end;
        int ended = 0;
        for (uint16_t i = 0; i < PROCESSES; i++) {
            take_turns(w, i);
            next = w->wake_ns[i] < next ? w->wake_ns[i] : next;
        }
        for (int n_net = 0; n_net < LINKS; n_net++)
            for (uint16_t i = 0; i < PROCESSES; i++) {
                uint64_t comes = memory_next(w->net[n_net], i);
                next = comes < next ? comes : next;
            }
        for (int k = 0; k < n; k++)
            ended += parts[k].ended;
        if (n && ended == n)
            return 1;
        if (now_of(w) >= end)
            return 0;
        for (int n_net = 0; n_net < LINKS; n_net++)
            memory_set_now(w->net[n_net], next > now_of(w) ? next : now_of(w) + 1);
    }
    CHECK_AT(0, "nobody rests");
    return 0;
}

static inline int is_near(float a, float b) {
    return a - b < NET_NEAR && b - a < NET_NEAR;
}

static inline int are_means(const part *parts, uint16_t size, uint32_t segment) {
    int good = 1;
    for (uint16_t rank = 0; rank < size; rank++)
        for (size_t i = 0; i < (size_t)size * segment; i++)
            good &= is_near(parts[rank].data[i], mean_of_all(size));
    return good;
}

static inline int have_code(const part *parts, int n, int code) {
    int good = 1;
    for (int k = 0; k < n; k++)
        good &= parts[k].ended && parts[k].code == code;
    return good;
}

static const uint16_t ALL[] = {0, 1, 2}, FIRST[] = {0, 1}, SECOND_LINK[] = {2, 0};

#endif
