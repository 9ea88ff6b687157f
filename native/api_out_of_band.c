/* What callers call for out-of-band datagrams. */
#define _GNU_SOURCE
#include "out_of_band.h"

#include <fcntl.h>

#include "state.h"

int lc_host_oob_open(lc_host *h) {
    const lc_link *link = h->interfaces[0].link;
    if (h->running || h->oob || !link->ops->say || !link->ops->source)
        return LC_E_ARGUMENT;
    h->oob = lc_oob_open();
    return h->oob ? h->oob->wake_fd : LC_E_MEMORY;
}

int lc_host_say(lc_host *h, const lc_address *to, const uint8_t *data, uint16_t n) {
    if (!h->oob || n > LC_OOB_BYTES || !lc_oob_has(data, n))
        return LC_E_ARGUMENT;
    return lc_link_say(h->interfaces[0].link, to, data, n);
}

int lc_host_heard(lc_host *h, lc_oob_datagram *datagram) {
    return h->oob && lc_oob_take(h->oob, datagram);
}

uint64_t lc_host_oob_dropped(lc_host *h) {
    return h->oob ? atomic_load(&h->oob->dropped) : 0;
}
