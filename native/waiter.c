#define _GNU_SOURCE
#include "waiter.h"

#include <sys/eventfd.h>
#include <unistd.h>

int lc_waiter_open(lc_waiter *waiter) {
    waiter->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return waiter->wake_fd >= 0;
}

void lc_waiter_close(lc_waiter *waiter) {
    if (waiter->wake_fd >= 0)
        close(waiter->wake_fd);
    waiter->wake_fd = -1;
}

void lc_sleep_begin(lc_sleep *sleep, uint64_t longest_ns) {
    sleep->n_fds = 1;
    sleep->longest_ns = longest_ns;
}

void lc_sleep_on(lc_sleep *sleep, lc_link *link, int blocked) {
    struct pollfd *room = &sleep->fds[sleep->n_fds];
    sleep->n_fds += lc_link_descriptors(link, blocked, room, &sleep->longest_ns);
}

int lc_waiter_sleep(lc_waiter *waiter, lc_sleep *sleep) {
    struct timespec t = {(time_t)(sleep->longest_ns / 1000000000u),
                         (long)(sleep->longest_ns % 1000000000u)};
    sleep->fds[0] = (struct pollfd){waiter->wake_fd, POLLIN, 0};
    if (ppoll(sleep->fds, (nfds_t)sleep->n_fds, &t, NULL) <= 0 || !(sleep->fds[0].revents & POLLIN))
        return 0;
    uint64_t drained;
    (void)!read(waiter->wake_fd, &drained, sizeof drained);
    return 1;
}

void lc_waiter_wake(lc_waiter *waiter) {
    uint64_t one = 1;
    (void)!write(waiter->wake_fd, &one, sizeof one);
}
