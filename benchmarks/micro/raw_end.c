#define _GNU_SOURCE
#include "raw_end.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fail(const char *what) {
    fprintf(stderr, "raw_duplex: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void take(struct end *end, const char *data, size_t bytes) {
    struct header h;
    memcpy(&h, data, sizeof h);
    end->heard = 1;
    if (h.taken > end->acknowledged)
        end->acknowledged = h.taken;
    end->pings += h.kind == PING;
    if (h.kind != DATA)
        return;
    size_t n = (bytes - sizeof h) / sizeof(float);
    if (end->at_sum + n > TENSOR_BYTES / sizeof(float))
        end->at_sum = 0;
    const float *floats = (const float *)(const void *)(data + sizeof h);
    (end->use.simd ? add_vector : add_scalar)(end->sum + end->at_sum, floats, n);
    end->first_sum += floats[0];
    end->at_sum += n;
    end->received++;
    end->received_bytes += bytes - sizeof h;
}

void arm(struct end *end, unsigned i) {
    end->in_vector[i] = (struct iovec){end->in + (size_t)i * AGGREGATE, AGGREGATE};
    end->in_message[i].msg_hdr = (struct msghdr){.msg_iov = &end->in_vector[i],
                                                 .msg_iovlen = 1,
                                                 .msg_control = end->in_control[i],
                                                 .msg_controllen = sizeof end->in_control[i]};
}

void take_message(struct end *end, unsigned i, size_t length) {
    size_t stride = stride_of(&end->in_message[i].msg_hdr, length);
    for (size_t at = 0; at + sizeof(struct header) <= length; at += stride)
        take(end, end->in_vector[i].iov_base + at, length - at < stride ? length - at : stride);
}

unsigned fill(struct end *end, unsigned i, unsigned segments) {
    size_t payload = end->datagram - sizeof(struct header);
    struct msghdr *message = &end->out_message[i].msg_hdr;
    struct iovec *vectors = end->out_vector + (size_t)i * 2 * MAX_SEGMENTS;
    unsigned v = 0, k = 0;
    for (; k < segments && end->sent + k < end->total; k++) {
        size_t room = end->use.in_place ? end->datagram : payload;
        if (end->at_source + room > TENSOR_BYTES) {
            if (end->use.in_place && k)
                break; /* a message of one piece can't go around the end */
            end->at_source = 0;
        }
        char *data = end->source + end->at_source;
        struct header h = {.taken = end->received, .kind = DATA};
        if (end->use.in_place) {
            memcpy(data, &h, sizeof h);
            if (k == 0)
                vectors[v++].iov_base = data;
            vectors[0].iov_len = (k + 1) * end->datagram;
        } else if (end->use.gather) {
            struct header *own = &end->out_header[i * MAX_SEGMENTS + k];
            *own = h;
            vectors[v++] = (struct iovec){own, sizeof h};
            vectors[v++] = (struct iovec){data, payload};
        } else {
            char *whole = end->packed + (size_t)i * AGGREGATE + k * end->datagram;
            memcpy(whole, &h, sizeof h);
            memcpy(whole + sizeof h, data, payload);
            if (k == 0)
                vectors[v++].iov_base = whole;
            vectors[0].iov_len = (k + 1) * end->datagram;
        }
        end->at_source += room;
    }
    *message = (struct msghdr){.msg_iov = vectors, .msg_iovlen = v};
    end->out_count[i] = k;
    end->sent += k;
    end->credited = end->received;
    return k;
}

unsigned room_for(const struct end *end, unsigned batch) {
    uint64_t flying = end->sent - end->acknowledged;
    uint64_t room = flying < end->window ? (end->window - flying) / end->segments : 0;
    uint64_t left = (end->total - end->sent + end->segments - 1) / end->segments;
    room = room < left ? room : left;
    return (unsigned)(room < batch ? room : batch);
}
