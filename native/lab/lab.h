/* The laboratory's switch: hosts in network namespaces, joined by links that lose, delay, reorder,
 * double and shape packets.
 *
 * One process, one thread. Everything that passes between it and its user is in one piece of shared
 * memory, lab_shared: what is wanted in, what happened out. The path of a packet is
 *
 *     host i -> uplink of i -> link (i, j) -> downlink of j -> host j
 *
 * and between hosts of different sites
 *
 *     host i -> uplink of i -> uplink of its site -> link (i, j)
 *            -> downlink of j's site -> downlink of j -> host j
 *
 * where an uplink, a link and a downlink each have a rate and a drop-tail queue, and a
 * link loses, delays, doubles and reorders besides. */
#ifndef LAB_H
#define LAB_H

#include <stdint.h>

#include "links.h"

/* cdef begin */
enum { LAB_HOSTS = 64, LAB_TEXT = 200 };
enum { LAB_STARTING = 0, LAB_READY = 1, LAB_FAILED = 2, LAB_ENDED = 3 };

typedef struct {
    uint64_t packets;   /* offered; as they are on the wire, whatever aggregates carried them */
    uint64_t bytes;     /* of frames, offered */
    uint64_t dropped;   /* packets that found the queue full */
    uint64_t policed;   /* packets that found the bucket empty */
    uint64_t queue_max; /* bytes in the queue, or taken out of the bucket */
} lab_rate_counts;

typedef struct {
    uint64_t offered; /* packets that left the uplinks */
    uint64_t lost;    /* by the chances of lab_link */
    uint64_t bursts;  /* runs of lost packets */
    uint64_t doubled;
    uint64_t reordered;
    uint64_t delivered; /* to the other host, doubles included */
    uint64_t delivered_bytes;
    lab_rate_counts queue;
} lab_link_counts;

typedef struct {
    uint64_t packets; /* aggregates read, then written */
    uint64_t written;
    uint64_t refused;     /* the kernel didn't take a packet that was due */
    uint64_t ignored;     /* not from host to host: broadcasts, other protocols' announcements */
    uint64_t shed;        /* packets dropped as the switch's memory was full */
    uint64_t overrun;     /* packets the kernel dropped before the switch could read them */
    uint64_t late_max_ns; /* the most by which a packet was delivered too late */
} lab_host_counts;

typedef struct {
    /* What is wanted; all but the tables is read once, at the start. */
    uint32_t hosts;
    uint32_t mtu;
    uint32_t devices; /* 0: only the namespaces, and one more in the middle */
    uint32_t network; /* host i has the IPv4 address network + i + 1, of 24 bits, host order */
    uint64_t seed;
    char congestion[16]; /* TCP's congestion control on all hosts; empty: the machine's */
    uint64_t wanted;     /* number of the last change of the tables below */
    lab_rate up[64];
    lab_rate down[64];
    lab_rate site_up[64];
    lab_rate site_down[64];
    lab_link link[4096]; /* from i to j at 64 i + j */
    uint8_t site_of[64]; /* by host */

    /* What happened. */
    uint32_t state;
    int32_t error;   /* errno, with LAB_FAILED */
    char text[200];  /* what failed */
    int32_t user_fd; /* namespaces, as descriptors of the switch; -1: none of its own */
    int32_t net_fd[65];
    uint64_t applied; /* the last change that is in force */
    lab_rate_counts up_counts[64];
    lab_rate_counts down_counts[64];
    lab_rate_counts site_up_counts[64];
    lab_rate_counts site_down_counts[64];
    lab_link_counts link_counts[4096];
    lab_host_counts host_counts[64];
} lab_shared;

/* Runs the switch until the other end of ``lifeline`` is closed, or its parent is gone; then ends
 * every process in its namespaces. Each byte from lifeline asks for the tables to be read again.
 * ``memory`` is a descriptor of a lab_shared. Returns 0, or -1 with the reason in state, error and
 * text. */
int lab_switch(int memory, int lifeline);

/* What became of numbered packets. */
typedef struct {
    uint64_t received; /* each counted once */
    uint64_t lost;     /* whatever didn't come, overflowed ones included */
    uint64_t bursts;   /* runs of lost packets, in the order in which they were sent */
    uint64_t doubled;
    uint64_t late;       /* came after one that was sent later */
    uint64_t highest;    /* number of the last in order, and 1 */
    uint64_t overflowed; /* found the receiver's socket full: loss that is none of the link's */
    uint64_t bytes;      /* of payload */
    double seconds;      /* from the first to the last */
    double last;         /* when that came, of CLOCK_MONOTONIC */
} lab_probe_counts;

/* Sends ``count`` numbered datagrams of ``bytes`` bytes, ``segments`` per call (1: no UDP_SEGMENT),
 * at most at ``bytes_per_s`` (0: as fast as it goes). Returns 0, or -1 with errno set. */
int lab_probe_send(const char *address, int port, uint64_t count, uint32_t bytes, uint32_t segments,
                   double bytes_per_s);
/* Receives them: until all are there or, once ``done`` is closed at its other end, none has come
 * for ``idle_ms``. Writes a line to ``ready`` once it listens. Returns 0, or -1 with errno set. */
int lab_probe_receive(int port, uint64_t count, int idle_ms, int ready, int done,
                      lab_probe_counts *out);
/* cdef end */

#endif
