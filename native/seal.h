/* Sealing: the last thing before a link, and opening the first after it. docs/sealing.md has the
 * keys and the bytes. */
#ifndef LC_SEAL_H
#define LC_SEAL_H

#include <stdatomic.h>

#include "crypto.h"
#include "replay.h"
#include "wire.h"

enum {
    LC_EPOCH_PACKETS = 1 << 22,       /* a key seals no more */
    LC_EPOCHS_BACK = 3,               /* packets of so many epochs before the newest are taken */
    LC_OPEN_KEYS = LC_EPOCHS_BACK + 3 /* of those, of the newest, of the one that comes after it,
                                         and of one that a packet claims */
};

/* A key that is made for a claim costs several times what the tag's check does: after one that was
 * false no other is made for so long. The epoch that comes next has its key already. */
static const uint64_t LC_CLAIM_NS = 1000000;

/* How a host seals. */
typedef struct {
    uint8_t cipher;
    uint8_t clear;      /* payloads stay in clear, under the tag */
    uint16_t filter;    /* in every packet, to know strangers' by */
    uint64_t rekey_ns;  /* age of a key at most; 0: any */
    atomic_uint rekeys; /* times that somebody has asked for new keys; any thread's */
} lc_sealing;

/* Of one epoch and one direction. */
typedef struct {
    lc_aead *aead;
    uint64_t epoch;
    uint8_t iv[LC_IV_BYTES];
    uint8_t known; /* the key is of this epoch */
} lc_epoch_key;

/* A path's. */
typedef struct {
    lc_sealing *how;
    uint8_t secrets[2 * LC_SECRET_BYTES]; /* of what goes out, and of what comes in */
    lc_epoch_key out;
    uint64_t out_number; /* of the next packet */
    uint64_t out_first;  /* and of the first of this epoch */
    uint64_t out_since_ns;
    unsigned out_rekeys; /* lc_sealing.rekeys when this epoch began */
    lc_epoch_key in[LC_OPEN_KEYS];
    uint64_t in_epoch;       /* the highest of a packet that was opened */
    uint64_t claim_again_ns; /* no key is made for a claimed epoch before */
    lc_replay replay;
} lc_seal;

/* secrets: as in lc_seal. NULL: there is no memory, or no libcrypto. */
lc_seal *lc_seal_open(lc_sealing *how, const uint8_t *secrets);
void lc_seal_close(lc_seal *seal);

/* Writes a datagram of two pieces, sealed. The first piece begins with its first packet's header,
 * of which session and checksum give way to the number. Returns the bytes written, LC_TAG_BYTES
 * more than were given. If the library fails they are zeros, which is loss. */
uint32_t lc_seal_put(lc_seal *seal, const struct iovec pieces[2], uint64_t now, uint8_t *to);

/* Opens a datagram of n bytes that lc_wire_outer found good, and writes what was sealed: the header
 * as it was, n - LC_TAG_BYTES bytes in all. LC_GOOD, LC_FORGED or LC_REPLAYED; nothing has changed
 * unless it is good. */
enum lc_verdict lc_seal_take(lc_seal *seal, const uint8_t *from, uint32_t n, uint64_t session,
                             uint64_t now, uint8_t *to);

#endif
