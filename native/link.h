/* A link: what the engine needs of a network, and nothing more. Kinds of link are tables of
 * functions: link_udp.c, link_shm.c, link_verbs.c. A host may have several, and each peer is
 * reached by one.
 *
 * A link is used by one thread at a time, the one that drives the engine, except where a function
 * says otherwise. It never prints and never sleeps: waiter.h does that for all links at once. */
#ifndef LC_LINK_H
#define LC_LINK_H

#include <poll.h>
#include <sys/uio.h>

#include "clock.h"
#include "lossycoll.h"

enum {
    LC_LINKS = 4,           /* of one host, at most */
    LC_RUN_PACKETS = 64,    /* packets in one run */
    LC_RUN_BYTES = 65000,   /* and their bytes, headers included */
    LC_BATCH_RUNS = 24,     /* handed over in one call, */
    LC_BATCH_RUNS_FAR = 8,  /* and of data to a link that leaves this machine */
    LC_RECEIVE_BUFFERS = 8, /* arrivals taken in one call */
    LC_CONTROL_WAITING = 9, /* control packets that a peer sends in a quarter of a second to a
                               process that doesn't read them (lc_tell_again_ns) */
    LC_LINK_DESCRIPTORS = 2 /* to sleep on, at most */
};

typedef struct lc_link lc_link;

/* Packets for one peer, each of two pieces (header, payload): iov[2 * n]. All have packet_bytes
 * bytes but the last, which may be shorter. The run, its iov and the headers are the caller's again
 * on return from send. So are the payloads, if `copied` is set or the link has no `completed`. */
typedef struct {
    struct iovec *iov;
    uint32_t n_packets;
    uint32_t packet_bytes;
    uint16_t peer; /* its number in the link, as set_peer gave it */
    uint8_t copied;
    uint8_t joined;           /* all pieces lie one behind the other */
    uint16_t receivers;       /* peers that get these payloads, this one included; 0: as 1 */
    const uint64_t *contents; /* by packet, where it has several receivers: payloads with one number
                                 are equal, in this call of send and in later ones */
} lc_run;

/* Packets of one sender that arrived together: each of stride bytes, the last may be shorter. Or a
 * single one whose payload lies elsewhere, and may be written by its sender while it is read:
 * data ends with its header then. */
typedef struct {
    const uint8_t *data;
    uint32_t length; /* 0: what came made no sense */
    uint32_t stride;
    const uint8_t *rest; /* the payload that lies elsewhere, or NULL */
    uint32_t rest_bytes;
    uint64_t came_ns; /* when the system got it, on the link's clock; 0: not known */
    const void *from; /* opaque; see lc_link_is_from */
} lc_arrival;

typedef struct {
    uint64_t send_calls, receive_calls;
    uint64_t overflow; /* packets that the system dropped because the receive buffer was full */
    uint64_t refused;  /* times that a fast path was refused */
    uint64_t failed;   /* times that sending failed and was put off */
} lc_link_stats;

typedef struct lc_link_ops {
    const char *name;
    void (*close)(lc_link *link);
    int (*set_peer)(lc_link *link, uint16_t peer, const lc_address *address);
    int (*is_here)(const lc_link *link, uint16_t peer);
    void (*go_singly)(lc_link *link, uint16_t peer, int on); /* NULL: nothing aggregates */
    const struct lc_uplink_board *(*board)(const lc_link *link, uint16_t peer); /* NULL: none has */
    void (*info)(const lc_link *link, lc_link_info *info);
    uint32_t (*credits)(const lc_link *link, uint32_t packet_bytes, uint32_t peers);
    int (*send)(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno);
    uint64_t (*completed)(lc_link *link); /* NULL: what is handed over is the caller's on return */
    int (*receive)(lc_link *link, lc_arrival *arrivals, int max);
    int (*is_from)(const lc_link *link, const lc_arrival *arrival, uint16_t peer);
    int (*descriptors)(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns);
    int (*watch)(lc_link *link); /* NULL: no peer has to know who sleeps */
    int (*event)(lc_link *link, lc_event *event);
    void (*stats)(const lc_link *link, lc_link_stats *stats);
    /* of out-of-band datagrams; NULL: it has none */
    int (*say)(lc_link *link, const lc_address *to, const uint8_t *data, uint32_t n);
    void (*source)(const lc_link *link, const lc_arrival *arrival, lc_oob_datagram *datagram);
} lc_link_ops;

/* What all kinds begin with. */
struct lc_link {
    const lc_link_ops *ops;
    const lc_clock *clock;
    uint32_t packet_max;    /* bytes of the largest packet, headers included */
    uint32_t payload_bytes; /* what packets of data carry at most; 0: as the host's */
    uint32_t head_max;      /* bytes of the first of a packet's two pieces; 0: any */
    uint32_t
        small_max;  /* packets of up to so many bytes take less room than others; 0: all alike */
    int routed;     /* paths may carry less than its packets: what each carries is looked for */
    int aggregates; /* a run may leave as one piece, which something on the way may drop as one */
    int local;      /* packets stay in this machine's memory: no rate is meant for them, and to ask
                       what has come costs nothing */
    struct lc_uplink_board *board; /* LC_UPLINKS of them, that this process writes for all who share
                                      its memory; NULL: none */
    uint64_t handed;               /* packets taken over by send since the link was opened */
};

/* The link that the configuration asks for. NULL on failure, with the reason in *failure. What
 * config points to is not kept, the clock is. */
lc_link *lc_link_open(const lc_host_config *config, const lc_clock *clock, lc_failure *failure);
/* The link by which the given processes (lc_host_share) share memory; *descriptors as there. */
lc_link *lc_shm_open(const lc_host_config *config, const uint16_t *processes, uint16_t n,
                     const lc_clock *clock, int descriptors[2], lc_failure *failure);

/* The link of RDMA by a device: a lc_verbs_port begins with it. */
lc_link *lc_verbs_link(const lc_verbs_config *config, const lc_clock *clock, lc_verbs_info *info,
                       lc_failure *failure);

static inline void lc_link_close(lc_link *link) {
    if (link)
        link->ops->close(link);
}

/* Makes `address`, which only the link can read, the peer with this number; NULL forgets it. Peers
 * come and go while the link is in use. LC_OK, LC_E_ARGUMENT for an address that it can't use, or
 * LC_E_MEMORY. Numbers should be small: they index a table. */
static inline int lc_link_set_peer(lc_link *link, uint16_t peer, const lc_address *address) {
    return link->ops->set_peer(link, peer, address);
}

/* The boards that a peer writes (uplink.h); NULL: there is none, or not yet. */
static inline const struct lc_uplink_board *lc_link_board(const lc_link *link, uint16_t peer) {
    return link->ops->board ? link->ops->board(link, peer) : NULL;
}

/* Whether a peer's address is one of this host's, as far as that can be told. */
static inline int lc_link_is_here(const lc_link *link, uint16_t peer) {
    return link->ops->is_here(link, peer);
}

/* on: packets to that peer leave one by one, since what leaves as one piece doesn't get there. Else
 * as fast as the system can. Only where the link aggregates. */
static inline void lc_link_go_singly(lc_link *link, uint16_t peer, int on) {
    link->ops->go_singly(link, peer, on);
}

/* From any thread. */
static inline void lc_link_info_of(const lc_link *link, lc_link_info *info) {
    link->ops->info(link, info);
}

/* How many packets of so many bytes each of so many peers (one or more) may have sent here before
 * any is taken, so that none of them is dropped. */
static inline uint32_t lc_link_credits(const lc_link *link, uint32_t packet_bytes, uint32_t peers) {
    return link->ops->credits(link, packet_bytes, peers);
}

/* Hands runs over in order. Returns how many packets of all runs, counted in order, are gone (sent,
 * or dropped by a local rule, which is loss like any other). Fewer than asked means that the link
 * takes no more now: try the rest after a sleep (lc_sleep_on). A link whose system fails (an
 * interface that is down, an address that is gone, no memory) takes nothing and tries again by
 * itself, slower and slower; lc_link_event says so. < 0: it will never send again, with errno in
 * *sys_errno. */
static inline int lc_link_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno) {
    int packets = link->ops->send(link, runs, n_runs, sys_errno);
    if (packets > 0)
        link->handed += (uint64_t)packets;
    return packets;
}

/* The link may read payloads until this number, which counts as `handed` does, has reached them.
 * It does so within a bounded time, and ends a sleep. A link that will never send again, or that is
 * closed, reads nothing any more. */
static inline uint64_t lc_link_completed(lc_link *link) {
    return link->ops->completed ? link->ops->completed(link) : link->handed;
}

/* Takes what has arrived; the data stays valid until the next call. 0: nothing there. */
static inline int lc_link_receive(lc_link *link, lc_arrival *arrivals, int max) {
    return link->ops->receive(link, arrivals, max);
}

static inline int lc_link_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer) {
    return link->ops->is_from(link, arrival, peer);
}

/* What to sleep on: up to LC_LINK_DESCRIPTORS of them, and *timeout_ns lowered where the link wants
 * to be asked sooner (0: something has come). Asked before each sleep, so a link whose peers have
 * to know that somebody sleeps tells them here, and then looks once more. While one thread sleeps,
 * another may use the link. blocked: it has taken fewer packets than asked, and shall wake who
 * sleeps when it takes more. Returns the number. */
static inline int lc_link_descriptors(lc_link *link, int blocked, struct pollfd *fds,
                                      uint64_t *timeout_ns) {
    return link->ops->descriptors(link, blocked, fds, timeout_ns);
}

/* A thread that sleeps on the link sleeps on, after another has used it: peers that have to know
 * are told again. Returns whether something has come. */
static inline int lc_link_watch(lc_link *link) {
    return link->ops->watch && link->ops->watch(link);
}

/* Takes the oldest thing that a person may want to know. Returns whether there was one. */
static inline int lc_link_event(lc_link *link, lc_event *event) {
    return link->ops->event(link, event);
}

/* Sends an out-of-band datagram to any address. From any thread. LC_OK, LC_E_ARGUMENT for an
 * address that it can't use, or LC_E_SYSTEM. */
static inline int lc_link_say(lc_link *link, const lc_address *to, const uint8_t *data,
                              uint32_t n) {
    return link->ops->say(link, to, data, n);
}

static inline void lc_link_stats_of(const lc_link *link, lc_link_stats *stats) {
    link->ops->stats(link, stats);
}

#endif
