/* What callers call for datagrams aside. */
#define _GNU_SOURCE
#include "asides.h"

#include <fcntl.h>

#include "state.h"

int lc_host_asides(lc_host *h) {
    const lc_link *link = h->interfaces[0].link;
    if (h->running || h->asides || !link->ops->say || !link->ops->source)
        return LC_E_ARGUMENT;
    h->asides = lc_asides_open();
    return h->asides ? h->asides->wake_fd : LC_E_MEMORY;
}

int lc_host_say(lc_host *h, const lc_address *to, const uint8_t *data, uint16_t n) {
    if (!h->asides || n > LC_ASIDE_BYTES || !lc_asides_has(data, n))
        return LC_E_ARGUMENT;
    return lc_link_say(h->interfaces[0].link, to, data, n);
}

int lc_host_heard(lc_host *h, lc_aside *aside) {
    return h->asides && lc_asides_take(h->asides, aside);
}

uint64_t lc_host_asides_dropped(lc_host *h) {
    return h->asides ? atomic_load(&h->asides->dropped) : 0;
}
