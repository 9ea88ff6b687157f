/* Hosts with several links, in virtual time: one that is full while the other goes on, packets and
 * memory that are a link's, and what can't be opened; and what a host sleeps on. */
#include "loop.h"
#include "two_links.h"
#include "waiter.h"

#include <errno.h>
#include <unistd.h>

/* ---- tests ---- */

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
    test_one_link_is_full();
    test_who_waits_rests();
    test_packets_by_another_link_are_foreign();
    test_a_fixed_rate_is_shared();
    test_memory_that_a_link_still_reads();
    test_a_quiet_link_is_asked_less();
    test_who_is_left_something_is_woken();
    test_events_and_figures();
    test_what_cannot_be_opened();
    test_sleeping_on_all_links();
    return check_result("test_interfaces");
}
