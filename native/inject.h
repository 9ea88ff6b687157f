/* Seeded faults: a pure function of (seed, group, op, slot, sender, receiver, round, packet).
 * tests/oracle/masks.py is the same function; the oracle test holds the two together.
 *
 * With burst > 1 at least one packet arrives between two bursts, so the loss cannot exceed
 * burst / (burst + 1) unless it is 1; faults.py refuses what is more, here the
 * excess is not lost. */
#ifndef LC_INJECT_H
#define LC_INJECT_H

#include "lossycoll.h"

/* The key of one round of one stream. */
uint64_t lc_inject_key(const lc_inject *inject, uint32_t group, uint32_t op, uint16_t slot,
                       uint16_t sender, uint16_t receiver, uint8_t round);
/* Sets bit k of bits (ceil(n/64) words) for every packet k that is lost. Returns their number. */
uint32_t lc_inject_losses(const lc_inject *inject, uint64_t key, uint32_t n_packets,
                          uint64_t *bits);
/* Whether packet k is lost, of a stream that isn't here: its bit in lc_inject_losses, but for what
 * happened to the packets LC_INJECT_MEMORY and more before it. */
enum { LC_INJECT_MEMORY = 1024 };
int lc_inject_loses(const lc_inject *inject, uint64_t key, uint32_t k);
int lc_inject_duplicates(const lc_inject *inject, uint64_t key, uint32_t packet);
int lc_inject_reorders(const lc_inject *inject, uint64_t key, uint32_t packet);
/* Whether any fault is asked for. */
int lc_inject_active(const lc_inject *inject);
/* The faults of one link, whose loss is its own. */
lc_inject lc_inject_link(const lc_inject *inject, double loss);

#endif
