/* Operations on slow, lossy links take a small multiple of what the links need, and those that
 * begin after a pause don't overrun the ports. */
#include "check.h"
#include "slow_links.h"

/* Of those that benchmarks/micro/slow_links.py draws: operations that are small against their round
 * trips, and of which the last packets and records were lost. */
static void test_small_operations(void) {
    static const uint64_t seeds[] = {20, 62, 66, 74, 104};
    for (int i = 0; i < 5; i++) {
        slow_scenario s = slow_drawn(seeds[i]);
        s.burst = 1;
        slow_run *r = slow_run_all(&s);
        CHECK(r->ended == s.ops && r->ops[r->ended - 1].counts.lost > 0);
        for (uint32_t k = 0; k < r->ended; k++) {
            double times = slow_seconds(r, k) / slow_limit_s(&s);
            CHECK(r->ops[k].code == LC_OK);
            CHECK_AT(times < 10, "seed %d, operation %u: %.1f times the limit", (int)s.seed, k,
                     times);
        }
        free(r);
    }
}

/* Four hosts begin at once, each with three paths through one port. In the end of each operation
 * some path has had the port for itself, and knows no better. */
static void test_after_a_pause(int paces_port) {
    static const double pauses_ms[] = {12000, 40000};
    for (int k = 0; k < 2; k++) {
        slow_scenario s = {.seed = 1,
                           .hosts = 4,
                           .mbit = 1000,
                           .rtt_ms = 20,
                           .queue_ms = 25,
                           .loss = 0.01,
                           .burst = 1,
                           .capacity = 2000,
                           .paces_port = paces_port,
                           .bytes = 26214400,
                           .ops = 4,
                           .deep = 1,
                           .pause_ms = pauses_ms[k]};
        slow_run *r = slow_run_all(&s);
        const memory_counts *first = &r->ops[0].counts, *last = &r->ops[3].counts;
        double dropped =
            (double)(last->dropped - first->dropped) / (double)(last->sent - first->sent);
        CHECK_AT(dropped < 0.01, "port %d, %.0f s: dropped %.4f", paces_port, s.pause_ms / 1000,
                 dropped);
        for (uint32_t i = 1; i < r->ended; i++) {
            double times = slow_seconds(r, i) / slow_limit_s(&s);
            CHECK_AT(times < 1.3, "port %d, %.0f s, operation %u: %.2f times the limit", paces_port,
                     s.pause_ms / 1000, i, times);
        }
        free(r);
    }
}

/* A port that queues for 3 ms shows no queue to speak of, and each path has had all of it in the
 * end of some operation. Of what all together send, little is lost there (a third, if each goes on
 * as if it were alone), and operations take no longer for it. */
static void test_short_queues(void) {
    static const struct {
        double mbit, rtt_ms, bytes, most;
    } cases[] = {{100, 20, 1048576, 0.12}, {100, 40, 4194304, 0.1}, {1000, 20, 26214400, 0.14}};
    for (int k = 0; k < 3; k++) {
        slow_scenario s = {.seed = 1,
                           .hosts = 4,
                           .mbit = cases[k].mbit,
                           .rtt_ms = cases[k].rtt_ms,
                           .queue_ms = 3,
                           .loss = 0.01,
                           .burst = 1,
                           .capacity = 4096,
                           .bytes = cases[k].bytes,
                           .ops = SLOW_OPS,
                           .deep = 1,
                           .pause_ms = 5};
        slow_run *r = slow_run_all(&s);
        const memory_counts *first = &r->ops[3].counts, *last = &r->ops[r->ended - 1].counts;
        double dropped =
            (double)(last->dropped - first->dropped) / (double)(last->sent - first->sent);
        CHECK_AT(dropped < cases[k].most, "%g Mbit/s: dropped %.3f", s.mbit, dropped);
        for (uint32_t i = 4; i < r->ended; i++) {
            double times = slow_seconds(r, i) / slow_limit_s(&s);
            CHECK_AT(times < 1.5, "%g Mbit/s, operation %u: %.2f times the limit", s.mbit, i,
                     times);
        }
        free(r);
    }
}

/* Nothing but the hosts' own packets crosses the network. Each path by itself overruns the port
 * that it shares; a port that is paced as one loses nothing once its rate is known. */
static void test_paced_ports(void) {
    for (int paced = 0; paced < 2; paced++) {
        slow_scenario s = {.seed = 3,
                           .hosts = 8,
                           .mbit = 20,
                           .rtt_ms = 20,
                           .queue_ms = 25,
                           .burst = 1,
                           .capacity = 4000,
                           .paces_port = paced,
                           .bytes = 2097152,
                           .ops = SLOW_OPS,
                           .deep = 1};
        slow_run *r = slow_run_all(&s);
        const memory_counts *first = &r->ops[5].counts, *last = &r->ops[r->ended - 1].counts;
        uint64_t dropped = last->dropped - first->dropped, sent = last->sent - first->sent;
        CHECK_AT(paced ? dropped * 1000 <= sent : dropped * 100 > sent, "paced %d: %llu of %llu",
                 paced, (unsigned long long)dropped, (unsigned long long)sent);
        for (uint32_t i = 6; i < r->ended && paced; i++) {
            double times = slow_seconds(r, i) / slow_limit_s(&s);
            CHECK_AT(times < 1.12, "operation %u: %.2f times the limit", i, times);
        }
        free(r);
    }
}

/* -sample: some of it. */
int main(int argc, char **argv) {
    test_small_operations();
    if (check_samples(argc, argv))
        return check_result("test_slow_links");
    for (int paces_port = 0; paces_port < 2; paces_port++)
        test_after_a_pause(paces_port);
    test_paced_ports();
    test_short_queues();
    return check_result("test_slow_links");
}
