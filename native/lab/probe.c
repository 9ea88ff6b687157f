/* Counted packets from one host to another, to compare what a link does with what was asked. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "lab.h"

enum { BYTES_MAX = 65507, NUMBER = 8 /* bytes at the head of each packet */, SILENT_MS = 30000 };
static const int BUFFER = 64 << 20;
static const double NAP_S = 1e-4;  /* sooner than this no sleep is worth it */
static const double LATE_S = 1e-3; /* what is behind by more is not made up for: it would burst */

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Sleeps until ``when``; returns by how much to put off all that follows. */
static double sleep_until(double when) {
    double left = when - now_s();
    if (left > NAP_S) {
        time_t whole = (time_t)left;
        struct timespec nap = {.tv_sec = whole, .tv_nsec = (long)((left - (double)whole) * 1e9)};
        nanosleep(&nap, NULL);
    }
    return left < -LATE_S ? -left : 0;
}

int lab_probe_send(const char *address, int port, uint64_t count, uint32_t bytes, uint32_t segments,
                   double bytes_per_s) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int size = (int)bytes, handle = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    uint8_t *data = calloc(1, BYTES_MAX);
    int status = -1;
    if (handle < 0 || !data || bytes < NUMBER || !segments || bytes * segments > BYTES_MAX ||
        inet_pton(AF_INET, address, &to.sin_addr) != 1)
        goto out;
    if (setsockopt(handle, SOL_SOCKET, SO_SNDBUFFORCE, &BUFFER, sizeof BUFFER))
        setsockopt(handle, SOL_SOCKET, SO_SNDBUF, &BUFFER, sizeof BUFFER);
    if (connect(handle, (struct sockaddr *)&to, sizeof to) ||
        (segments > 1 && setsockopt(handle, IPPROTO_UDP, UDP_SEGMENT, &size, sizeof size)))
        goto out;
    double start = now_s();
    for (uint64_t next = 0; next < count;) {
        uint32_t here = count - next < segments ? (uint32_t)(count - next) : segments;
        for (uint32_t i = 0; i < here; i++) {
            uint64_t number = next + i;
            memcpy(data + i * bytes, &number, sizeof number);
        }
        if (send(handle, data, (size_t)here * bytes, 0) < 0) {
            /* Nobody listens any more, or the device is full; the first is for the receiver. */
            if (errno != ECONNREFUSED && errno != ENOBUFS && errno != EAGAIN)
                goto out;
        }
        next += here;
        if (bytes_per_s > 0)
            start += sleep_until(start + (double)next * bytes / bytes_per_s);
    }
    status = 0;
out:
    free(data);
    if (handle >= 0)
        close(handle);
    return status;
}

/* Notes the packets of one aggregate, ``each`` bytes long but for the last. */
static void note(const uint8_t *data, size_t length, size_t each, uint8_t *seen, uint64_t count,
                 lab_probe_counts *out) {
    for (size_t at = 0; at + NUMBER <= length; at += each) {
        uint64_t number;
        memcpy(&number, data + at, sizeof number);
        out->bytes += length - at < each ? length - at : each;
        if (number >= count)
            continue;
        if (seen[number])
            out->doubled++;
        else
            out->received++;
        seen[number] = 1;
        if (number + 1 < out->highest)
            out->late++;
        else
            out->highest = number + 1;
    }
}

static size_t segment_of(struct msghdr *message, size_t length) {
    for (struct cmsghdr *one = CMSG_FIRSTHDR(message); one; one = CMSG_NXTHDR(message, one))
        if (one->cmsg_level == IPPROTO_UDP && one->cmsg_type == UDP_GRO) {
            int size;
            memcpy(&size, CMSG_DATA(one), sizeof size);
            return (size_t)size;
        }
    return length;
}

static void count_runs(const uint8_t *seen, uint64_t count, lab_probe_counts *out) {
    for (uint64_t i = 0; i < count; i++)
        if (!seen[i]) {
            out->lost++;
            out->bursts += i == 0 || seen[i - 1];
        }
}

static uint64_t overflowed(int handle) {
    uint32_t memory[9] = {0}; /* the ninth of SO_MEMINFO is what the socket had no room for */
    socklen_t size = sizeof memory;
    return getsockopt(handle, SOL_SOCKET, SO_MEMINFO, memory, &size) ? 0 : memory[8];
}

/* Waits for a packet. Returns 0 when none will come: the sender has ended, and for idle_ms since
 * there was none; or it is silent for too long. */
static int more(int handle, int *done, int idle_ms) {
    for (;;) {
        struct pollfd on[2] = {{handle, POLLIN, 0}, {*done, POLLIN, 0}};
        int count = poll(on, 2, *done < 0 ? idle_ms : SILENT_MS);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0 || on[0].revents)
            return count > 0;
        *done = -1;
    }
}

int lab_probe_receive(int port, uint64_t count, int idle_ms, int ready, int done,
                      lab_probe_counts *out) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int yes = 1, handle = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), status = -1;
    uint8_t *data = malloc(BYTES_MAX), *seen = calloc(count, 1);
    memset(out, 0, sizeof *out);
    if (handle < 0 || !data || !seen || bind(handle, (struct sockaddr *)&here, sizeof here))
        goto out;
    if (setsockopt(handle, SOL_SOCKET, SO_RCVBUFFORCE, &BUFFER, sizeof BUFFER))
        setsockopt(handle, SOL_SOCKET, SO_RCVBUF, &BUFFER, sizeof BUFFER);
    setsockopt(handle, IPPROTO_UDP, UDP_GRO, &yes, sizeof yes);
    dprintf(ready, "ready\n");
    double first = 0, last = 0;
    while (out->received < count) {
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec part = {data, BYTES_MAX};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = &control,
                                 .msg_controllen = sizeof control};
        ssize_t length = recvmsg(handle, &message, MSG_DONTWAIT);
        if (length < 0) {
            if (errno != EINTR && !more(handle, &done, idle_ms))
                break; /* what isn't here is lost */
            continue;
        }
        last = now_s();
        if (first == 0)
            first = last;
        if (length > 0)
            note(data, (size_t)length, segment_of(&message, (size_t)length), seen, count, out);
    }
    out->seconds = last - first;
    out->last = last;
    out->overflowed = overflowed(handle);
    count_runs(seen, count, out);
    status = 0;
out:
    free(data);
    free(seen);
    if (handle >= 0)
        close(handle);
    return status;
}
