#define _GNU_SOURCE
#include "out_of_band.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const uint8_t MARK[LC_OOB_MARK_BYTES] = LC_OOB_MARK;

lc_oob_ring *lc_oob_open(void) {
    lc_oob_ring *oob = calloc(1, sizeof *oob);
    if (!oob)
        return NULL;
    oob->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (oob->wake_fd >= 0)
        return oob;
    free(oob);
    return NULL;
}

void lc_oob_close(lc_oob_ring *oob) {
    if (!oob)
        return;
    close(oob->wake_fd);
    free(oob);
}

int lc_oob_has(const uint8_t *data, uint32_t n) {
    return n >= sizeof MARK && !memcmp(data, MARK, sizeof MARK);
}

/* Whoever takes looks again after it has moved `out`, and this looks at `out` after it has moved
 * `in`: one of the two sees what the other has done, so nothing stays here unseen. */
void lc_oob_put(lc_oob_ring *oob, const lc_link *link, const lc_arrival *arrival,
                const uint8_t *data, uint32_t n) {
    uint64_t one = 1;
    unsigned in = atomic_load_explicit(&oob->in, memory_order_relaxed);
    lc_oob_datagram *datagram = &oob->kept[in % LC_OOB_KEPT];
    if (n > LC_OOB_BYTES || in - atomic_load(&oob->out) == LC_OOB_KEPT) {
        atomic_fetch_add(&oob->dropped, 1);
        return;
    }
    link->ops->source(link, arrival, datagram);
    datagram->length = (uint16_t)n;
    memcpy(datagram->data, data, n);
    atomic_store(&oob->in, in + 1);
    if (atomic_load(&oob->out) == in)
        (void)!write(oob->wake_fd, &one, sizeof one);
}

int lc_oob_take(lc_oob_ring *oob, lc_oob_datagram *datagram) {
    unsigned out = atomic_load_explicit(&oob->out, memory_order_relaxed);
    if (atomic_load(&oob->in) == out)
        return 0;
    *datagram = oob->kept[out % LC_OOB_KEPT];
    atomic_store(&oob->out, out + 1);
    return 1;
}
