/* A link without a network: packets wait in memory until their time has come. Loss, delay, order,
 * doubles and rate are drawn from a seed, and time is a number that is set from outside, so that
 * what happens depends on nothing else. Tests of the engine use it, and sim.h. */
#ifndef LC_LINK_MEMORY_H
#define LC_LINK_MEMORY_H

#include "link.h"

/* The way from one place to another. Shares are of all packets, data and control alike. */
typedef struct {
    uint64_t delay_ns;
    uint64_t jitter_ns; /* up to so much more, which changes the order */
    int ordered;        /* unless this is set: then it wanders, and what left first comes first */
    double late;        /* share that takes late_ns more */
    uint64_t late_ns;
    double loss;
    double burst;       /* mean length of a run of losses; <= 1: each by itself */
    double twice;       /* share that comes twice */
    double bytes_per_s; /* 0: no bound */
    uint64_t queue_ns;  /* what would wait longer at the bottleneck is dropped; 0: waits */
    int cut;            /* nothing comes through */
    uint32_t carries;   /* datagrams of more bytes vanish; 0: none do */
    int single;         /* what is handed over as one run vanishes */
    /* state */
    uint64_t free_ns; /* when the bottleneck is */
    uint64_t last_ns; /* when the latest packet comes, if they are ordered, */
    uint64_t turn_ns; /* when the delay last changed its direction, and from where to where it */
    uint64_t jitter_from, jitter_to; /* goes since then */
    int in_burst;
    uint64_t bytes; /* that its sender's port let through to it (memory_count_until) */
} memory_path;

/* What all packets from a place share, or all to it. */
typedef struct {
    double bytes_per_s;        /* 0: no bound */
    uint64_t queue_ns;         /* as of a path */
    double police_bytes_per_s; /* packets above this rate are dropped at once; 0: none are */
    uint64_t police_ns;        /* of that rate: what may come at once */
    /* state */
    uint64_t free_ns;
    double tokens; /* bytes that the policer lets through */
    uint64_t filled_ns;
    /* counts */
    uint64_t packets, bytes; /* that came to it, those that were dropped included */
    uint64_t dropped, policed;
} memory_port;

typedef struct memory_net memory_net;

typedef struct {
    uint64_t sent, lost, doubled, dropped; /* dropped: at a bottleneck */
    uint64_t refused;                      /* sends that found the link full */
    uint64_t vanished;                     /* of those lost, for their size, or in runs */
} memory_counts;

/* capacity: packets that a rank's receive buffer holds, all peers together. Each rank is at a place
 * of its own. */
memory_net *memory_net_new(uint16_t size, uint32_t packet_max, uint32_t capacity, uint64_t seed);
/* The same, with ranks that share places, and so ports and paths; `places`: by rank, ascending from
 * 0. */
memory_net *memory_net_at(uint16_t size, const uint16_t *places, uint32_t packet_max,
                          uint32_t capacity, uint64_t seed);
/* After all of its links have been closed. */
void memory_net_free(memory_net *net);
lc_link *memory_link_open(memory_net *net, uint16_t rank);

/* Between two places. */
memory_path *memory_path_of(memory_net *net, uint16_t from, uint16_t to);
/* Before the paths from a place, and behind those to it. */
memory_port *memory_port_up(memory_net *net, uint16_t place);
memory_port *memory_port_down(memory_net *net, uint16_t place);
/* Each place is in a site, by place; sites are fewer than places, numbered from 0. What goes from
 * one to another passes the gateway of its sender's before the path, and that of its receiver's
 * behind it. Once, and not with a fold or nets whose time another sets. */
void memory_set_sites(memory_net *net, const uint16_t *sites);
memory_port *memory_gateway_out(memory_net *net, uint16_t site);
memory_port *memory_gateway_in(memory_net *net, uint16_t site);
/* What has come to gateways by now is behind them, or dropped; and foreign packets are heard. */
void memory_pass_gateways(memory_net *net);
/* When something next comes to one, or a foreign packet is heard; UINT64_MAX: nothing does. */
uint64_t memory_next_at_gateways(const memory_net *net);
/* A packet of others than ranks, of so many bytes without those of memory_set_wire, which takes all
 * ports, queues and paths from a place to another. `note` is what it says, at most
 * MEMORY_NOTE_BYTES: it is heard when the packet has left its receiver's port. With payloads
 * forgotten and without a fold; counts and ports don't count it. */
enum { MEMORY_NOTE_BYTES = 64 };
void memory_send_foreign(memory_net *net, uint16_t from, uint16_t to, size_t bytes,
                         const void *note, size_t n);
typedef void memory_hear(void *context, const void *note);
void memory_set_hear(memory_net *net, memory_hear *hear, void *context);
/* Paths count no bytes after that time. */
void memory_count_until(memory_net *net, uint64_t at_ns);
/* What networks below add to each packet: counts at ports and bottlenecks. */
void memory_set_wire(memory_net *net, uint32_t bytes);
/* The links of this net are memory that ranks share, with payloads of so many bytes. For links that
 * are opened later. */
void memory_set_local(memory_net *net, uint32_t payload_bytes);
/* Payloads of data are not kept, and read as zeros: they take neither memory nor time. */
void memory_forget_payloads(memory_net *net);
/* Called when a packet is under way that comes to its rank before all that was; the rank behind the
 * last one is for gateways. */
typedef void memory_wake(void *context, uint16_t rank, uint64_t at_ns);
void memory_set_wake(memory_net *net, memory_wake *wake, void *context);
/* Ranks from `real` on are stood for by those before, `real` ranks apart: what is sent to one of
 * them goes to the one that stands for it, from a rank that is as many before, and is renamed: `to`
 * is the rank to which it was sent, n the datagram's bytes and `kept` those of them that are there.
 */
typedef void memory_rename(void *context, uint16_t to, uint8_t *data, size_t kept, size_t n);
void memory_set_fold(memory_net *net, uint16_t real, memory_rename *rename, void *context);
/* Time is another net's. */
void memory_follow(memory_net *net, const memory_net *other);
/* Share of sends that find the link full, for up to so long. */
void memory_set_full(memory_net *net, double share, uint64_t longest_ns);
/* Links read payloads so much later than they take them over, and say when they have; 0: at once.
 * For links that are opened later. */
void memory_set_late(memory_net *net, uint64_t reads_ns);
/* Called with each datagram that a rank sends, whatever becomes of it. */
typedef void memory_tap(void *context, uint16_t from, uint16_t to, const struct iovec *iov);
void memory_set_tap(memory_net *net, memory_tap *tap, void *context);
/* A datagram that `from` has not sent, and that passes for its. Larger ones than the net carries
 * are cut. */
void memory_throw(memory_net *net, uint16_t from, uint16_t to, const void *bytes, size_t n,
                  uint64_t way_ns);
/* Packets that a rank's link has taken over and not read. */
uint64_t memory_flights(const memory_net *net, uint16_t rank);
/* Ranks take each other for processes of one host. */
void memory_set_same_host(memory_net *net, int same_host);
/* Paths may carry less than packets, as by networks with routers. For links that are opened later.
 */
void memory_set_routed(memory_net *net, int routed);
memory_counts memory_counts_of(const memory_net *net);
/* A rank's link sends nothing any more, for good. */
void memory_break(memory_net *net, uint16_t rank, int sys_errno);
/* It has something to tell: one event at a time. */
void memory_tell(memory_net *net, uint16_t rank, const lc_event *event);
/* Packets that found a rank's receive buffer full. */
uint64_t memory_overflow(const memory_net *net, uint16_t rank);

/* Called when a rank's loop is about to sleep on its link, for so long at most: time is the
 * callback's to pass, and *longest_ns is for how long the rank sleeps beyond that, in real time. */
typedef void memory_sleep(void *context, uint16_t rank, uint64_t *longest_ns);
void memory_set_sleep(memory_net *net, memory_sleep *sleep, void *context);
/* So much time passes whenever somebody reads the clock. */
void memory_set_step(memory_net *net, uint64_t ns);

/* Time, which all ranks share. */
const lc_clock *memory_clock(const memory_net *net);
uint64_t memory_now(const memory_net *net);
void memory_set_now(memory_net *net, uint64_t now);
/* What has come to the rank's port by now is behind it, or dropped. */
void memory_advance(memory_net *net, uint16_t rank);
/* When the rank's link next has something, or takes packets again after it was full; UINT64_MAX:
 * never, as things are. */
uint64_t memory_next(const memory_net *net, uint16_t rank);

#endif
