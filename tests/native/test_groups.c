/* Groups of hosts with two links, in virtual time: one over both links, those that a link's failure
 * ends and those that it doesn't, groups that were closed, and one that stands behind another. */
#include "two_links.h"

#include <errno.h>

static void test_a_group_over_two_links(void) {
    world w;
    open_all(&w, 0);
    open_group(&w, 0, ALL, 3);
    const part *p = submit(&w, 0, ALL, 3, 6400); /* 100 packets to each peer, and back */
    CHECK(run(&w, p, 3, SECOND) && have_code(p, 3, LC_OK) && are_means(p, 3, 6400));
    CHECK(memory_counts_of(w.net[0]).sent >= 400 && memory_counts_of(w.net[1]).sent >= 800);
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

int main(void) {
    test_a_group_over_two_links();
    test_one_link_fails_for_good();
    test_many_groups_closed();
    test_a_group_stands_behind_another(0);
    test_a_group_stands_behind_another(1);
    return check_result("test_groups");
}
