/* A host's uplink, as one of its ranks uses it.
 *
 * Ranks that share this machine's memory, and send from one address, pace it as one. Each tells the
 * others what its acknowledgements say, on a board that it alone writes. One of them leads: it runs
 * the port's law over what all tell, and says what may be sent together. That is divided among
 * those that have something to send. Where nobody tells for a while, whoever sends leads. */
#ifndef LC_UPLINK_H
#define LC_UPLINK_H

#include "port.h"
#include "rate.h"

#include <stdatomic.h>

/* A process's paths leave by one to hosts of its site, and by another to those of other sites. Each
 * is paced by itself: a site's hosts share what joins it to others, which is often slower. */
enum { LC_NEAR, LC_FAR, LC_UPLINKS };

enum { LC_UPLINK_ACKS = 32, LC_UPLINK_ACK_WORDS = 9, LC_UPLINK_RANKS = 256 };

/* Of one rank. Numbers that aren't whole are written as their bits. */
typedef struct lc_uplink_board {
    _Atomic uint64_t key;      /* of the address that it sends from */
    _Atomic uint64_t busy_ns;  /* until when it has something to send */
    _Atomic uint64_t led_ns;   /* when it led last; 0: never */
    _Atomic uint64_t sequence; /* of `known`; odd while it is written */
    _Atomic uint64_t known[LC_PORT_KNOWN_WORDS];
    _Atomic uint64_t n_acks; /* ever, of which the latest are kept */
    _Atomic uint64_t acks[LC_UPLINK_ACKS][LC_UPLINK_ACK_WORDS];
} lc_uplink_board;

/* Another rank, as this one has read it. */
typedef struct {
    const lc_uplink_board *board;
    uint64_t n_acks;
    double moved, taken, sent; /* bytes that it has told of, ever */
} lc_uplink_rank;

typedef struct {
    lc_port law; /* of this rank alone, or of all while it leads */
    lc_rate gate;
    lc_uplink_board *own;  /* NULL: it has the uplink for itself */
    lc_uplink_rank *ranks; /* the others, */
    uint32_t n_ranks;      /* so many */
    int leads;
    lc_port_known known; /* as the leader said */
    uint64_t known_ns;   /* then */
    int64_t low_ns;      /* the least queue of the latest packets, of whatever rank */
    uint64_t low_at_ns;
    uint32_t busy;             /* ranks that have something to send, this one among them, */
    uint64_t counted_ns;       /* as of then */
    uint32_t packet_bytes;     /* of the largest that has gone */
    double moved, taken, sent; /* told, ever */
    double spent;              /* bytes that left since, */
    int held;                  /* and whether packets waited */
} lc_uplink;

void lc_uplink_init(lc_uplink *u, uint64_t now);
/* Shares it with ranks whose boards these are, which outlive it. Those of other addresses don't
 * count. `ranks` has room for n, and stays the caller's. */
void lc_uplink_share(lc_uplink *u, lc_uplink_board *own, lc_uplink_rank *ranks,
                     const lc_uplink_board *const *boards, uint32_t n);
/* So many paths of this rank leave by it from now on. */
void lc_uplink_serves(lc_uplink *u, uint16_t n_paths, uint64_t now);
void lc_uplink_acked(lc_uplink *u, const lc_port_ack *ack);
/* As lc_port_bound. */
int lc_uplink_bound(lc_uplink *u, const lc_port_ack *ack, double rate);
/* Packets of packet_bytes that may go now; at most want. n_paths: of those that have some. */
uint32_t lc_uplink_room(lc_uplink *u, uint64_t now, uint32_t want, uint32_t packet_bytes,
                        uint32_t n_paths);
void lc_uplink_spend(lc_uplink *u, uint64_t now, double bytes);
/* Nanoseconds until a packet may go; 0: now. */
uint64_t lc_uplink_delay(const lc_uplink *u, uint64_t now, uint32_t packet_bytes);
/* Bytes/s that the port's law knows it to carry, if it has been used of late; else 0. */
double lc_uplink_used(const lc_uplink *u, uint64_t now);
/* The share of packets that is lost at any rate. */
double lc_uplink_lost(const lc_uplink *u);
/* n ranks of the hosts that share what is behind it have told their host's rate, bytes/s. */
void lc_uplink_shared(lc_uplink *u, uint32_t n, double rate);
/* Times that the least delays of all paths turned out to be of the past. */
uint32_t lc_uplink_renewed(const lc_uplink *u);

#endif
