/* Out-of-band datagrams: they come by the host's socket and are no packets of the engine, which
 * keeps them for its user. Whoever drives puts them here, one thread of the user takes them;
 * neither waits for the other. */
#ifndef LC_OUT_OF_BAND_H
#define LC_OUT_OF_BAND_H

#include <stdatomic.h>

#include "link.h"

enum { LC_OOB_KEPT = 256 /* kept; a power of two */ };

typedef struct {
    int wake_fd; /* readable when something has come where nothing was */
    atomic_uint in, out;
    atomic_ullong dropped; /* too long, or there was no room */
    lc_oob_datagram kept[LC_OOB_KEPT];
} lc_oob_ring;

/* NULL: there is no memory, or no descriptor. */
lc_oob_ring *lc_oob_open(void);
void lc_oob_close(lc_oob_ring *oob);

/* Whether a datagram of n bytes is one: no packet, sealed or not, begins so. */
int lc_oob_has(const uint8_t *data, uint32_t n);

/* Keeps one that came by a link. */
void lc_oob_put(lc_oob_ring *oob, const lc_link *link, const lc_arrival *arrival,
                const uint8_t *data, uint32_t n);

/* Takes the oldest one. Returns whether there was one. */
int lc_oob_take(lc_oob_ring *oob, lc_oob_datagram *datagram);

#endif
