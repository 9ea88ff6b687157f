/* Engines in one process, joined by loopback, and hand-built plans for them. */
#ifndef LC_TEST_NET_H
#define LC_TEST_NET_H

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "lossycoll.h"

enum { NET_MAX = 8, NET_GROUP = 9, NET_PAYLOAD = 256 };

static const uint64_t NET_SESSION = 0x0123456789ABCDEF;
static const uint64_t MS = 1000000, SECOND = 1000000000;

/* That of an untouched Linux. */
static int32_t net_socket_buffer = 106496;

/* The engines share memory, instead of loopback. */
static int net_shared;

/* The engines reach each other by RDMA: the path of the libibverbs; NULL: they don't. */
static const char *net_verbs;

/* Called with each engine before it starts. */
static void (*net_opened)(lc_host *host, uint16_t rank, uint16_t size);

/* What the status page says of this thread's calls. */
static _Thread_local const char *net_text;

typedef struct {
    lc_host *host[NET_MAX];
    lc_group *group[NET_MAX];
    lc_completions *completions[NET_MAX]; /* owners: the ranks */
    uint16_t port[NET_MAX];
    uint16_t size;
    uint64_t timeout_ns; /* of operations */
    uint16_t code;       /* of parity */
    uint8_t most;        /* parity for 64 packets, where the loss decides; 0: it doesn't */
    uint8_t encoding, gather_encoding;
    uint8_t waits; /* those who submit do the engine's work */
    uint8_t lingers;
    uint16_t payload;
} net;

static inline void net_share(const net *n, uint16_t rank, lc_address *own) {
    static const uint16_t all[NET_MAX] = {0, 1, 2, 3, 4, 5, 6, 7};
    lc_failure failure;
    int found[2];
    CHECK(lc_host_share(n->host[rank], all, n->size, found, &failure) == LC_OK);
    own->link = 1;
    own->memory = found[0];
    own->wake = found[1];
}

static inline void net_open_verbs(const net *n, uint16_t rank, lc_address *own) {
    const lc_verbs_config config = {
        .library = net_verbs, .device = "fake0", .port = 1, .gid = 1, .queue = 1024};
    lc_verbs_info info;
    lc_failure failure;
    lc_verbs_port *port = lc_verbs_open(&config, &info, &failure);
    CHECK(port != NULL);
    int link = lc_host_verbs(n->host[rank], port, &failure);
    CHECK(link > 0);
    own->link = (uint16_t)link;
    own->verbs = info.address;
}

/* at: the ports that ranks know each other by; NULL: those that they have. */
static inline void net_open_at(net *n, uint16_t size, lc_inject inject, uint64_t deadline_ns,
                               const uint16_t *at, uint64_t timeout_ns) {
    lc_address peers[NET_MAX];
    n->size = size;
    n->timeout_ns = timeout_ns;
    n->code = 0;
    n->gather_encoding = 0;
    n->most = n->encoding = n->waits = n->lingers = 0;
    n->payload = net_shared ? LC_SHARED_PAYLOAD : NET_PAYLOAD;
    for (uint16_t r = 0; r < size; r++) {
        lc_host_config c = {.address = "127.0.0.1",
                            .process = r,
                            .processes = size,
                            .payload_bytes = NET_PAYLOAD,
                            .socket_buffer = net_socket_buffer,
                            .eager_bytes = 16384};
        lc_failure failure;
        lc_link_info info;
        n->host[r] = lc_host_open(&c, &failure);
        if (!CHECK(n->host[r] != NULL))
            abort();
        if (net_opened)
            net_opened(n->host[r], r, size);
        CHECK(lc_host_link(n->host[r], 0, &info) == LC_OK);
        n->port[r] = info.port;
        peers[r] = (lc_address){.host = "127.0.0.1", .port = at ? at[r] : info.port};
        if (net_shared)
            net_share(n, r, &peers[r]);
        if (net_verbs)
            net_open_verbs(n, r, &peers[r]);
    }
    for (uint16_t r = 0; r < size; r++) {
        lc_failure failure;
        n->completions[r] = lc_completions_open();
        lc_group_config c = {.number = NET_GROUP,
                             .rank = r,
                             .size = size,
                             .fault_group = NET_GROUP,
                             .deadline_min_ns = deadline_ns,
                             .deadline_max_ns = deadline_ns,
                             .inject = inject,
                             .met = 1,
                             .completions = n->completions[r],
                             .owner = r};
        CHECK(lc_host_start(n->host[r], NET_SESSION, peers) == LC_OK);
        n->group[r] = lc_group_open(n->host[r], &c, &failure);
        if (!CHECK(n->group[r] != NULL))
            abort();
    }
}

static inline void net_open(net *n, uint16_t size, lc_inject inject, uint64_t deadline_ns) {
    net_open_at(n, size, inject, deadline_ns, NULL, 30 * SECOND);
}

static inline void net_close(net *n) {
    for (uint16_t r = 0; r < n->size; r++) {
        lc_host_close(n->host[r]); /* and its group, if that is still open */
        lc_completions_close(n->completions[r]);
    }
}

/* ---- plans: the tables of ring.py and transpose.py, in rank order and of equal segments ---- */

typedef struct {
    lc_slot_desc slots[2 * NET_MAX];
    lc_edge edges[4 * NET_MAX];
    uint32_t n_slots, n_edges;
    uint32_t scratch;
} table;

static inline lc_slot_desc *add_slot(table *t, uint16_t number, uint64_t offset, uint64_t length) {
    lc_slot_desc *s = &t->slots[t->n_slots++];
    *s = (lc_slot_desc){.number = number,
                        .offset = offset,
                        .length = length,
                        .first_edge = t->n_edges,
                        .target = LC_TARGET_OUT,
                        .missing = LC_MISSING_OWN};
    return s;
}

static inline void add_source(table *t, lc_slot_desc *s, uint16_t peer) {
    t->edges[t->n_edges++] = (lc_edge){peer, 0};
    s->n_sources++;
}

static inline void add_dest(table *t, lc_slot_desc *s, uint16_t peer, uint16_t slot) {
    t->edges[t->n_edges++] = (lc_edge){peer, slot};
    s->n_dests++;
}

static inline void own_at(lc_slot_desc *s, uint64_t offset, uint8_t target) {
    s->own = 1;
    s->own_offset = offset;
    s->target = target;
    s->missing = LC_MISSING_KEEP;
}

static inline void plan_transpose(table *t, uint16_t size, uint16_t rank, uint32_t segment) {
    *t = (table){.n_slots = 0};
    for (uint16_t p = 0; p < size; p++) {
        if (p == rank)
            continue;
        lc_slot_desc *s = add_slot(t, p, 0, segment);
        own_at(s, (uint64_t)p * segment, LC_TARGET_NONE);
        add_dest(t, s, p, p);
    }
    lc_slot_desc *mine = add_slot(t, rank, (uint64_t)rank * segment, segment);
    own_at(mine, (uint64_t)rank * segment, LC_TARGET_OUT);
    mine->combine = LC_ADD;
    mine->finish = LC_FINISH_MEAN;
    for (uint16_t p = 0; p < size; p++)
        if (p != rank)
            add_source(t, mine, p);
    for (uint16_t p = 0; p < size; p++)
        if (p != rank)
            add_dest(t, mine, p, (uint16_t)(size + rank));
    for (uint16_t p = 0; p < size; p++)
        if (p != rank)
            add_source(t, add_slot(t, (uint16_t)(size + p), (uint64_t)p * segment, segment), p);
}

static inline void plan_ring(table *t, uint16_t size, uint16_t rank, uint32_t segment) {
    uint16_t before = (uint16_t)((rank + size - 1) % size);
    uint16_t after = (uint16_t)((rank + 1) % size);
    *t = (table){.n_slots = 0};
    for (uint16_t step = 0; step < size; step++) {
        uint16_t s = (uint16_t)((rank + size - step) % size);
        int last = step == size - 1;
        uint64_t at = (uint64_t)s * segment;
        lc_slot_desc *d = add_slot(t, s, last ? at : t->scratch, segment);
        if (step == 0) {
            d->offset = 0;
            own_at(d, at, LC_TARGET_NONE);
        } else {
            own_at(d, at, last ? LC_TARGET_OUT : LC_TARGET_SCRATCH);
            d->combine = LC_ADD;
            d->finish = last ? LC_FINISH_MEAN : LC_FINISH_NONE;
            add_source(t, d, before);
            if (!last)
                t->scratch += segment;
        }
        add_dest(t, d, after, (uint16_t)(last ? size + s : s));
    }
    for (uint16_t step = 0; step + 1 < size; step++) {
        uint16_t s = (uint16_t)((rank + size - step) % size);
        lc_slot_desc *d = add_slot(t, (uint16_t)(size + s), (uint64_t)s * segment, segment);
        add_source(t, d, before);
        if (step + 2 < size)
            add_dest(t, d, after, (uint16_t)(size + s));
    }
}

/* Elements that fit into a packet of either phase. */
static inline uint32_t net_elements(const net *n) {
    uint8_t other = n->gather_encoding ? n->gather_encoding : n->encoding;
    uint32_t first = lc_encoding_elements(n->encoding, LC_F32, n->payload);
    uint32_t second = lc_encoding_elements(other, LC_F32, n->payload);
    return first < second ? first : second;
}

/* An in-place mean of size * segment floats, in a group of all ranks. */
static inline int64_t net_submit_to(lc_group *group, const net *n, uint16_t rank, int ring,
                                    uint32_t segment, float *data, int reliable, int repair,
                                    int notify) {
    table t;
    if (ring)
        plan_ring(&t, n->size, rank, segment);
    else
        plan_transpose(&t, n->size, rank, segment);
    lc_call call = {.slots = t.slots,
                    .edges = t.edges,
                    .n_slots = t.n_slots,
                    .n_edges = t.n_edges,
                    .in = data,
                    .out = data,
                    .in_elements = (uint64_t)n->size * segment,
                    .out_elements = (uint64_t)n->size * segment,
                    .scratch_elements = t.scratch,
                    .levels = {{.elements_per_packet = net_elements(n),
                                .reliable = (uint8_t)reliable,
                                .repair = (uint8_t)repair,
                                .choose = n->most ? LC_CHOOSE_PARITY : 0,
                                .most = n->most,
                                .max_missing = -1,
                                .code = n->code}},
                    .dtype = LC_F32,
                    .encoding = n->encoding,
                    .gather_encoding = n->gather_encoding,
                    .notify = (uint8_t)notify,
                    .waits = n->waits,
                    .lingers = n->lingers,
                    .scale = 1,
                    .signature = 1000 + segment + (uint64_t)ring,
                    .timeout_ns = n->timeout_ns,
                    .text = net_text};
    return lc_group_submit(group, &call);
}

static inline int64_t net_submit(const net *n, uint16_t rank, int ring, uint32_t segment,
                                 float *data, int reliable, int repair, int notify) {
    return net_submit_to(n->group[rank], n, rank, ring, segment, data, reliable, repair, notify);
}

/* Means of few ranks differ by far more, and encodings round by less. */
static const float NET_NEAR = 0.02f;

/* Rank r gives 2^r: what an element may become is the mean over a subset of the ranks. */
static inline void fill(float *data, size_t elements, uint16_t rank) {
    for (size_t i = 0; i < elements; i++)
        data[i] = (float)(1 << rank);
}

static inline int is_mean_of_some(float value, uint16_t size) {
    for (int bits = 1; bits < 1 << size; bits++) {
        float diff = value - (float)bits / (float)__builtin_popcount((unsigned)bits);
        if (diff < NET_NEAR && diff > -NET_NEAR)
            return 1;
    }
    return 0;
}

static inline float mean_of_all(uint16_t size) {
    return (float)((1 << size) - 1) / (float)size;
}

#endif
