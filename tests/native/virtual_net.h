/* Hosts on one net of memory, each with one group of all of them, in virtual time: for tests that
 * look at few calls of few ranks. */
#ifndef LC_TEST_VIRTUAL_NET_H
#define LC_TEST_VIRTUAL_NET_H

#include <stdlib.h>
#include <string.h>

#include "link_memory.h"
#include "lossycoll.h"
#include "step.h"
#include "wire.h"

enum { VIRTUAL_RANKS = 8 };

typedef struct {
    uint16_t size;
    memory_net *net;
    lc_host *host[VIRTUAL_RANKS];
    lc_group *group[VIRTUAL_RANKS]; /* NULL once a test has closed it */
    lc_completions *completions;    /* of all ranks, which are the owners */
} virtual_net;

typedef struct {
    uint16_t size, payload;
    uint32_t capacity; /* packets that a rank's receive buffer holds */
    uint32_t eager_bytes;
    uint64_t keepalive_ns;
    uint64_t delay_ns;     /* of each way */
    double loss;           /* of each way, control as well */
    uint8_t paces_port;    /* as of lc_host_config */
    uint8_t paced;         /* 1: congestion control has a part in it */
    uint8_t routed;        /* 1: what paths carry is looked for */
    uint8_t sealed;        /* 1: all packets are */
    uint32_t disable;      /* lc_fast_path bits */
    uint64_t seed;         /* of the network's chance; 0: some */
    lc_group_config group; /* number, rank and size are set */
} virtual_setup;

static inline void virtual_seal(lc_host *host, uint16_t process, uint16_t size) {
    uint8_t secrets[VIRTUAL_RANKS][2][LC_SECRET_BYTES];
    lc_failure failure;
    for (uint16_t i = 0; i < size; i++) {
        memset(secrets[i][0], process * VIRTUAL_RANKS + i, LC_SECRET_BYTES);
        memset(secrets[i][1], i * VIRTUAL_RANKS + process, LC_SECRET_BYTES);
    }
    lc_seal_config c = {.cipher = LC_AES_128_GCM, .filter = 99, .secrets = secrets[0][0]};
    if (lc_host_seal(host, &c, &failure) != LC_OK)
        abort();
}

static inline void virtual_open(virtual_net *v, const virtual_setup *how) {
    lc_address nowhere[VIRTUAL_RANKS] = {{.port = 0}};
    lc_failure failure;
    *v = (virtual_net){.size = how->size, .completions = lc_completions_open()};
    uint32_t packet = (uint32_t)(LC_HEADER_BYTES + how->payload + how->sealed * LC_TAG_BYTES);
    v->net = memory_net_new(how->size, packet, how->capacity, how->seed ? how->seed : 7);
    memory_set_same_host(v->net, !how->paced);
    memory_set_routed(v->net, how->routed);
    for (uint16_t i = 0; i < how->size; i++) {
        for (uint16_t k = 0; k < how->size; k++) {
            memory_path_of(v->net, i, k)->delay_ns = how->delay_ns;
            memory_path_of(v->net, i, k)->loss = how->loss;
        }
        lc_host_config c = {.address = "memory",
                            .process = i,
                            .processes = how->size,
                            .payload_bytes = how->payload,
                            .disable = how->disable,
                            .eager_bytes = how->eager_bytes,
                            .paces_port = how->paces_port,
                            .keepalive_ns = how->keepalive_ns};
        lc_link *link = memory_link_open(v->net, i);
        lc_setting setting = {memory_clock(v->net), &link, 1};
        v->host[i] = lc_host_open_in(&c, &setting, &failure);
        if (v->host[i] && how->sealed)
            virtual_seal(v->host[i], i, how->size);
        if (!v->host[i] || lc_host_start(v->host[i], 9, nowhere) != LC_OK)
            abort();
        lc_group_config g = how->group;
        g.number = 1;
        g.rank = i;
        g.size = how->size;
        g.completions = v->completions;
        g.owner = i;
        v->group[i] = lc_group_open(v->host[i], &g, &failure);
        if (!v->group[i])
            abort();
    }
}

static inline void virtual_close(virtual_net *v) {
    for (uint16_t i = 0; i < v->size; i++)
        if (v->group[i])
            lc_group_close(v->group[i]);
    for (uint16_t i = 0; i < v->size; i++)
        lc_host_close(v->host[i]);
    lc_completions_close(v->completions);
    memory_net_free(v->net);
}

/* When a rank that has rested has something to do again. */
static inline uint64_t virtual_wakes(const virtual_net *v, uint16_t rank) {
    uint64_t now = memory_now(v->net), idle = lc_host_idle_ns(v->host[rank]);
    uint64_t wakes = idle < UINT64_MAX - now ? now + idle : UINT64_MAX;
    uint64_t arrives = memory_next(v->net, rank);
    return wakes < arrives ? wakes : arrives;
}

/* Time never goes back. */
static inline void virtual_set_now(virtual_net *v, uint64_t ns) {
    memory_set_now(v->net, ns > memory_now(v->net) ? ns : memory_now(v->net));
}

/* All ranks take the turns that they have, for so long. */
static inline void virtual_go_on(virtual_net *v, uint64_t ns) {
    uint64_t end = memory_now(v->net) + ns;
    while (memory_now(v->net) < end) {
        uint64_t next = end;
        for (uint16_t i = 0; i < v->size; i++)
            while (lc_host_turn(v->host[i])) {
            }
        for (uint16_t i = 0; i < v->size; i++) {
            uint64_t wakes = virtual_wakes(v, i);
            next = wakes < next ? wakes : next;
        }
        virtual_set_now(v, next);
    }
}

#endif
