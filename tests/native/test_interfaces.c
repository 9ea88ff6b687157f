/* Hosts with several links, in virtual time: a group over two of them, one that is full while the
 * other goes on, one that fails for good, and what can't be opened. Processes 0 and 1 reach each
 * other by the first link, and process 2 by the second. */
#include "link_memory.h"
#include "loop.h"
#include "net.h"
#include "step.h"
#include "waiter.h"
#include "wire.h"

#include <errno.h>
#include <unistd.h>

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

static uint64_t now_of(const world *w) {
    return memory_now(w->net[0]);
}

static uint16_t link_between(uint16_t a, uint16_t b) {
    return a == 2 || b == 2;
}

static lc_host_config config_of(uint16_t process) {
    return (lc_host_config){
        .address = "memory", .process = process, .processes = 3, .payload_bytes = NET_PAYLOAD};
}

static void make_nets(world *w) {
    *w = (world){.n_parts = 0};
    for (uint16_t n = 0; n < LINKS; n++) {
        w->net[n] = memory_net_new(PROCESSES, LC_HEADER_BYTES + NET_PAYLOAD, 4000, n + 1u);
        memory_set_same_host(w->net[n], 1); /* congestion control has no part in this */
        for (uint16_t i = 0; i < PROCESSES; i++)
            for (uint16_t j = 0; j < PROCESSES; j++)
                memory_path_of(w->net[n], i, j)->delay_ns = DELAY_NS;
    }
}

static void free_nets(world *w) {
    for (int n = 0; n < LINKS; n++)
        memory_net_free(w->net[n]);
}

static void open_hosts_on(world *w, double pace) {
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

static void open_hosts(world *w, double pace) {
    make_nets(w);
    open_hosts_on(w, pace);
}

static int start(world *w, uint16_t process, const uint16_t *links) {
    lc_address peers[PROCESSES] = {{.port = 0}};
    for (uint16_t j = 0; j < PROCESSES; j++)
        peers[j].link = links ? links[j] : link_between(process, j);
    return lc_host_start(w->host[process], NET_SESSION, peers);
}

static void open_all(world *w, double pace) {
    open_hosts(w, pace);
    for (uint16_t i = 0; i < PROCESSES; i++)
        CHECK(start(w, i, NULL) == LC_OK);
}

static void close_all(world *w) {
    for (uint16_t i = 0; i < PROCESSES; i++)
        lc_host_close(w->host[i]);
    free_nets(w);
    for (int i = 0; i < w->n_parts; i++)
        free(w->parts[i].data);
}

/* ---- groups and what they do ---- */

static void open_group(world *w, uint32_t number, const uint16_t *members, uint16_t size) {
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

static part *submit_plan(world *w, uint32_t number, uint16_t process, uint16_t size, uint16_t rank,
                         uint32_t segment, int reliable, table t) {
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
static part *submit_at(world *w, uint32_t number, uint16_t process, uint16_t size, uint16_t rank,
                       uint32_t segment, int reliable) {
    table t;
    plan_transpose(&t, size, rank, segment);
    return submit_plan(w, number, process, size, rank, segment, reliable, t);
}

/* A rank's part in this: rank 0 sends what it has to rank 1. */
static part *submit_copy_at(world *w, uint32_t number, uint16_t rank, uint32_t segment,
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
static part *submit_copy(world *w, uint32_t number, uint32_t segment) {
    part *first = submit_copy_at(w, number, 0, segment, 0);
    (void)submit_copy_at(w, number, 1, segment, 0);
    return first;
}

/* At each of them. Returns the first of their parts; one follows for each member. */
static part *submit(world *w, uint32_t number, const uint16_t *members, uint16_t size,
                    uint32_t segment) {
    part *first = &w->parts[w->n_parts];
    for (uint16_t rank = 0; rank < size; rank++)
        (void)submit_at(w, number, members[rank], size, rank, segment, 0);
    return first;
}

static void take_turns(world *w, uint16_t i) {
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
static int run(world *w, const part *parts, int n, uint64_t longest_ns) {
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

static int is_near(float a, float b) {
    return a - b < NET_NEAR && b - a < NET_NEAR;
}

static int are_means(const part *parts, uint16_t size, uint32_t segment) {
    int good = 1;
    for (uint16_t rank = 0; rank < size; rank++)
        for (size_t i = 0; i < (size_t)size * segment; i++)
            good &= is_near(parts[rank].data[i], mean_of_all(size));
    return good;
}

static int have_code(const part *parts, int n, int code) {
    int good = 1;
    for (int k = 0; k < n; k++)
        good &= parts[k].ended && parts[k].code == code;
    return good;
}

static const uint16_t ALL[] = {0, 1, 2}, FIRST[] = {0, 1}, SECOND_LINK[] = {2, 0};

/* ---- tests ---- */

static void test_a_group_over_two_links(void) {
    world w;
    open_all(&w, 0);
    open_group(&w, 0, ALL, 3);
    const part *p = submit(&w, 0, ALL, 3, 6400); /* 100 packets to each peer, and back */
    CHECK(run(&w, p, 3, SECOND) && have_code(p, 3, LC_OK) && are_means(p, 3, 6400));
    CHECK(memory_counts_of(w.net[0]).sent >= 400 && memory_counts_of(w.net[1]).sent >= 800);
    close_all(&w);
}

static void test_one_link_is_full(void) {
    world w;
    open_all(&w, 0);
    open_group(&w, 0, FIRST, 2);
    open_group(&w, 1, SECOND_LINK, 2);
    memory_set_full(w.net[0], 1, 10 * SECOND);
    const part *waits = submit(&w, 0, FIRST, 2, 6400);
    run(&w, NULL, 0, 10 * MS);
    CHECK(memory_counts_of(w.net[0]).refused > 0);
    const part *goes = submit(&w, 1, SECOND_LINK, 2, 64000);
    CHECK(run(&w, goes, 2, SECOND) && have_code(goes, 2, LC_OK) && are_means(goes, 2, 64000));
    CHECK(!waits[0].ended && !waits[1].ended);
    memory_set_full(w.net[0], 0, 0);
    CHECK(run(&w, waits, 2, 60 * SECOND) && have_code(waits, 2, LC_OK));
    CHECK(are_means(waits, 2, 6400));
    close_all(&w);
}

/* What waits for a full link needs no turns, whatever else goes on: neither packets that a rate
 * would let go, nor control. */
static void test_who_waits_rests(void) {
    world w;
    open_all(&w, 0);
    open_group(&w, 0, FIRST, 2);
    memory_set_full(w.net[0], 1, 3600 * SECOND);
    submit(&w, 0, FIRST, 2, 64000);
    run(&w, NULL, 0, 100 * MS);
    CHECK(memory_counts_of(w.net[0]).refused > 0);
    CHECK(lc_host_idle_ns(w.host[0]) > 0 && lc_host_idle_ns(w.host[1]) > 0);
    close_all(&w);
}

static void test_one_link_fails_for_good(void) {
    world w;
    open_all(&w, 0);
    open_group(&w, 0, ALL, 3);
    open_group(&w, 1, FIRST, 2);
    open_group(&w, 2, SECOND_LINK, 2);
    memory_break(w.net[0], 0, ENODEV);
    const part *over_both = submit(&w, 0, ALL, 3, 6400);
    const part *there = submit(&w, 1, FIRST, 2, 6400);
    const part *beside = submit(&w, 2, SECOND_LINK, 2, 6400);
    CHECK(run(&w, beside, 2, SECOND) && have_code(beside, 2, LC_OK) && are_means(beside, 2, 6400));
    CHECK(have_code(over_both, 1, LC_E_SYSTEM) && over_both->sys_errno == ENODEV);
    CHECK(have_code(there, 1, LC_E_SYSTEM) && there->sys_errno == ENODEV);
    /* Groups that come later have it too, or not. */
    open_group(&w, 3, FIRST, 2);
    const part *later = submit(&w, 3, FIRST, 2, 64);
    const part *again = submit(&w, 2, SECOND_LINK, 2, 64);
    CHECK(run(&w, again, 2, SECOND) && have_code(again, 2, LC_OK) && are_means(again, 2, 64));
    CHECK(have_code(later, 1, LC_E_SYSTEM) && later->sys_errno == ENODEV);
    CHECK(lc_host_idle_ns(w.host[0]) > 0);
    close_all(&w);
}

static void test_packets_by_another_link_are_foreign(void) {
    const uint16_t wrong[] = {1, 0, 1};
    lc_stats stats;
    world w;
    open_hosts(&w, 0);
    CHECK(start(&w, 0, NULL) == LC_OK && start(&w, 1, wrong) == LC_OK);
    CHECK(start(&w, 2, NULL) == LC_OK);
    open_group(&w, 0, FIRST, 2);
    const part *p = submit(&w, 0, FIRST, 2, 64);
    CHECK(!run(&w, p, 1, SECOND));
    lc_group_stats(w.group[0][0], &stats);
    CHECK(stats.foreign > 0 && stats.packets_received == 0);
    close_all(&w);
}

/* A process asks about a group that was closed there long ago, and hears nothing: else it would go
 * on waiting for who has left. */
static void test_many_groups_closed(void) {
    enum { CLOSED = 1000 };
    const lc_group_config like = {.number = 1,
                                  .size = 2,
                                  .members = FIRST,
                                  .deadline_min_ns = DEADLINE_NS,
                                  .deadline_max_ns = DEADLINE_NS,
                                  .link_ns = SECOND};
    lc_failure failure;
    world w;
    open_all(&w, 0);
    for (uint32_t n = 0; n < CLOSED; n++) {
        lc_group_config c = like;
        c.number += n;
        lc_group *g = lc_group_open(w.host[0], &c, &failure);
        if (!CHECK(g != NULL))
            abort();
        lc_group_close(g);
    }
    lc_group_config c = like;
    c.rank = 1;
    w.group[0][1] = lc_group_open(w.host[1], &c, &failure);
    if (!CHECK(w.group[0][1] != NULL))
        abort();
    part *p = submit_at(&w, 0, 1, 2, 1, 64, 1);
    CHECK(run(&w, p, 1, 10 * SECOND) && p->code == LC_E_LINK);
    close_all(&w);
}

/* What a link still reads isn't the caller's: not when all has been sent, and not when the group
 * fails or is closed. */
static void test_memory_that_a_link_still_reads(void) {
    enum { END, ABORT, CLOSE, FATES };
    for (int fate = END; fate < FATES; fate++) {
        world w;
        make_nets(&w);
        memory_set_late(w.net[0], 10 * MS);
        open_hosts_on(&w, 0);
        for (uint16_t i = 0; i < PROCESSES; i++)
            CHECK(start(&w, i, NULL) == LC_OK);
        open_group(&w, 0, FIRST, 2);
        part *p = submit_copy(&w, 0, 640);
        CHECK(!run(&w, p, 1, 15 * MS)); /* it has been asked for the data, and handed it over */
        CHECK(memory_flights(w.net[0], 0) >= 10);
        if (fate == END)
            CHECK(run(&w, p, 2, SECOND) && have_code(p, 2, LC_OK));
        if (fate == ABORT) {
            lc_group_abort(w.group[0][0], LC_E_ABORTED, -1);
            CHECK(!run(&w, p, 1, MS));
            CHECK(run(&w, p, 1, 20 * MS));
            CHECK(submit_copy(&w, 0, 640)->code == LC_E_ABORTED);
        }
        if (fate == CLOSE) {
            lc_group_close(w.group[0][0]);
            CHECK(memory_flights(w.net[0], 0) == 0);
            p->ended = 1;
        }
        close_all(&w);
    }
}

/* A link on which nothing moves is asked now and then; when something comes by it, all of it is
 * taken. */
static void test_a_quiet_link_is_asked_less(void) {
    lc_stats before, after;
    world w;
    open_all(&w, 0);
    open_group(&w, 0, FIRST, 2);
    open_group(&w, 1, SECOND_LINK, 2);
    run(&w, NULL, 0, 10 * MS);
    lc_group_stats(w.group[0][0], &before);
    for (int i = 0; i < 400; i++)
        CHECK(!lc_host_turn(w.host[0]));
    run(&w, submit(&w, 0, FIRST, 2, 64), 2, SECOND); /* figures are told when it ends, or later */
    run(&w, NULL, 0, SECOND);
    lc_group_stats(w.group[0][0], &after);
    uint64_t calls = after.receive_calls - before.receive_calls;
    CHECK_AT(calls > 200 && calls < 700, "%llu calls", (unsigned long long)calls);
    const part *p = submit(&w, 1, SECOND_LINK, 2, 64000);
    CHECK(run(&w, p, 2, SECOND) && have_code(p, 2, LC_OK) && are_means(p, 2, 64000));
    close_all(&w);
}

/* Whether a caller that leaves after a turn wakes the thread, which stands by. */
static int wakes(lc_host *h) {
    struct pollfd woken = {h->waiter.wake_fd, POLLIN, 0};
    uint64_t drained;
    h->sleeping = h->standing_by = 1;
    lc_kick(h);
    h->sleeping = h->standing_by = 0;
    int found = poll(&woken, 1, 0) == 1;
    (void)!read(h->waiter.wake_fd, &drained, sizeof drained);
    return found;
}

static void test_who_is_left_something_is_woken(void) {
    uint8_t many[16 * NET_PAYLOAD] = {1};
    world w;
    open_all(&w, 0);
    open_group(&w, 0, FIRST, 2);
    run(&w, NULL, 0, MS);
    lc_message m = {.data = many, .elements = 1, .element_bytes = 1, .peer = 1};
    CHECK(lc_group_post(w.group[0][0], &m) == 0);
    CHECK(!wakes(w.host[0])); /* it has gone, and the answer isn't waited for */
    run(&w, NULL, 0, SECOND); /* its window is known */
    memory_set_full(w.net[0], 1, SECOND);
    m.elements = sizeof many;
    CHECK(lc_group_post(w.group[0][0], &m) == 0);
    CHECK(wakes(w.host[0]) &&
          memory_counts_of(w.net[0]).refused > 0); /* of which 8 may have gone */
    memory_set_full(w.net[0], 0, 0);
    run(&w, NULL, 0, 10 * SECOND);
    (void)submit(&w, 0, FIRST, 2, 64); /* somebody waits for it */
    CHECK(wakes(w.host[0]));
    close_all(&w);
}

/* Tokens that come with time are few, and who is first takes them all. */
static void test_a_fixed_rate_is_shared(void) {
    world w;
    open_all(&w, 1e6);
    open_group(&w, 0, FIRST, 2);
    open_group(&w, 1, SECOND_LINK, 2);
    const part *a = submit(&w, 0, FIRST, 2, 128000);
    const part *b = submit(&w, 1, SECOND_LINK, 2, 128000);
    CHECK(run(&w, a, 1, 60 * SECOND));
    uint64_t first = memory_counts_of(w.net[0]).sent, second = memory_counts_of(w.net[1]).sent;
    CHECK_AT(second > first / 2, "%llu by the first link, %llu by the second",
             (unsigned long long)first, (unsigned long long)second);
    CHECK(run(&w, a, 4, 60 * SECOND) && have_code(a, 2, LC_OK) && have_code(b, 2, LC_OK));
    close_all(&w);
}

/* The sender has begun with one group, its receiver with the other. What is sent first takes longer
 * than the second group may be silent, which is no reason to give it up. */
static void test_a_group_stands_behind_another(int reliable) {
    world w;
    lc_stats stats;
    open_all(&w, 1e4);
    open_group(&w, 0, FIRST, 2);
    open_group(&w, 1, FIRST, 2);
    const part *large = submit_copy_at(&w, 0, 0, 64000, 0);
    const part *behind = submit_copy_at(&w, 1, 0, 640, reliable);
    (void)submit_copy_at(&w, 1, 1, 640, reliable);
    take_turns(&w, 1);
    (void)submit_copy_at(&w, 0, 1, 64000, 0);
    CHECK(!run(&w, large, 1, 2 * DEADLINE_NS) && !behind->ended); /* it takes as long as that */
    CHECK(run(&w, large, 4, 60 * SECOND) && have_code(large, 4, LC_OK));
    for (int number = 0; number < 2; number++) {
        lc_group_stats(w.group[number][1], &stats);
        CHECK_AT(stats.packets_missing == 0, "group %d lacks %llu packets", number,
                 (unsigned long long)stats.packets_missing);
    }
    close_all(&w);
}

static void test_events_and_figures(void) {
    const lc_event told = {.kind = LC_EVENT_FAILING, .sys_errno = ENETDOWN, .peer = -1};
    lc_event event;
    lc_stats stats;
    world w;
    open_all(&w, 0);
    open_group(&w, 0, ALL, 3);
    memory_tell(w.net[1], 0, &told);
    const part *p = submit(&w, 0, ALL, 3, 64);
    CHECK(run(&w, p, 3, SECOND));
    run(&w, NULL, 0, SECOND);
    CHECK(lc_host_event(w.host[0], &event) && event.link == 1 && event.sys_errno == ENETDOWN);
    CHECK(!lc_host_event(w.host[0], &event));
    lc_group_stats(w.group[0][0], &stats);
    CHECK(stats.receive_calls >= 2 * stats.send_calls / PROCESSES && stats.send_calls >= 4);
    close_all(&w);
}

static void test_what_cannot_be_opened(void) {
    const uint16_t beyond[] = {0, LINKS, 1};
    lc_link_info info;
    lc_failure failure;
    world w;
    open_hosts(&w, 0);
    CHECK(start(&w, 0, beyond) == LC_E_ARGUMENT);
    for (uint16_t i = 0; i < PROCESSES; i++)
        CHECK(start(&w, i, NULL) == LC_OK); /* it can be tried again */
    CHECK(lc_host_link(w.host[0], 1, &info) == LC_OK);
    CHECK(lc_host_link(w.host[0], LINKS, &info) == LC_E_ARGUMENT);
    open_group(&w, 0, ALL, 3);
    const part *p = submit(&w, 0, ALL, 3, 64);
    CHECK(run(&w, p, 3, SECOND) && have_code(p, 3, LC_OK));
    close_all(&w);

    make_nets(&w);
    memory_net *narrow = memory_net_new(1, LC_HEADER_BYTES + NET_PAYLOAD - 1, 100, 1);
    lc_link *links[] = {memory_link_open(w.net[0], 0), memory_link_open(narrow, 0), NULL, NULL,
                        NULL};
    lc_host_config c = config_of(0);
    lc_setting setting = {memory_clock(w.net[0]), links, LINKS};
    CHECK(!lc_host_open_in(&c, &setting, &failure) && failure.code == LC_E_ARGUMENT);
    CHECK(failure.mine[0] == LC_HEADER_BYTES + NET_PAYLOAD);
    CHECK(failure.theirs[0] == LC_HEADER_BYTES + NET_PAYLOAD - 1 && failure.theirs[1] == 1);
    setting.n_links = LC_LINKS + 1;
    CHECK(!lc_host_open_in(&c, &setting, &failure) && failure.code == LC_E_ARGUMENT);
    lc_link_close(links[0]); /* they are ours still */
    lc_link_close(links[1]);
    memory_net_free(narrow);
    free_nets(&w);
}

/* ---- sleeping ---- */

/* A link that is nothing but what it sleeps on: two pipes. */
typedef struct {
    lc_link link;
    int pipes[LC_LINK_DESCRIPTORS][2];
    int blocked; /* as it was told last */
    uint64_t most_ns;
} sleeper;

static int descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns) {
    sleeper *s = (sleeper *)(void *)link;
    s->blocked = blocked;
    *timeout_ns = s->most_ns < *timeout_ns ? s->most_ns : *timeout_ns;
    for (int i = 0; i < LC_LINK_DESCRIPTORS; i++)
        fds[i] = (struct pollfd){s->pipes[i][0], POLLIN, 0};
    return LC_LINK_DESCRIPTORS;
}

static const lc_link_ops sleeper_ops = {.name = "sleeper", .descriptors = descriptors};

static const uint64_t LONGEST_NS = 10000000000u;

static int sleep_on_all(lc_waiter *waiter, sleeper *sleepers, int blocked) {
    lc_sleep sleep;
    lc_sleep_begin(&sleep, LONGEST_NS);
    for (int i = 0; i < LC_LINKS; i++)
        lc_sleep_on(&sleep, &sleepers[i].link, i == blocked);
    return lc_waiter_sleep(waiter, &sleep);
}

static void test_sleeping_on_all_links(void) {
    sleeper sleepers[LC_LINKS];
    lc_waiter waiter;
    char byte = 0;
    CHECK(lc_waiter_open(&waiter));
    for (int i = 0; i < LC_LINKS; i++) {
        sleepers[i] = (sleeper){.link = {.ops = &sleeper_ops}, .most_ns = UINT64_MAX};
        for (int k = 0; k < LC_LINK_DESCRIPTORS; k++)
            CHECK(pipe(sleepers[i].pipes[k]) == 0);
    }
    for (int i = 0; i < LC_LINKS; i++)
        for (int k = 0; k < LC_LINK_DESCRIPTORS; k++) {
            uint64_t begin = lc_now();
            CHECK(write(sleepers[i].pipes[k][1], &byte, 1) == 1);
            CHECK(!sleep_on_all(&waiter, sleepers, i));
            if (!CHECK(lc_now() - begin < LONGEST_NS)) /* this descriptor wakes nobody */
                return;
            CHECK(read(sleepers[i].pipes[k][0], &byte, 1) == 1);
            for (int j = 0; j < LC_LINKS; j++)
                CHECK(sleepers[j].blocked == (j == i));
        }
    sleepers[1].most_ns = 0;
    uint64_t begin = lc_now();
    CHECK(!sleep_on_all(&waiter, sleepers, 0));
    CHECK(lc_now() - begin < LONGEST_NS); /* the second link wants to be asked at once */
    lc_waiter_wake(&waiter);
    CHECK(sleep_on_all(&waiter, sleepers, 0));
    for (int i = 0; i < LC_LINKS; i++)
        for (int k = 0; k < 2 * LC_LINK_DESCRIPTORS; k++)
            close(sleepers[i].pipes[k / 2][k % 2]);
    lc_waiter_close(&waiter);
}

int main(void) {
    test_a_group_over_two_links();
    test_one_link_is_full();
    test_who_waits_rests();
    test_one_link_fails_for_good();
    test_packets_by_another_link_are_foreign();
    test_many_groups_closed();
    test_a_fixed_rate_is_shared();
    test_a_group_stands_behind_another(0);
    test_a_group_stands_behind_another(1);
    test_memory_that_a_link_still_reads();
    test_a_quiet_link_is_asked_less();
    test_who_is_left_something_is_woken();
    test_events_and_figures();
    test_what_cannot_be_opened();
    test_sleeping_on_all_links();
    return check_result("test_interfaces");
}
