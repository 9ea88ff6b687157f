/* How fast bare UDP sockets are, with each fast path on or off.
 *
 * One thread sends datagrams over loopback, another receives them and adds their floats
 * up, which is what a reducing rank does. The engine is not involved: this is the bound
 * that it is measured against. Prints one line of JSON.
 *
 *   raw_udp [--no-gso] [--no-gro] [--no-mmsg] [--no-gather] [--no-simd]
 *           [--datagram BYTES] [--megabytes N]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

enum {
    HEADER = 16,           /* bytes in front of each datagram's floats */
    MAX_AGGREGATE = 65535, /* what one GRO read can return */
    MAX_SEND = 65000,      /* bytes of one GSO send, below the limit of an IP packet */
    MAX_SEGMENTS = 64,     /* of one GSO send; newer kernels take 128 */
    BATCH = 8,             /* messages per system call; more was no faster elsewhere */
    WANTED_BUFFER = 4 << 20,
    STALL_NS = 2000000000 /* a busy machine keeps a thread waiting for long */
};

struct switches {
    bool gso, gro, mmsg, gather, simd;
};

struct run {
    struct switches use;
    size_t datagram; /* header included */
    uint64_t datagrams;
    int receiver, sender;
    _Atomic uint64_t received; /* datagrams */
    atomic_bool stop;
    uint64_t send_calls, receive_calls, lost;
    float sum; /* of the first float of every datagram */
};

static void fail(const char *what) {
    fprintf(stderr, "raw_udp: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory)
        fail("memory");
    memset(memory, 0, bytes);
    return memory;
}

static void *receive(void *argument) {
    struct run *run = argument;
    unsigned batch = run->use.mmsg ? BATCH : 1;
    float *sum = allocate(run->datagram);
    char *buffers = allocate((size_t)BATCH * (MAX_AGGREGATE + 1));
    char control[BATCH][64];
    struct iovec vectors[BATCH];
    struct mmsghdr messages[BATCH];
    while (!atomic_load(&run->stop)) {
        for (unsigned i = 0; i < batch; i++) {
            vectors[i] = (struct iovec){buffers + (size_t)i * (MAX_AGGREGATE + 1), MAX_AGGREGATE};
            messages[i].msg_hdr = (struct msghdr){.msg_iov = &vectors[i],
                                                  .msg_iovlen = 1,
                                                  .msg_control = control[i],
                                                  .msg_controllen = sizeof control[i]};
        }
        int count;
        if (run->use.mmsg) {
            count = recvmmsg(run->receiver, messages, batch, MSG_WAITFORONE, NULL);
        } else {
            ssize_t length = recvmsg(run->receiver, &messages[0].msg_hdr, 0);
            messages[0].msg_len = (unsigned)length;
            count = length < 0 ? -1 : 1;
        }
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (count < 0)
            fail("receive");
        run->receive_calls++;
        uint64_t datagrams = 0;
        for (int i = 0; i < count; i++) {
            size_t length = messages[i].msg_len;
            size_t stride = stride_of(&messages[i].msg_hdr, length);
            const char *data = vectors[i].iov_base;
            for (size_t at = 0; at + HEADER < length; at += stride, datagrams++) {
                size_t bytes = (length - at < stride ? length - at : stride) - HEADER;
                const float *floats = (const float *)(const void *)(data + at + HEADER);
                (run->use.simd ? add_vector : add_scalar)(sum, floats, bytes / sizeof(float));
            }
        }
        atomic_fetch_add(&run->received, datagrams);
    }
    run->sum = sum[0];
    free(buffers);
    free(sum);
    return NULL;
}

/* Waits until another `more` datagrams fit the window. What does not arrive is written off. */
static void wait_for_room(struct run *run, uint64_t sent, uint64_t more, uint64_t window) {
    uint64_t before = atomic_load(&run->received), since = now_ns();
    while (sent + more > atomic_load(&run->received) + run->lost + window) {
        uint64_t received = atomic_load(&run->received);
        if (received != before) {
            before = received;
            since = now_ns();
        } else if (now_ns() - since > STALL_NS) {
            run->lost = sent - received;
            return;
        }
        sched_yield();
    }
}

static void send_all(struct run *run, uint64_t window) {
    size_t payload = run->datagram - HEADER;
    unsigned segments = run->use.gso ? (unsigned)(MAX_SEND / run->datagram) : 1;
    if (segments > MAX_SEGMENTS)
        segments = MAX_SEGMENTS;
    if (segments > window / 2)
        segments = window / 2 ? (unsigned)(window / 2) : 1;
    unsigned batch = run->use.mmsg ? BATCH : 1;
    while (batch > 1 && (uint64_t)batch * segments > window)
        batch--;
    unsigned per_call = batch * segments;
    char *headers = allocate((size_t)per_call * HEADER);
    char *packed = allocate((size_t)per_call * run->datagram);
    /* A tensor's worth of memory, so that the cache does not hold it all. */
    size_t tensor_bytes = (size_t)32 << 20;
    float *tensor = allocate(tensor_bytes);
    for (size_t i = 0; i < tensor_bytes / sizeof(float); i++)
        tensor[i] = 1;
    struct iovec *vectors = allocate(2 * per_call * sizeof *vectors);
    struct mmsghdr messages[BATCH];
    size_t at = 0;
    for (uint64_t sent = 0; sent < run->datagrams; sent += per_call) {
        wait_for_room(run, sent, per_call, window);
        unsigned v = 0;
        for (unsigned i = 0; i < batch; i++) {
            struct msghdr *message = &messages[i].msg_hdr;
            *message = (struct msghdr){.msg_iov = &vectors[v]};
            for (unsigned k = 0; k < segments; k++) {
                if (at + payload > tensor_bytes)
                    at = 0;
                uint64_t number = sent + i * segments + k;
                char *header = headers + (size_t)(i * segments + k) * HEADER;
                char *data = (char *)tensor + at;
                memcpy(header, &number, sizeof number);
                if (run->use.gather) {
                    vectors[v++] = (struct iovec){header, HEADER};
                    vectors[v++] = (struct iovec){data, payload};
                } else {
                    char *whole = packed + (size_t)(i * segments + k) * run->datagram;
                    memcpy(whole, header, HEADER);
                    memcpy(whole + HEADER, data, payload);
                    /* Segments lie one behind the other, so one vector holds them all. */
                    if (k == 0)
                        vectors[v++] = (struct iovec){whole, segments * run->datagram};
                }
                at += payload;
            }
            message->msg_iovlen = (size_t)(&vectors[v] - message->msg_iov);
        }
        for (unsigned done = 0; done < batch;) {
            int count;
            if (run->use.mmsg)
                count = sendmmsg(run->sender, messages + done, batch - done, 0);
            else
                count = sendmsg(run->sender, &messages[done].msg_hdr, 0) < 0 ? -1 : 1;
            if (count < 0)
                fail("send");
            done += (unsigned)count;
            run->send_calls++;
        }
    }
    free(headers);
    free(packed);
    free(tensor);
    free(vectors);
}

static uint64_t open_sockets(struct run *run) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int one = 1, buffer = WANTED_BUFFER, segment = (int)run->datagram;
    struct timeval patience = {.tv_usec = 20000}; /* so that the receiver sees `stop` */
    run->receiver = socket(AF_INET, SOCK_DGRAM, 0);
    run->sender = socket(AF_INET, SOCK_DGRAM, 0);
    if (run->receiver < 0 || run->sender < 0)
        fail("socket");
    setsockopt(run->receiver, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    setsockopt(run->sender, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    setsockopt(run->receiver, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (run->use.gro && setsockopt(run->receiver, IPPROTO_UDP, UDP_GRO, &one, sizeof one))
        fail("UDP_GRO");
    if (run->use.gso && setsockopt(run->sender, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment))
        fail("UDP_SEGMENT");
    if (bind(run->receiver, (struct sockaddr *)&address, sizeof address) ||
        getsockname(run->receiver, (struct sockaddr *)&address, &length) ||
        connect(run->sender, (struct sockaddr *)&address, sizeof address))
        fail("bind");
    length = sizeof buffer;
    getsockopt(run->receiver, SOL_SOCKET, SO_RCVBUF, &buffer, &length);
    /* A datagram costs the buffer its memory and the kernel's bookkeeping, about twice its
     * size; half of the rest is left free. */
    uint64_t window = (uint64_t)buffer / (4 * run->datagram);
    return window ? window : 1;
}

int main(int count, char **arguments) {
    struct run run = {.use = {true, true, true, true, true}, .datagram = 1448};
    uint64_t megabytes = 1024;
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i];
        if (!strcmp(name, "--no-gso"))
            run.use.gso = false;
        else if (!strcmp(name, "--no-gro"))
            run.use.gro = false;
        else if (!strcmp(name, "--no-mmsg"))
            run.use.mmsg = false;
        else if (!strcmp(name, "--no-gather"))
            run.use.gather = false;
        else if (!strcmp(name, "--no-simd"))
            run.use.simd = false;
        else if (!strcmp(name, "--datagram") && i + 1 < count)
            run.datagram = strtoul(arguments[++i], NULL, 10) / 4 * 4;
        else if (!strcmp(name, "--megabytes") && i + 1 < count)
            megabytes = strtoull(arguments[++i], NULL, 10);
        else {
            fprintf(stderr, "raw_udp: unknown argument %s\n", name);
            return 2;
        }
    }
    if (run.datagram < 64 || run.datagram > MAX_SEND || !megabytes) {
        fprintf(stderr, "raw_udp: --datagram is 64 to %d, --megabytes at least 1\n", MAX_SEND);
        return 2;
    }
    run.datagrams = megabytes * 1000000 / run.datagram;
    uint64_t window = open_sockets(&run);
    pthread_t receiver;
    if (pthread_create(&receiver, NULL, receive, &run))
        fail("thread");
    uint64_t started = now_ns();
    send_all(&run, window);
    wait_for_room(&run, run.datagrams, window, window); /* until everything is in */
    double seconds = 1e-9 * (double)(now_ns() - started);
    atomic_store(&run.stop, true);
    pthread_join(receiver, NULL);
    uint64_t received = atomic_load(&run.received);
    printf("{\"gso\": %d, \"gro\": %d, \"mmsg\": %d, \"gather\": %d, \"simd\": %d, "
           "\"datagram\": %zu, \"gb_per_s\": %.3f, \"received\": %llu, \"lost\": %llu, "
           "\"send_calls\": %llu, \"receive_calls\": %llu, \"sum\": %.0f}\n",
           run.use.gso, run.use.gro, run.use.mmsg, run.use.gather, run.use.simd, run.datagram,
           1e-9 * (double)(received * run.datagram) / seconds, (unsigned long long)received,
           (unsigned long long)run.lost, (unsigned long long)run.send_calls,
           (unsigned long long)run.receive_calls, (double)run.sum);
    close(run.sender);
    close(run.receiver);
    return 0;
}
