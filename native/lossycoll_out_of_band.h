/* Out-of-band datagrams: by a host's socket, and no packets of the engine. */
#ifndef LOSSYCOLL_OUT_OF_BAND_H
#define LOSSYCOLL_OUT_OF_BAND_H

#include "lossycoll_host.h"

/* cdef begin */

enum { LC_OOB_BYTES = 128, LC_OOB_MARK_BYTES = 4 };

typedef struct {
    uint8_t address[16]; /* where it came from; of IPv4 as IPv6 maps it (::ffff:a.b.c.d) */
    uint16_t port;
    uint16_t length;
    uint8_t data[128];
} lc_oob_datagram;

/* Takes out-of-band datagrams from now on: those that come by the host's socket and begin with
 * LC_OOB_MARK. They are no packets, and the engine believes nothing of them. Before
 * lc_host_start. Returns a descriptor, which is the host's and an eventfd: readable when one has
 * come where none waited. LC_E_ARGUMENT also where its first link has none; LC_E_MEMORY. */
int lc_host_oob_open(lc_host *host);
/* Sends an out-of-band datagram, of LC_OOB_BYTES at most and with the mark, by the host's socket,
 * to any address of the socket's family. It may be lost like any other. Any thread may call it.
 * LC_OK, LC_E_ARGUMENT, or LC_E_SYSTEM if the system didn't take it. */
int lc_host_say(lc_host *host, const lc_address *to, const uint8_t *data, uint16_t n);
/* Takes the oldest one that has come. Returns whether there was one. By one thread at a time. */
int lc_host_heard(lc_host *host, lc_oob_datagram *datagram);
/* How many were too long, or found no room. Any thread may call it. */
uint64_t lc_host_oob_dropped(lc_host *host);

/* cdef end */

/* What an out-of-band datagram begins with: no packet does (wire.h). */
#define LC_OOB_MARK {'O', 'O', 'B', 'D'}

#endif
