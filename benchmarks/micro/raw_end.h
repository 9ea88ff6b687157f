/* One end of the wire: what is taken of what came, and how what goes is laid out. */
#ifndef RAW_END_H
#define RAW_END_H

#include <errno.h>
#include <netinet/udp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "raw.h"

enum {
    AGGREGATE = 65536,      /* more than one read can return */
    MAX_SEND = 65000,       /* bytes of one offloaded send */
    MAX_SEGMENTS = 64,      /* of one offloaded send */
    BATCH = 8,              /* messages per system call */
    TENSOR_BYTES = 32 << 20 /* more than a core's cache */
};

enum kind { HELLO = 1, DATA, CREDIT, PING };

enum waiting { YIELD, SPIN, SLEEP };

struct switches {
    bool gso, gro, mmsg, gather, simd;
    bool in_place; /* headers lie in the tensor already: nothing to gather or to pack */
    bool zerocopy, io_uring;
};

/* In front of each datagram's floats. */
struct header {
    uint64_t taken; /* datagrams that the sender has received so far */
    uint32_t kind;
    uint32_t reserved;
};

struct end {
    struct switches use;
    enum waiting wait;
    int fd;
    int asks; /* in ping */
    size_t datagram;
    unsigned segments; /* datagrams in one message */
    uint64_t window;   /* datagrams that may be under way */
    uint64_t total;    /* datagrams to send, and to receive */
    /* so far */
    int heard;
    uint64_t sent, received, acknowledged, credited, pings;
    uint64_t received_bytes, send_calls, receive_calls, zero_copies, copied;
    double first_sum; /* of the first float of every datagram */
    /* memory */
    char *source; /* the tensor that is sent, from at_source on (bytes), again and again */
    float *sum;   /* the one that is added to, from at_sum on (floats) */
    size_t at_source, at_sum;
    char *in, *packed;
    struct header *out_header;
    struct iovec *out_vector;
    struct iovec in_vector[BATCH];
    struct mmsghdr in_message[BATCH], out_message[BATCH];
    unsigned out_count[BATCH];
    char in_control[BATCH][64];
};

__attribute__((noreturn)) void fail(const char *what);

/* Makes message i ready to receive. */
void arm(struct end *end, unsigned i);
/* Adds up what message i has brought. */
void take_message(struct end *end, unsigned i, size_t length);
/* Lays message i of at most so many datagrams out; returns how many it has. */
unsigned fill(struct end *end, unsigned i, unsigned segments);
/* Messages, at most batch, that may go now. */
unsigned room_for(const struct end *end, unsigned batch);

#endif
