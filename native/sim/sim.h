/* Whole hosts of the engine in virtual time, joined by a network of memory (link_memory.h), in one
 * thread. The engine is the caller's, who opens hosts and groups as always and submits to them;
 * here is what is around it: links, the clock, and whose turn it is.
 *
 * The part between the two cdef marks is read by native/build_cffi.py as it stands, so it holds
 * plain declarations only. */
#ifndef LC_SIM_H
#define LC_SIM_H

#include <stdint.h>

#include "../lab/links.h"

/* cdef begin */

/* The engine's functions (step.h, lossycoll.h), which are in another library. */
typedef struct {
    void *turn;    /* lc_host_turn */
    void *idle_ns; /* lc_host_idle_ns */
    void *wait;    /* lc_group_wait */
} lc_sim_engine;

typedef struct {
    uint16_t ranks;
    const uint16_t *places; /* the host of each rank, ascending from 0; ranks of one share its port
                               and its memory */
    uint16_t payload_bytes; /* data bytes of a packet, */
    uint32_t wire_bytes;    /* what networks below the engine add to it, */
    uint32_t capacity;      /* and packets that a rank's receive buffer holds */
    uint16_t local_payload; /* data bytes of a packet in a host's memory; 0: there is none */
    uint8_t sealed;         /* 1: hosts will seal (lc_host_seal); not with a fold */
    uint64_t grain_ns;      /* a rank that has had its turns rests for so long at least */
    uint64_t seed;
} lc_sim_config;

typedef struct {
    uint64_t packets, bytes;             /* sent between hosts; bytes with wire_bytes */
    uint64_t dropped_up, dropped_down;   /* by the queues before hosts' ports, */
    uint64_t dropped_gateway;            /* before sites' gateways, */
    uint64_t dropped_link;               /* and before the rates of links */
    uint64_t policed;                    /* at ports and gateways */
    uint64_t lost;                       /* by the links' own chance */
    uint64_t overflow;                   /* found a receive buffer full */
    uint64_t site_packets, site_bytes;   /* of those sent, came to their sites' gateways */
    uint64_t local_packets, local_bytes; /* within hosts */
    uint64_t turns;                      /* of the engine */
} lc_sim_counts;

typedef struct lc_sim lc_sim;

/* NULL: no memory, or places that can't be. */
lc_sim *lc_sim_open(const lc_sim_config *config, const lc_sim_engine *engine);
/* After all hosts were closed. */
void lc_sim_close(lc_sim *sim);
/* The first `real` ranks stand for all, and only they are opened: fold.h has the rest. */
void lc_sim_fold(lc_sim *sim, uint16_t real, uint64_t session, uint16_t fixed, uint16_t block);
/* Before an operation is submitted. */
void lc_sim_fold_step(lc_sim *sim, uint32_t op, uint16_t step);
/* Opens a rank's links: an lc_setting for lc_host_open_in. Valid until the next one is asked for.
 */
void *lc_sim_setting(lc_sim *sim, uint16_t rank);
/* The rank's host, an lc_host, that was opened with it: it takes turns from now on. */
void lc_sim_take(lc_sim *sim, uint16_t rank, void *host);
/* Of a host, up: to the network. A policer stands there alone, not at a link. */
void lc_sim_set_port(lc_sim *sim, uint16_t place, int up, const lab_rate *rate);
void lc_sim_set_path(lc_sim *sim, uint16_t from, uint16_t to, const lab_link *link);
/* Hosts are in sites, by host: numbers from 0, fewer than hosts. Once, before anything is sent. */
void lc_sim_set_sites(lc_sim *sim, const uint16_t *sites);
/* Of a site, which its hosts share; up: to other sites. */
void lc_sim_set_gateway(lc_sim *sim, uint16_t site, int up, const lab_rate *rate);
/* Of what goes through a host's memory. */
void lc_sim_set_memory(lc_sim *sim, uint16_t place, uint64_t delay_ns, double bytes_per_s);
/* A flow of TCP between two hosts, from now on, in such a share of each second; kind 1: Reno, 2:
 * CUBIC. Returns its number; -1: no memory. After all ranks were opened, and not with a fold. */
int lc_sim_add_tcp(lc_sim *sim, uint16_t from, uint16_t to, int kind, double share);
/* Bytes of data that a flow's receiver has, and packets that were sent for lost ones. */
void lc_sim_tcp_took(const lc_sim *sim, int flow, uint64_t *bytes, uint64_t *resent);
/* A rank has submitted an operation to an lc_group: it is awaited. Returns 0 if too many are. */
int lc_sim_await(lc_sim *sim, uint16_t rank, void *group, int64_t ticket);
/* A rank's process ends: it takes no turn any more. */
void lc_sim_stop(lc_sim *sim, uint16_t rank);
/* Time passes until all that is awaited has ended, or until then. Returns how many ranks have not
 * ended. */
int lc_sim_run(lc_sim *sim, uint64_t until_ns);
uint64_t lc_sim_now(const lc_sim *sim);
/* When the last of the operations that are awaited ended, and the code of one that failed; 0: it
 * has not. */
uint64_t lc_sim_ended(const lc_sim *sim, uint16_t rank, int *code);
void lc_sim_counted(const lc_sim *sim, lc_sim_counts *counts);
/* What a host's port has let through to each host, until the last time that was given. */
void lc_sim_count_until(lc_sim *sim, uint64_t at_ns);
void lc_sim_sent(const lc_sim *sim, uint16_t place, uint64_t *bytes);

/* cdef end */

#endif
