/* The link of RDMA: unreliable datagrams (docs/rdma.md). */
#ifndef LOSSYCOLL_VERBS_H
#define LOSSYCOLL_VERBS_H

#include "lossycoll_types.h"

/* cdef begin */

/* ---- unreliable datagrams of RDMA (docs/rdma.md) ---- */

/* What the other processes need to know of one. */
typedef struct {
    uint8_t gid[16];     /* of its port */
    uint32_t queue_pair; /* 24 bits */
    uint32_t key;        /* without it the device drops a datagram */
    uint16_t lid;        /* 0 on an Ethernet */
    uint16_t partition;
} lc_verbs_address;

typedef struct {
    const char *library;  /* NULL: the system's libibverbs */
    const char *device;   /* its name */
    const char *counters; /* folder of its port's own counters in sysfs; NULL: it has none */
    uint8_t port;
    uint8_t gid;    /* index in the port's table */
    uint32_t queue; /* datagrams that may wait here, at most; 0: the usual number */
} lc_verbs_config;

typedef struct lc_verbs_port lc_verbs_port;

/* What a port is like. */
typedef struct {
    uint16_t mtu;      /* bytes of a datagram */
    uint8_t ethernet;  /* RoCE */
    uint32_t queue;    /* datagrams that may wait here, */
    uint32_t queue_of; /* and those that were asked for: fewer fit into what may be locked */
    lc_verbs_address address;
} lc_verbs_info;

/* Where opening a device ended: lc_failure.mine[0]. */
enum lc_verbs_step {
    LC_VERBS_LIBRARY = 1, /* there is no libibverbs */
    LC_VERBS_DEVICE = 2,  /* there is no such device, */
    LC_VERBS_OPEN = 3,    /* or it can't be opened: /dev/infiniband */
    LC_VERBS_PORT = 4,    /* there is no such port, or it isn't active */
    LC_VERBS_GID = 5,     /* or it has no such GID */
    LC_VERBS_MEMORY = 6,  /* too little may be locked */
    LC_VERBS_QUEUES = 7   /* no queue pair is to be had */
};

/* Opens a device's port and a queue pair, before it is known whether others are reached by it. NULL
 * on failure, with the reason in *failure: mine[0] is an lc_verbs_step. */
lc_verbs_port *lc_verbs_open(const lc_verbs_config *config, lc_verbs_info *info,
                             lc_failure *failure);
/* Only of one that no host has taken. */
void lc_verbs_close(lc_verbs_port *port);
/* Finds the ways to n processes, those whose address has a queue pair, which may take seconds.
 * LC_OK, also where there is no way to some; or LC_E_MEMORY. */
int lc_verbs_know(lc_verbs_port *port, uint16_t own, const lc_verbs_address *addresses, uint16_t n);
/* Finds out who of them is reached, while they do the same: datagrams of so many bytes (24 to 4096)
 * until all have answered or so much time is over. heard[i] becomes 1 if one came from process i.
 * token: of this meeting alone. LC_OK or LC_E_ARGUMENT. */
int lc_verbs_greet(lc_verbs_port *port, uint64_t token, uint16_t own, uint16_t n, uint32_t bytes,
                   uint64_t timeout_ns, uint8_t *heard);
/* Drops what has come: greetings that nobody waits for any more, once all have ended theirs. */
void lc_verbs_drop_arrived(lc_verbs_port *port);
/* Makes it the host's next link, whose number is returned, if it is above 0: the port is the host's
 * from then on. Between lc_host_open and lc_host_start, after lc_host_share. LC_E_ARGUMENT, as by
 * lc_host_open, where packets are too large for it. */
int lc_host_verbs(lc_host *host, lc_verbs_port *port, lc_failure *failure);

/* cdef end */

#endif
