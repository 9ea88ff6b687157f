/* What tests of seals share: what both ends expect and know, and how a datagram is taken. */
#ifndef LC_SEAL_KIT_H
#define LC_SEAL_KIT_H

#include <string.h>

#include "seal.h"

enum { KIT_PAYLOAD = 1408, KIT_SESSION = 77, KIT_FILTER = 0x5EA1 };

static const lc_expect kit_expect = {.session = KIT_SESSION,
                                     .process = 1,
                                     .processes = 3,
                                     .payload_bytes = KIT_PAYLOAD,
                                     .filter = KIT_FILTER};

/* The two ends of a path: what the first seals, the second opens. */
static inline void kit_open(lc_sealing *how, lc_seal *ends[2]) {
    uint8_t secrets[3 * LC_SECRET_BYTES];
    for (size_t i = 0; i < sizeof secrets; i++)
        secrets[i] = (uint8_t)(i * 7 + i / LC_SECRET_BYTES);
    memcpy(secrets + 2 * LC_SECRET_BYTES, secrets, LC_SECRET_BYTES);
    ends[0] = lc_seal_open(how, secrets);
    ends[1] = lc_seal_open(how, secrets + LC_SECRET_BYTES);
}

static inline lc_header kit_header(uint32_t packet, uint32_t bytes) {
    return (lc_header){.session = KIT_SESSION,
                       .op = 5,
                       .packet = packet,
                       .group = 9,
                       .sender = 0,
                       .receiver = 1,
                       .length = (uint16_t)bytes,
                       .count = 1,
                       .type = LC_DATA};
}

/* As the engine opens a datagram. */
static inline enum lc_verdict kit_take(lc_seal *seal, const uint8_t *from, uint32_t n, uint64_t now,
                                       uint8_t *to) {
    uint16_t sender = 0xFFFF;
    enum lc_verdict verdict = lc_wire_outer(from, n, &kit_expect, &sender);
    return verdict == LC_GOOD ? lc_seal_take(seal, from, n, KIT_SESSION, now, to) : verdict;
}

#endif
