/* What raw_udp and raw_duplex share: the clock, the sums, and what GRO says of an aggregate. */
#ifndef RAW_H
#define RAW_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void add_vector(float *restrict sum, const float *restrict x, size_t n) {
    for (size_t i = 0; i < n; i++)
        sum[i] += x[i];
}

static inline void add_scalar(float *restrict sum, const float *restrict x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        sum[i] += x[i];
        __asm__ volatile("" ::: "memory"); /* one element at a time, whatever -O3 thinks */
    }
}

/* The stride of what GRO put together; a datagram that came alone has no such message. */
static inline size_t stride_of(struct msghdr *message, size_t length) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
            int stride;
            memcpy(&stride, CMSG_DATA(c), sizeof stride);
            return (size_t)stride;
        }
    }
    return length;
}

#endif
