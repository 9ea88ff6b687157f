/* Copies past the caches: every place within a line, at both ends, and lengths around whole lines.
 */
#include "../../native/copy.c"

#include "check.h"

#include <stdlib.h>

enum { LINE_BYTES = 64, PLACES = LINE_BYTES + 1, LENGTHS = 5 * LINE_BYTES + 2, ROOM = 1024 };

/* Of what lies around it, nothing is written. */
static void check_copy(uint8_t *to, const uint8_t *from, size_t n) {
    static uint8_t want[ROOM];
    memset(to, 0xEE, ROOM);
    memset(want, 0xEE, ROOM);
    memcpy(want + PLACES, from, n);
    lc_copy_past_caches(to + PLACES, from, n);
    CHECK_AT(!memcmp(to, want, ROOM), "%zu bytes, to %zu, from %zu", n,
             (size_t)(uintptr_t)to % LINE_BYTES, (size_t)(uintptr_t)from % LINE_BYTES);
}

int main(void) {
    static uint8_t from[ROOM], to[ROOM + PLACES];
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)(i * 7 + (i >> 8));
    for (size_t place = 0; place < PLACES; place++)
        for (size_t n = 0; n < LENGTHS; n++)
            check_copy(to + place, from + (place * 3 + n) % PLACES, n);
    size_t large = (1 << 22) + 12345;
    uint8_t *a = malloc(large), *b = malloc(large);
    if (CHECK(a && b)) {
        for (size_t i = 0; i < large; i++)
            a[i] = (uint8_t)(i * 31 + (i >> 9));
        lc_copy_past_caches(b, a, large);
        CHECK(!memcmp(a, b, large));
    }
    free(a);
    free(b);
    return check_result("test_copy");
}
