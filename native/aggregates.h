/* Whether what a link sends as one (segmentation offload) comes through where single packets do.
 * Some virtual devices and tunnels drop each aggregate larger than their MTU, and say nothing. */
#ifndef LC_AGGREGATES_H
#define LC_AGGREGATES_H

#include <stdint.h>

enum lc_aggregates_mode {
    LC_TOGETHER = 0, /* runs go as one */
    LC_TRIED = 1,    /* they vanished: packets go one by one, to see whether those come */
    LC_SINGLE = 2    /* those came */
};

/* A window begins with a run. It ends when the peer knows of enough that was sent since: what it
 * has taken by then tells whether anything of runs came. */
typedef struct {
    uint8_t mode;
    uint8_t is_open;   /* a window is */
    uint8_t strikes;   /* windows of which no run came, since one last did, */
    uint8_t large;     /* and whether a single datagram as large has come since then */
    uint8_t news;      /* runs are sent no more, and nobody was told */
    uint32_t size;     /* of the path's datagrams: with another one it all begins again */
    uint32_t from;     /* link_seq of the window's first packet, */
    uint32_t received; /* packets that the peer had taken when that went, */
    uint32_t singles;  /* and those that went alone since */
} lc_aggregates;

/* So many packets went, the first of them `first`; together: in one run. received: what the peer
 * says that it has taken, so far. */
static inline void lc_aggregates_sent(lc_aggregates *a, uint32_t first, uint32_t n, int together,
                                      uint32_t received) {
    if (together && !a->is_open && a->mode != LC_SINGLE) {
        a->is_open = 1;
        a->from = first;
        a->received = received;
        a->singles = 0;
    }
    if (!together)
        a->singles += n;
}

/* The peer says that this is the largest that came since it last said so; size: of the path. */
static inline void lc_aggregates_came(lc_aggregates *a, uint32_t bytes, uint32_t size) {
    a->large |= bytes >= size;
}

/* The peer knows of all before `acked`, and has taken so many. Returns whether the link has to be
 * told that the mode is another one. */
int lc_aggregates_told(lc_aggregates *a, uint32_t acked, uint32_t received, uint32_t size);

#endif
