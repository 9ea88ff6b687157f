/* All-reduces of hosts on slow, lossy links in virtual time, drawn from seeds. Engines, control law
 * and timers are the product's; the links are of memory, and each host has one port. */
#ifndef LC_SLOW_LINKS_H
#define LC_SLOW_LINKS_H

#include <math.h>

#include "net.h"
#include "state.h"
#include "virtual_net.h"

enum { SLOW_OPS = 12, SLOW_PAYLOAD = 1424, SLOW_WIRE = 28, SLOW_TURNS = 1000000 };
enum { SLOW_LOSSY = 0, SLOW_REPAIR = 1, SLOW_RELIABLE = 2 };

typedef struct {
    uint64_t seed;
    double hosts, mbit, rtt_ms, queue_ms, loss, burst; /* of the network */
    double capacity;                                   /* packets of a receive buffer */
    double paces_port;                                 /* 1: hosts pace their ports as one */
    double bytes, ops, deep, pause_ms, delivery;       /* of what is done */
    double sealed;                                     /* 1: all packets are */
    double routed, payload;    /* 1: what paths carry is looked for; 0 bytes: SLOW_PAYLOAD */
    double lost_here, disable; /* share of data that injection drops; lc_fast_path bits */
} slow_scenario;

typedef struct {
    float *data[VIRTUAL_RANKS];
    int64_t ticket[VIRTUAL_RANKS];
    int ended[VIRTUAL_RANKS];
    int code; /* it failed with, somewhere */
    uint64_t missing;
    uint64_t submitted_ns, ended_ns;
    memory_counts counts; /* of all that was sent when it ended */
} slow_op;

typedef struct {
    slow_scenario s;
    virtual_net v;
    slow_op ops[SLOW_OPS];
    uint32_t submitted, ended;
} slow_run;

/* ---- chance ---- */

static inline double slow_draw(uint64_t *state) {
    uint64_t x = *state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

/* Alike in each decade. */
static inline double slow_between(uint64_t *state, double least, double most) {
    return least * pow(most / least, slow_draw(state));
}

static inline slow_scenario slow_drawn(uint64_t seed) {
    static const double rtts[] = {0.2, 2, 10, 20, 40, 80};
    uint64_t state = seed * 1000;
    slow_scenario s = {.seed = seed, .hosts = 4, .queue_ms = 25};
    s.mbit = slow_between(&state, 1, 100);
    s.loss = slow_between(&state, 0.01, 0.2);
    s.burst = slow_draw(&state) < 0.5 ? 1 : 4;
    s.rtt_ms = rtts[(int)(slow_draw(&state) * 6)];
    s.bytes = floor(slow_between(&state, 16384, 4194304));
    s.deep = floor(1 + slow_draw(&state) * 3);
    s.pause_ms = slow_draw(&state) < 0.5 ? 0 : 300 * slow_draw(&state);
    s.delivery = floor(slow_draw(&state) * 3);
    s.capacity = slow_draw(&state) < 0.5 ? 90 : 2000;
    s.ops = floor(4 + slow_draw(&state) * (SLOW_OPS - 3));
    return s;
}

/* Seconds that no all-reduce by two phases can beat: its bytes over the rate, and a way for each.
 */
static inline double slow_limit_s(const slow_scenario *s) {
    return 2 * (s->hosts - 1) / s->hosts * s->bytes * 8 / (s->mbit * 1e6) + s->rtt_ms * 1e-3;
}

/* ---- running them ---- */

static inline uint16_t slow_payload(const slow_scenario *s) {
    return s->payload > 0 ? (uint16_t)s->payload : SLOW_PAYLOAD;
}

static inline void slow_open_hosts(slow_run *r) {
    const slow_scenario *s = &r->s;
    const virtual_setup how = {.size = (uint16_t)s->hosts,
                               .payload = slow_payload(s),
                               .capacity = (uint32_t)s->capacity,
                               .eager_bytes = 8 << 20,
                               .delay_ns = (uint64_t)(s->rtt_ms * 0.5e6),
                               .loss = s->loss,
                               .paced = 1,
                               .routed = s->routed > 0,
                               .sealed = s->sealed > 0,
                               .paces_port = s->paces_port > 0,
                               .seed = s->seed,
                               .disable = (uint32_t)s->disable,
                               .group = {.inject = {.loss = s->lost_here, .seed = 1},
                                         .deadline_min_ns = SECOND,
                                         .deadline_max_ns = 30 * SECOND,
                                         .link_ns = 60 * SECOND,
                                         .met = 1}};
    virtual_open(&r->v, &how);
    /* Headers of the network below travel as well. */
    double bytes_per_s = s->mbit * 125000 * slow_payload(s) / (slow_payload(s) + SLOW_WIRE);
    for (uint16_t i = 0; i < r->v.size; i++) {
        memory_port port = {.bytes_per_s = bytes_per_s, .queue_ns = (uint64_t)(s->queue_ms * 1e6)};
        *memory_port_up(r->v.net, i) = *memory_port_down(r->v.net, i) = port;
        for (uint16_t k = 0; k < r->v.size; k++)
            memory_path_of(r->v.net, i, k)->burst = s->burst;
    }
}

static inline void slow_submit(slow_run *r) {
    slow_op *op = &r->ops[r->submitted++];
    const slow_scenario *s = &r->s;
    net n = {.size = r->v.size, .payload = slow_payload(s)};
    uint32_t segment = (uint32_t)s->bytes / 4 / r->v.size, elements = segment * r->v.size;
    for (uint16_t i = 0; i < r->v.size; i++) {
        op->data[i] = malloc((size_t)elements * 4);
        if (!op->data[i])
            abort();
        fill(op->data[i], elements, i);
        op->ticket[i] = net_submit_to(r->v.group[i], &n, i, 0, segment, op->data[i],
                                      s->delivery == SLOW_RELIABLE, s->delivery == SLOW_REPAIR, 0);
        if (op->ticket[i] <= 0)
            abort();
    }
    op->submitted_ns = memory_now(r->v.net);
}

static inline int slow_has_ended(slow_run *r, slow_op *op) {
    lc_failure failure;
    lc_report report;
    int ended = 0;
    for (uint16_t i = 0; i < r->v.size; i++) {
        int code = op->ended[i] ? LC_PENDING
                                : lc_group_result(r->v.group[i], op->ticket[i], &report, &failure);
        if (code != LC_PENDING) {
            op->ended[i] = 1;
            op->missing += report.packets_missing;
        }
        if (code < 0)
            op->code = code;
        ended += op->ended[i];
    }
    return ended == r->v.size;
}

static inline void slow_take_ended(slow_run *r) {
    while (r->ended < r->submitted && slow_has_ended(r, &r->ops[r->ended])) {
        slow_op *op = &r->ops[r->ended++];
        op->ended_ns = memory_now(r->v.net);
        op->counts = memory_counts_of(r->v.net);
        for (uint16_t i = 0; i < r->v.size; i++) {
            lc_group_release(r->v.group[i], op->ticket[i]);
            free(op->data[i]);
        }
    }
}

static inline void slow_go_on(slow_run *r, uint64_t until) {
    uint64_t next = until;
    for (uint16_t i = 0; i < r->v.size; i++)
        for (int turns = 0; lc_host_turn(r->v.host[i]) && turns < SLOW_TURNS; turns++) {
        }
    for (uint16_t i = 0; i < r->v.size; i++) {
        uint64_t wakes = virtual_wakes(&r->v, i);
        next = wakes < next ? wakes : next;
    }
    virtual_set_now(&r->v, next);
}

/* As many in flight as `deep` says; a pause before each batch of those. */
static inline void slow_run_ops(slow_run *r) {
    uint64_t pause_ns = (uint64_t)(r->s.pause_ms * 1e6);
    while (r->ended < r->s.ops) {
        uint64_t begin = memory_now(r->v.net) + pause_ns;
        while (pause_ns && memory_now(r->v.net) < begin)
            slow_go_on(r, begin);
        for (uint32_t k = 0; k < r->s.deep && r->submitted < r->s.ops; k++)
            slow_submit(r);
        while (r->ended < r->submitted) {
            slow_go_on(r, UINT64_MAX);
            slow_take_ended(r);
            if (!pause_ns)
                while (r->submitted < r->s.ops && r->submitted - r->ended < r->s.deep)
                    slow_submit(r);
        }
    }
}

/* Whether some path has given up sending packets together. */
static inline int slow_is_single(const slow_run *r) {
    for (uint16_t i = 0; i < r->v.size; i++)
        for (uint16_t k = 0; k < r->v.size; k++)
            if (r->v.host[i]->paths[k].aggregates.mode == LC_SINGLE)
                return 1;
    return 0;
}

/* Since it was submitted, or since the one before it ended. */
static inline double slow_seconds(const slow_run *r, uint32_t k) {
    uint64_t begin = r->ops[k].submitted_ns;
    if (k && r->ops[k - 1].ended_ns > begin)
        begin = r->ops[k - 1].ended_ns;
    return 1e-9 * (double)(r->ops[k].ended_ns - begin);
}

/* Runs a scenario; the caller frees it. */
static inline slow_run *slow_run_all(const slow_scenario *s) {
    slow_run *r = calloc(1, sizeof *r);
    if (!r)
        abort();
    r->s = *s;
    slow_open_hosts(r);
    slow_run_ops(r);
    CHECK(!slow_is_single(r)); /* no trouble of these networks is that */
    virtual_close(&r->v);
    return r;
}

#endif
