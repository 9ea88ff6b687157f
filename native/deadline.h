/* When a silent stream is given up: learnt from how long streams of this peer really took. */
#ifndef LC_DEADLINE_H
#define LC_DEADLINE_H

#include <stdint.h>

enum { LC_DEADLINE_SAMPLES = 64 };

typedef struct {
    uint64_t per_packet_ns[LC_DEADLINE_SAMPLES]; /* duration / packets, of settled streams */
    uint64_t gap_ns[LC_DEADLINE_SAMPLES];        /* longest silence inside them */
    uint32_t n;                                  /* samples so far */
    uint64_t per_packet_q, gap_q;                /* their quantiles */
    int fresh;                                   /* the quantiles are up to date */
} lc_deadline;

void lc_deadline_add(lc_deadline *d, uint64_t duration_ns, uint64_t gap_ns, uint32_t n_packets);
/* The time that a stream of n packets gets from its first packet on, within [floor, ceiling]; the
 * ceiling while too little is known. */
uint64_t lc_deadline_of(lc_deadline *d, uint32_t n_packets, uint64_t floor_ns, uint64_t ceiling_ns);
/* How long such a stream may be silent after its deadline, with a gap as long as that to be
 * expected: by the packets that it has had, or by its path. */
uint64_t lc_deadline_silence(lc_deadline *d, uint64_t gap_ns);

#endif
