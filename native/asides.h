/* Datagrams aside: they come by the host's socket and are no packets of the engine, which keeps
 * them for its user. Whoever drives puts them here, one thread of the user takes them; neither
 * waits for the other. */
#ifndef LC_ASIDES_H
#define LC_ASIDES_H

#include <stdatomic.h>

#include "link.h"

enum { LC_ASIDES = 256 /* kept; a power of two */ };

typedef struct {
    int wake_fd; /* readable when something has come where nothing was */
    atomic_uint in, out;
    atomic_ullong dropped; /* too long, or there was no room */
    lc_aside kept[LC_ASIDES];
} lc_asides;

/* NULL: there is no memory, or no descriptor. */
lc_asides *lc_asides_open(void);
void lc_asides_close(lc_asides *asides);

/* Whether a datagram of n bytes is one: no packet, sealed or not, begins so. */
int lc_asides_has(const uint8_t *data, uint32_t n);

/* Keeps one that came by a link. */
void lc_asides_put(lc_asides *asides, const lc_link *link, const lc_arrival *arrival,
                   const uint8_t *data, uint32_t n);

/* Takes the oldest one. Returns whether there was one. */
int lc_asides_take(lc_asides *asides, lc_aside *aside);

#endif
