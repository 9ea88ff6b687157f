/* Operations on slow, lossy links take a small multiple of what the links need. */
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

int main(void) {
    test_small_operations();
    return check_result("test_slow_links");
}
