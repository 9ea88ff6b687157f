/* Packets as a hostile or broken process would make them: right in session, address and checksum,
 * wrong in what they say. Made of copies of real ones, whose fields are changed to values near what
 * they were or to extremes, or from nothing, of numbers that engines are likely to use just now.
 *
 * Whoever throws them says by a rule what they may name, and so what must stay untouched. */
#ifndef LC_TEST_FORGE_H
#define LC_TEST_FORGE_H

#include <stddef.h>
#include <stdint.h>

#include "wire.h"

enum { FORGE_MOST = 2048, FORGE_KEPT = 256 };

/* One packet, or two: control and what follows it in the same datagram. */
typedef struct {
    uint8_t bytes[FORGE_MOST];
    size_t size;
    uint16_t from, to;
} forged;

/* Makes what a packet says (record NULL), or one of its records, such as the forger may say. */
typedef void forge_rule(void *context, lc_header *header, lc_record *record);

typedef struct {
    uint64_t random;
    uint64_t session;
    uint16_t processes;
    uint16_t payload_bytes;
    uint32_t first_group, groups; /* numbers in use: so many, from the first one on */
    uint32_t tags;                /* of messages: 0 to this, and less */
    forge_rule *rule;
    void *context;
    forged kept[FORGE_KEPT]; /* packets that went by */
} forger;

/* A datagram went by: some of it is kept. */
void forge_see(forger *f, uint16_t from, uint16_t to, const uint8_t *bytes, size_t size);
/* The next packet to throw. Returns whether there is one. */
int forge_next(forger *f, forged *out);

/* The same of datagrams that are sealed, as somebody sees them who has no key: they are thrown once
 * more, and with changes, and to others; and so are plain ones. */
void forge_see_sealed(forger *f, uint16_t from, uint16_t to, const uint8_t *bytes, size_t size);
int forge_sealed(forger *f, forged *out);

uint32_t forge_below(forger *f, uint32_t limit);

/* Whether a record is about a message, or about what carries one. */
static inline int forge_is_message(const lc_record *r) {
    return r->kind == LC_R_MESSAGE || r->kind == LC_R_MAIL || r->slot == LC_SLOT_MESSAGE;
}

#endif
