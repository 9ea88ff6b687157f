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

int lc_waiter_sleep(lc_waiter *waiter, lc_link *const *links, int n_links, uint32_t blocked,
                    uint64_t timeout_ns) {
    struct pollfd fds[1 + LC_WAITER_LINKS * LC_LINK_DESCRIPTORS];
    fds[0] = (struct pollfd){waiter->wake_fd, POLLIN, 0};
    int n = 1;
    for (int i = 0; i < n_links && i < LC_WAITER_LINKS; i++)
        n += lc_link_descriptors(links[i], blocked >> i & 1, &fds[n], &timeout_ns);
    struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    if (ppoll(fds, (nfds_t)n, &t, NULL) <= 0 || !(fds[0].revents & POLLIN))
        return 0;
    uint64_t drained;
    (void)!read(waiter->wake_fd, &drained, sizeof drained);
    return 1;
}

void lc_waiter_wake(lc_waiter *waiter) {
    uint64_t one = 1;
    (void)!write(waiter->wake_fd, &one, sizeof one);
}
