/* Forward error correction: parity packets, and how many of them a path needs.
 *
 * A stream of n packets has P = ceil(n / g) parity packets, where g is the most packets that one of
 * them protects. Packet k belongs to set k mod P, so a burst of up to P neighbours costs each
 * set one packet. A parity packet is the XOR of its set's payloads, a shorter one counting as
 * filled up with zeros, and of its set's counts: so one missing packet of a set is the XOR of
 * all the others. docs/engine.md has the rest. */
#ifndef LC_FEC_H
#define LC_FEC_H

#include "lossycoll.h"

enum { LC_FEC_CODES = 32 };

/* Parity packets of a stream of n packets. */
uint32_t lc_fec_parity(uint32_t code, uint32_t n);

/* The parity of a slot's packets, as they are sent, or of those of a stream that have come. */
typedef struct {
    uint8_t *sums;    /* a packet for each set: XOR of its payloads */
    uint16_t *counts; /* XOR of its counts */
    uint16_t *left;   /* its packets that are not in the sums, parity not counted */
    uint64_t *came;   /* a bit per parity packet */
    uint32_t most;    /* sets that there is memory for */
    uint32_t sets;    /* 0 without parity */
    uint32_t taken;   /* packets in the sums */
    uint8_t code;
    uint8_t known; /* code is; the first packet says it */
} lc_parity;

/* Whether packets of this code can be of the stream of n packets. */
int lc_parity_fits(const lc_parity *parity, uint32_t code, uint32_t n);
/* Fixes the code, for which there must be memory. */
void lc_parity_begin(lc_parity *parity, uint8_t code, uint32_t n, uint32_t packet_bytes);
/* Adds a payload to a set: of a packet of it, or of its parity packet. */
void lc_parity_add(lc_parity *parity, uint32_t set, const void *payload, uint32_t bytes,
                   uint32_t packet_bytes, uint16_t count);

/* What acknowledgements tell of the loss on the way to a peer. */
typedef struct {
    double sent, lost;           /* packets of late, and those of them that did not come */
    double soon_sent, soon_lost; /* the same of the very last */
    uint8_t code;                /* chosen last */
} lc_fec_path;

/* The peer has seen numbers of so many more packets, and taken so many. */
void lc_fec_told(lc_fec_path *path, uint32_t sent, uint32_t taken);
/* The code of sets half as large, but no larger a share of parity than `most` has. */
uint8_t lc_fec_half(uint8_t code, uint8_t most);
/* The code for a stream that begins: about nine of ten lost packets shall come back. No larger a
 * share of parity than `most` has; 0: nothing is lost. */
uint8_t lc_fec_choose(lc_fec_path *path, uint8_t most);

#endif
