/* Faults as a pure function: no state and no clock, so that an oracle can know them beforehand. */
#include "inject.h"

#include <string.h>

#include "mix.h"

/* One lane per kind of fault, so that whether a packet is lost says nothing of its other faults. */
enum lane { LANE_LOSS = 0, LANE_DUPLICATE = 1, LANE_REORDER = 2 };

/* Uniform in [0, 1). */
static double draw(uint64_t key, enum lane lane, uint32_t packet) {
    return (double)(lc_mix(key ^ ((uint64_t)lane << 32 | packet)) >> 11) * 0x1p-53;
}

/* Whether packet k is lost, when `before` says whether k - 1 was. With burst > 1 the states of a
 * two-state Markov chain follow each other: bad ends with chance 1/burst, and begins with the
 * chance that makes `loss` its share of the time. The first packet starts from that share. */
static int lost(const lc_inject *inject, uint64_t key, uint32_t k, int before) {
    double u = draw(key, LANE_LOSS, k);
    if (inject->loss >= 1)
        return 1;
    if (inject->burst <= 1 || k == 0)
        return u < inject->loss;
    double end = 1 / inject->burst;
    double begin = inject->loss * end / (1 - inject->loss);
    return before ? u >= end : u < begin;
}

uint64_t lc_inject_key(const lc_inject *inject, uint32_t group, uint32_t op, uint16_t slot,
                       uint16_t sender, uint16_t receiver, uint8_t round) {
    const uint64_t parts[] = {group, op, slot, sender, receiver, round};
    /* The seed first, or it could stand in for the group. */
    return lc_key_of(inject->seed, parts, sizeof parts / sizeof parts[0]);
}

uint32_t lc_inject_losses(const lc_inject *inject, uint64_t key, uint32_t n_packets,
                          uint64_t *bits) {
    memset(bits, 0, ((size_t)n_packets + 63) / 64 * sizeof *bits);
    if (!(inject->loss > 0))
        return 0;
    uint32_t total = 0;
    int bad = 0;
    for (uint32_t k = 0; k < n_packets; k++) {
        bad = lost(inject, key, k, bad);
        bits[k / 64] |= (uint64_t)bad << k % 64;
        total += (uint32_t)bad;
    }
    return total;
}

int lc_inject_loses(const lc_inject *inject, uint64_t key, uint32_t k) {
    if (!(inject->loss > 0))
        return 0;
    int bad = 0;
    uint32_t before = k < LC_INJECT_MEMORY ? k : LC_INJECT_MEMORY;
    if (inject->burst <= 1)
        before = 0;
    for (uint32_t i = 0; i <= before; i++)
        bad = lost(inject, key, k - before + i, bad);
    return bad;
}

int lc_inject_duplicates(const lc_inject *inject, uint64_t key, uint32_t packet) {
    return draw(key, LANE_DUPLICATE, packet) < inject->dup;
}

int lc_inject_reorders(const lc_inject *inject, uint64_t key, uint32_t packet) {
    return draw(key, LANE_REORDER, packet) < inject->reorder;
}

int lc_inject_active(const lc_inject *inject) {
    return inject->loss > 0 || inject->dup > 0 || inject->reorder > 0;
}

lc_inject lc_inject_link(const lc_inject *inject, double loss) {
    lc_inject link = *inject;
    link.loss = loss;
    return link;
}

void lc_inject_stream(const lc_inject *inject, uint32_t group, uint32_t op, uint16_t slot,
                      uint16_t sender, uint16_t receiver, uint8_t round, uint32_t n_packets,
                      uint8_t *dropped) {
    uint64_t key = lc_inject_key(inject, group, op, slot, sender, receiver, round);
    int bad = 0;
    for (uint32_t k = 0; k < n_packets; k++) {
        bad = inject->loss > 0 && lost(inject, key, k, bad);
        dropped[k] = (uint8_t)bad;
    }
}
