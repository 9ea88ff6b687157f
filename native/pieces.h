/* Packets that are too large for a path, cut into pieces that fit and put together again. */
#ifndef LC_PIECES_H
#define LC_PIECES_H

#include <sys/uio.h>

#include "wire.h"

/* What has come of packets from one peer. */
typedef struct lc_pieces lc_pieces;

/* Of packets of so many bytes at most, headers included; NULL: no memory. */
lc_pieces *lc_pieces_make(uint32_t packet_bytes);
/* Takes a piece of a sender that is believed. Returns the packet once all of it has come, and its
 * bytes in *n; or NULL. It stays valid until the next piece is taken. */
const uint8_t *lc_pieces_take(lc_pieces *pieces, const lc_header *header, const uint8_t *payload,
                              uint32_t *n);
/* Cuts a packet. iov: its header and its payload, which become so many pairs; the header is
 * preceded by room for one more, and followed by room for n - 1. like: names the path and the
 * packet. Returns the bytes of the largest piece. */
uint32_t lc_pieces_cut(struct iovec *iov, uint16_t n, const lc_header *like);

#endif
