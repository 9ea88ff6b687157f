/* Inside the verbs link: unreliable datagrams of InfiniBand and RoCE, one queue pair for all peers.
 * link_verbs.c opens it and knows its peers, link_verbs_move.c moves packets, link_verbs_queue.c is
 * below both. docs/rdma.md has the whole. */
#ifndef LC_LINK_VERBS_H
#define LC_LINK_VERBS_H

#define _GNU_SOURCE
#include "link.h"
#include "trouble.h"
#include "verbs_api.h"

enum {
    LC_VERBS_QUEUE = 4096, /* datagrams that may wait here, at most; */
    LC_VERBS_QUEUE_MIN = 64,
    LC_VERBS_LARGEST = 4096,    /* bytes of a datagram, on any port */
    LC_VERBS_SENDS = 256,       /* requests under way, at most; a power of two */
    LC_VERBS_SIGNAL_EVERY = 64, /* requests for one completion */
    LC_VERBS_HEAD_BYTES = 64,   /* the first piece of a packet, if it is no longer */
    LC_VERBS_INLINE = 128,      /* bytes that travel within a request, if the device can */
    LC_VERBS_RETURN = 32,       /* buffers that are given back together */
    LC_VERBS_EVENTS = 16,
    LC_VERBS_NONE = 0xFFFF
};

typedef struct {
    vb_ah *ah; /* NULL: there is no such peer */
    lc_verbs_address address;
} lc_verbs_peer;

/* Who sent a datagram, as the device says: what an arrival is from. */
typedef struct {
    uint32_t queue_pair;
    uint16_t lid;
    uint8_t has_grh;
    const uint8_t *grh;
} lc_verbs_sender;

typedef struct {
    lc_link link;
    const vb_api *api;
    vb_context *context;
    vb_pd *pd;
    vb_channel *channel;
    vb_cq *send_cq, *receive_cq;
    vb_qp *qp;
    vb_mr *mr;
    lc_verbs_address own;
    lc_verbs_config config;
    char *counters; /* folder of the device's own counters, or NULL */
    uint32_t mtu;
    uint32_t inline_max;
    int failed_errno; /* it will never work again; 0: it does */
    lc_verbs_peer *peers;
    uint32_t n_peers; /* entries of the table */
    /* memory: buffers of datagrams that come, heads and payloads of those that go */
    uint8_t *memory;
    size_t bytes;
    uint8_t *slots, *heads, *payloads;
    uint32_t slot_bytes, payload_stride;
    /* sending */
    uint32_t posted, done;               /* requests, ever; wr_id is the number of a request */
    uint32_t unsignalled;                /* the latest of them */
    uint16_t payload_of[LC_VERBS_SENDS]; /* by number: the payload that it reads, or none */
    uint16_t users[LC_VERBS_SENDS];      /* by payload: requests that read it */
    uint64_t content[LC_VERBS_SENDS];    /* what it holds (lc_run); 0: of one receiver */
    uint16_t holder[LC_VERBS_SENDS];     /* by the lowest bits of a content: who may hold it */
    uint16_t free[LC_VERBS_SENDS];       /* payloads that nobody reads */
    uint32_t n_free;
    vb_send_wr requests[LC_RUN_PACKETS];
    vb_sge pieces[2 * LC_RUN_PACKETS];
    lc_trouble failing;
    /* receiving */
    uint32_t queue;  /* buffers */
    uint16_t *spent; /* those that go back to the device */
    uint32_t n_spent;
    uint32_t n_given; /* of the latest receive: the caller may read them still */
    vb_wc arrived[LC_RECEIVE_BUFFERS];
    uint32_t n_arrived; /* found, and not yet given to the caller */
    uint16_t given[LC_RECEIVE_BUFFERS];
    lc_verbs_sender senders[LC_RECEIVE_BUFFERS];
    vb_recv_wr returns[LC_VERBS_RETURN];
    vb_sge return_pieces[LC_VERBS_RETURN];
    /* telling */
    lc_link_stats stats;
    uint64_t dropped_before;          /* what the counters said when it was opened, */
    uint64_t counted_ns;              /* and when they were last read */
    uint64_t looked_ns;               /* for asynchronous events */
    lc_trouble port;                  /* it has no link */
    lc_event events[LC_VERBS_EVENTS]; /* a ring */
    uint32_t events_in, events_out;
} lc_verbs;

static inline lc_verbs *lc_verbs_of(lc_link *link) {
    return (lc_verbs *)(void *)link;
}
static inline const lc_verbs *lc_verbs_of_const(const lc_link *link) {
    return (const lc_verbs *)(const void *)link;
}
static inline lc_verbs_peer *lc_verbs_peer_of(const lc_verbs *v, uint16_t peer) {
    return peer < v->n_peers && v->peers[peer].ah ? &v->peers[peer] : NULL;
}

/* link_verbs_queue.c */
void lc_verbs_note(lc_verbs *v, lc_event event);
void lc_verbs_leave_payload(lc_verbs *v, uint32_t number); /* a request reads it no more */
int lc_verbs_offer(lc_verbs *v, uint32_t n);
int lc_verbs_make_queues(lc_verbs *v); /* 0 with errno set: it is to be dropped again */
void lc_verbs_drop_queues(lc_verbs *v);
void lc_verbs_begin_anew(lc_verbs *v); /* the queue pair, after an error */

/* link_verbs_move.c */
int lc_verbs_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno);
int lc_verbs_receive(lc_link *link, lc_arrival *arrivals, int max);
int lc_verbs_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer);
int lc_verbs_descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns);
int lc_verbs_watch(lc_link *link);

#endif
