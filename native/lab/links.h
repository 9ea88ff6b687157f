/* Rates and links of a network, as lossycoll/lab/network.py describes them to the switch (lab.h)
 * and to simulations (sim.h). */
#ifndef LAB_LINKS_H
#define LAB_LINKS_H

#include <stdint.h>

/* cdef begin */
/* A queue of limited rate, or a policer: a bucket of tokens that the rate fills, and no queue. */
typedef struct {
    double bytes_per_s; /* of Ethernet frames without checksum; 0: no limit, and so no queue */
    double queue_bytes; /* what may wait, the packet on the wire included; a policer's bucket */
    uint32_t polices;   /* 1: what passes isn't delayed, and what finds no tokens is dropped */
} lab_rate;

typedef struct {
    double begin;   /* chance that a packet is lost after one that wasn't */
    double go_on;   /* chance that a packet is lost after one that was */
    double double_; /* share of packets that arrive twice */
    double reorder; /* share of packets that are held back by hold_ns, behind others */
    double hold_ns;
    double delay_ns;
    double jitter_ns; /* the delay wanders between delay - jitter and delay + jitter */
    double spread_ns; /* each packet's own further delay, up to this: packets overtake */
    lab_rate rate;
} lab_link;
/* cdef end */

#endif
