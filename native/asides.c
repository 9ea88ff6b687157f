#define _GNU_SOURCE
#include "asides.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const uint8_t MARK[LC_ASIDE_MARK_BYTES] = LC_ASIDE_MARK;

lc_asides *lc_asides_open(void) {
    lc_asides *asides = calloc(1, sizeof *asides);
    if (!asides)
        return NULL;
    asides->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (asides->wake_fd >= 0)
        return asides;
    free(asides);
    return NULL;
}

void lc_asides_close(lc_asides *asides) {
    if (!asides)
        return;
    close(asides->wake_fd);
    free(asides);
}

int lc_asides_has(const uint8_t *data, uint32_t n) {
    return n >= sizeof MARK && !memcmp(data, MARK, sizeof MARK);
}

/* Whoever takes looks again after it has moved `out`, and this looks at `out` after it has moved
 * `in`: one of the two sees what the other has done, so nothing stays here unseen. */
void lc_asides_put(lc_asides *asides, const lc_link *link, const lc_arrival *arrival,
                   const uint8_t *data, uint32_t n) {
    uint64_t one = 1;
    unsigned in = atomic_load_explicit(&asides->in, memory_order_relaxed);
    lc_aside *aside = &asides->kept[in % LC_ASIDES];
    if (n > LC_ASIDE_BYTES || in - atomic_load(&asides->out) == LC_ASIDES) {
        atomic_fetch_add(&asides->dropped, 1);
        return;
    }
    link->ops->source(link, arrival, aside);
    aside->length = (uint16_t)n;
    memcpy(aside->data, data, n);
    atomic_store(&asides->in, in + 1);
    if (atomic_load(&asides->out) == in)
        (void)!write(asides->wake_fd, &one, sizeof one);
}

int lc_asides_take(lc_asides *asides, lc_aside *aside) {
    unsigned out = atomic_load_explicit(&asides->out, memory_order_relaxed);
    if (atomic_load(&asides->in) == out)
        return 0;
    *aside = asides->kept[out % LC_ASIDES];
    atomic_store(&asides->out, out + 1);
    return 1;
}
