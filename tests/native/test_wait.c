/* A caller that does the engine's work while it waits: when it looks again at once, when it sleeps,
 * for how long, and what wakes it; and tickets whose names are asked for. In virtual time: when the
 * caller of rank 0 goes to sleep, rank 1 takes its turns until the sleep is over. */
#define _DEFAULT_SOURCE
#include "check.h"
#include "loop.h"
#include "op.h"
#include "virtual_net.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { PAYLOAD = 256, BYTES = 1000, LARGE = 70000 };

static const uint64_t US = 1000, MS = 1000000, LONGEST_NS = 100000000;

typedef struct {
    virtual_net v;
    int sleeps;
    uint64_t slept_ns, sends_ns; /* when rank 1 sends; 0: it doesn't */
    int wanted;                  /* when it first goes to sleep, something is wanted of it */
    int slept_on;                /* though something was */
    uint8_t data[LARGE], room[LARGE];
} world;

static int is_woken(const lc_waiter *waiter) {
    struct pollfd woken = {waiter->wake_fd, POLLIN, 0};
    return poll(&woken, 1, 0) == 1;
}

static int64_t post(world *w, uint16_t rank, void *data, uint64_t bytes, int receive) {
    lc_message m = {.data = data,
                    .elements = bytes,
                    .timeout_ns = 60000 * MS,
                    .element_bytes = 1,
                    .peer = 1 - rank,
                    .receive = (uint8_t)receive};
    return lc_group_post(w->v.group[rank], &m);
}

/* Another thread leaves something just then; a sleep would drain what has woken it before. */
static void leave_something(world *w) {
    lc_waiter *waiter = &w->v.host[0]->caller_waiter;
    if (w->wanted && w->sleeps == 1) {
        CHECK(post(w, 0, w->data, BYTES, 0) == 0);
        lc_waiter_wake(waiter);
    } else if (w->wanted && w->sleeps == 2) {
        w->slept_on = !is_woken(waiter);
    }
}

static void sleep_virtually(void *context, uint16_t rank, uint64_t *longest_ns) {
    world *w = context;
    virtual_net *v = &w->v;
    uint64_t begin = memory_now(v->net), end = begin + *longest_ns;
    CHECK(rank == 0);
    *longest_ns = 0;
    w->sleeps++;
    leave_something(w);
    if (w->wanted && w->sleeps == 1)
        return;
    memory_path_of(v->net, 0, 1)->cut = 0;
    while (memory_now(v->net) < end && memory_next(v->net, 0) > memory_now(v->net)) {
        if (w->sends_ns && memory_now(v->net) >= w->sends_ns) {
            w->sends_ns = 0;
            CHECK(post(w, 1, w->data, BYTES, 0) == 0);
        }
        while (lc_host_turn(v->host[1])) {
        }
        uint64_t next = virtual_wakes(v, 1), comes = memory_next(v->net, 0);
        if (w->sends_ns && w->sends_ns < next)
            next = w->sends_ns;
        next = comes < next ? comes : next;
        virtual_set_now(v, next < end ? next : end);
    }
    w->slept_ns += memory_now(v->net) - begin;
}

static world *open_world(void) {
    static world w;
    memset(&w, 0, sizeof w);
    const virtual_setup how = {.size = 2,
                               .payload = PAYLOAD,
                               .capacity = 4096,
                               .delay_ns = 20 * US,
                               .group = {.deadline_max_ns = 10000 * MS, .met = 1}};
    virtual_open(&w.v, &how);
    memset(w.data, 7, sizeof w.data);
    virtual_go_on(&w.v, 10 * MS);
    memory_set_sleep(w.v.net, sleep_virtually, &w);
    memory_set_step(w.v.net, US);
    return &w;
}

/* Returns the time that the caller was awake. */
static uint64_t wait_for(world *w, int64_t ticket) {
    const lc_op *op = (const lc_op *)(intptr_t)ticket;
    uint64_t begin = memory_now(w->v.net);
    w->sleeps = 0;
    w->slept_ns = 0;
    lc_drive(w->v.host[0], op, LONGEST_NS);
    CHECK(op->finished);
    return memory_now(w->v.net) - begin - w->slept_ns;
}

static void receive_later(world *w, uint64_t ns) {
    w->sends_ns = memory_now(w->v.net) + ns;
}

static void test_a_caller_looks_again_and_then_sleeps(void) {
    world *w = open_world();
    receive_later(w, 30 * MS);
    uint64_t awake = wait_for(w, post(w, 0, w->room, BYTES, 1));
    CHECK_AT(w->sleeps >= 1 && w->slept_ns > 25 * MS, "%d sleeps", w->sleeps);
    CHECK_AT(awake >= 200 * US && awake < 3 * MS, "awake for %lu ns", (unsigned long)awake);
    CHECK(memcmp(w->room, w->data, BYTES) == 0);
    virtual_close(&w->v);
}

/* The first word of a large message is lost, and nobody but the sender's timers knows. */
static void test_a_sleep_ends_for_timers(void) {
    world *w = open_world();
    CHECK(post(w, 1, w->room, LARGE, 1) > 0);
    memory_path_of(w->v.net, 0, 1)->cut = 1;
    wait_for(w, post(w, 0, w->data, LARGE, 0));
    CHECK(w->sleeps >= 2 && memory_counts_of(w->v.net).lost > 0);
    CHECK(memcmp(w->room, w->data, LARGE) == 0);
    virtual_close(&w->v);
}

static void test_who_is_wanted_stays_awake(void) {
    world *w = open_world();
    w->wanted = 1;
    receive_later(w, 5 * MS);
    wait_for(w, post(w, 0, w->room, BYTES, 1));
    CHECK(w->sleeps >= 2 && !w->slept_on);
    virtual_close(&w->v);
}

/* What is left to a host wakes who sleeps: a caller, where one does the work. */
static void test_who_is_woken(void) {
    for (int caller = 0; caller < 2; caller++) {
        world *w = open_world();
        lc_host *h = w->v.host[0];
        *(caller ? &h->caller_sleeps : &h->sleeping) = 1;
        lc_nudge(h);
        CHECK(is_woken(&h->caller_waiter) == caller && is_woken(&h->waiter) == !caller);
        h->caller_sleeps = h->sleeping = 0;
        virtual_close(&w->v);
    }
}

/* A yield that took long says that others want the core. Then callers sleep at once, for a while.
 */
static void test_who_shares_the_core_sleeps_at_once(void) {
    world *w = open_world();
    receive_later(w, MS / 2);
    memory_set_step(w->v.net, 60 * US);
    wait_for(w, post(w, 0, w->room, BYTES, 1));
    memory_set_step(w->v.net, US);
    receive_later(w, MS);
    uint64_t awake = wait_for(w, post(w, 0, w->room, BYTES, 1));
    CHECK_AT(w->sleeps >= 1 && awake < 100 * US, "awake for %lu ns", (unsigned long)awake);
    virtual_go_on(&w->v, 10 * MS);
    receive_later(w, MS);
    awake = wait_for(w, post(w, 0, w->room, BYTES, 1));
    CHECK_AT(awake >= 200 * US, "awake for %lu ns", (unsigned long)awake);
    virtual_close(&w->v);
}

/* Where there are more processes than cores, nobody looks again: between two sleeps is no more than
 * the turn that finds nothing, and the thread doesn't stay awake either. */
static void test_who_has_no_core_of_its_own_never_looks_again(void) {
    world *w = open_world();
    lc_host_crowded(w->v.host[0]);
    for (int i = 0; i < 3; i++) {
        receive_later(w, 30 * MS);
        uint64_t awake = wait_for(w, post(w, 0, w->room, BYTES, 1));
        uint64_t each = awake / (uint64_t)(w->sleeps + 1);
        CHECK_AT(w->sleeps >= 1 && w->slept_ns > 25 * MS, "%d sleeps", w->sleeps);
        CHECK_AT(each < 20 * US, "awake for %lu ns between two sleeps", (unsigned long)each);
    }
    virtual_close(&w->v);
}

/* Who took the core for longer isn't given it again for longer: 128 times as long. */
static void test_who_was_away_for_long_yields_later(void) {
    world *w = open_world();
    receive_later(w, MS / 2);
    memory_set_step(w->v.net, 150 * US);
    wait_for(w, post(w, 0, w->room, BYTES, 1));
    memory_set_step(w->v.net, US);
    virtual_go_on(&w->v, 10 * MS);
    receive_later(w, MS);
    uint64_t awake = wait_for(w, post(w, 0, w->room, BYTES, 1));
    CHECK_AT(awake < 100 * US, "awake for %lu ns", (unsigned long)awake);
    virtual_go_on(&w->v, 15 * MS);
    receive_later(w, MS);
    awake = wait_for(w, post(w, 0, w->room, BYTES, 1));
    CHECK_AT(awake >= 200 * US, "awake for %lu ns", (unsigned long)awake);
    virtual_close(&w->v);
}

static int64_t next_of(world *w) {
    uint64_t owner = 9;
    int64_t ticket = lc_completions_next(w->v.completions, 0, &owner);
    CHECK(owner == (ticket > 0 ? 0 : 9));
    return ticket;
}

/* Named once, whether its name is asked for before it ends or afterwards. */
static void test_names_that_are_asked_for_later(void) {
    for (int late = 0; late < 2; late++) {
        world *w = open_world();
        lc_group *g = w->v.group[0];
        lc_report report;
        lc_failure failure;
        memory_set_step(w->v.net, 0);
        int64_t ticket = post(w, 0, w->room, BYTES, 1);
        if (!late)
            lc_group_notify(g, ticket);
        virtual_go_on(&w->v, 10 * MS);
        CHECK(next_of(w) == 0);
        CHECK(post(w, 1, w->data, BYTES, 0) == 0);
        virtual_go_on(&w->v, 10 * MS);
        CHECK(lc_group_result(g, ticket, &report, &failure) == LC_OK);
        if (late) {
            CHECK(next_of(w) == 0);
            lc_group_notify(g, ticket);
        }
        CHECK(next_of(w) == ticket);
        CHECK(next_of(w) == 0);
        lc_group_release(g, ticket);
        virtual_close(&w->v);
    }
}

/* Of two groups in one queue, the one that is closed takes out what is its own, and nothing else.
 */
static void test_a_closed_group_takes_its_names_along(void) {
    for (uint16_t closed = 0; closed < 2; closed++) {
        world *w = open_world();
        uint16_t left = 1 - closed;
        lc_completions *c = w->v.completions;
        int64_t tickets[6];
        memory_set_step(w->v.net, 0);
        for (uint16_t i = 0; i < 6; i++) {
            tickets[i] = post(w, i % 2, w->room + i * BYTES, BYTES, 1);
            CHECK(post(w, 1 - i % 2, w->data, BYTES, 0) == 0);
            virtual_go_on(&w->v, 10 * MS);
        }
        for (uint16_t i = 0; i < 4; i++)
            lc_group_notify(w->v.group[i % 2], tickets[i]);
        lc_group_close(w->v.group[closed]);
        w->v.group[closed] = NULL;
        lc_group_notify(w->v.group[left], tickets[4 + left]);
        for (int i = 0; i < 3; i++) {
            uint64_t owner = 9;
            CHECK(lc_completions_next(c, 0, &owner) == tickets[2 * i + left]);
            CHECK(owner == left);
            lc_group_release(w->v.group[left], tickets[2 * i + left]);
        }
        CHECK(next_of(w) == 0);
        lc_completions_stop(c, 1);
        CHECK(next_of(w) == LC_E_CLOSED);
        lc_completions_stop(c, 0);
        CHECK(next_of(w) == 0);
        virtual_close(&w->v);
    }
}

/* ---- wake-ups that timers would hide ---- */

enum { LONG_MS = 4000 }; /* what hides a lost one; whoever is woken takes less than half of it */

static uint64_t real_ns(void) {
    return lc_clock_now(&lc_system_clock);
}

typedef struct {
    world *w;
    int sleeps, attended;
    uint64_t begin_ns, slept_ns;
} thread_asleep;

/* The first time, something is left after the thread has looked, and before it says that it
 * sleeps: nobody wakes it. The second time the thread ends. */
static void fall_asleep(void *context, uint16_t rank, uint64_t *longest_ns) {
    thread_asleep *t = context;
    lc_host *h = t->w->v.host[0];
    CHECK(rank == 0);
    if (t->sleeps++) {
        t->slept_ns = real_ns() - t->begin_ns;
        t->attended = !atomic_load(&h->attention);
        *longest_ns = 0;
        atomic_store(&h->stop, 1);
        return;
    }
    CHECK(post(t->w, 0, t->w->data, BYTES, 0) == 0);
    CHECK(atomic_load(&h->attention) && !is_woken(&h->waiter));
    t->begin_ns = real_ns();
    *longest_ns = LONG_MS * MS;
}

static void test_the_thread_looks_before_it_sleeps(void) {
    world *w = open_world();
    lc_host *h = w->v.host[0];
    thread_asleep t = {.w = w};
    memory_set_sleep(w->v.net, fall_asleep, &t);
    lc_progress(h); /* this thread is the host's */
    atomic_store(&h->stop, 0);
    CHECK(t.sleeps == 2 && t.attended);
    CHECK_AT(t.slept_ns < LONG_MS * MS / 2, "asleep for %lu ms", (unsigned long)(t.slept_ns / MS));
    virtual_close(&w->v);
}

static int watched, has_come;

static int watch(lc_link *link) {
    (void)link;
    watched++;
    return has_come;
}

/* A caller that has driven leaves the links to the thread, which may sleep on them: peers are told
 * so, and what has come meanwhile wakes it. */
static void test_a_caller_says_that_it_leaves_the_links(void) {
    for (int kind = 0; kind < 8; kind++) {
        world *w = open_world();
        lc_host *h = w->v.host[0];
        lc_link *link = h->interfaces[0].link;
        lc_link_ops ops = *link->ops;
        int sleeps = kind & 1, kicks = kind >> 1 & 1;
        ops.watch = watch;
        link->ops = &ops;
        watched = 0;
        has_come = kind >> 2 & 1;
        h->sleeping = sleeps;
        if (kicks) {
            lc_kick(h);
        } else {
            receive_later(w, MS / 10);
            wait_for(w, post(w, 0, w->room, BYTES, 1));
        }
        CHECK_AT(watched >= sleeps && (sleeps || !watched), "kind %d: told %d times", kind,
                 watched);
        CHECK_AT(is_woken(&h->waiter) == (sleeps && has_come), "kind %d", kind);
        h->sleeping = 0;
        virtual_close(&w->v);
    }
}

typedef struct {
    world *w;
    atomic_int begun;
    int64_t ticket;
    uint64_t waited_ns;
} watcher;

static void *watch_for_names(void *argument) {
    watcher *me = argument;
    uint64_t owner, begin = real_ns();
    atomic_store(&me->begun, 1);
    me->ticket = lc_completions_next(me->w->v.completions, LONG_MS * MS, &owner);
    me->waited_ns = real_ns() - begin;
    return NULL;
}

/* A thread that waits for names of what has finished gets them at once, not when it would look
 * again anyway. */
static void test_who_waits_for_names_is_woken(void) {
    world *w = open_world();
    pthread_t thread;
    watcher me = {.w = w};
    memory_set_sleep(w->v.net, NULL, NULL);
    int64_t ticket = post(w, 0, w->room, BYTES, 1);
    lc_group_notify(w->v.group[0], ticket);
    pthread_create(&thread, NULL, watch_for_names, &me);
    while (!atomic_load(&me.begun))
        usleep(1000);
    usleep(50000); /* it sleeps by then, or the test sees less */
    CHECK(post(w, 1, w->data, BYTES, 0) == 0);
    virtual_go_on(&w->v, 10 * MS);
    pthread_join(thread, NULL);
    CHECK(me.ticket == ticket);
    CHECK_AT(me.waited_ns < LONG_MS * MS / 2, "%lu ms", (unsigned long)(me.waited_ns / MS));
    lc_group_release(w->v.group[0], ticket);
    virtual_close(&w->v);
}

int main(void) {
    test_the_thread_looks_before_it_sleeps();
    test_a_caller_says_that_it_leaves_the_links();
    test_who_waits_for_names_is_woken();
    test_a_caller_looks_again_and_then_sleeps();
    test_a_sleep_ends_for_timers();
    test_who_is_wanted_stays_awake();
    test_who_is_woken();
    test_who_shares_the_core_sleeps_at_once();
    test_who_has_no_core_of_its_own_never_looks_again();
    test_who_was_away_for_long_yields_later();
    test_names_that_are_asked_for_later();
    test_a_closed_group_takes_its_names_along();
    return check_result("test_wait");
}
