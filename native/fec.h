/* The loss on the way to a peer, and how small sets of parity must be for it. */
#ifndef LC_FEC_H
#define LC_FEC_H

#include "sets.h"

/* What acknowledgements tell of the loss on the way to a peer. */
typedef struct {
    double sent, lost;           /* packets of late, and those of them that did not come */
    double soon_sent, soon_lost; /* the same of the very last */
    uint32_t size;               /* of sets, chosen last */
} lc_fec_path;

/* The peer has seen numbers of so many more packets, and taken so many. */
void lc_fec_told(lc_fec_path *path, uint32_t sent, uint32_t taken);
/* The share of packets that is believed to be lost. */
double lc_fec_loss(const lc_fec_path *path);
/* Sizes are those that a code can say (sets.h); of sets of one row. At least `least` packets. */
/* About half of a size. */
uint32_t lc_fec_half(uint32_t size, uint32_t least);
/* For a stream that begins: about nine of ten lost packets shall come back. 0: nothing is lost. */
uint32_t lc_fec_choose(lc_fec_path *path, uint32_t least);

#endif
