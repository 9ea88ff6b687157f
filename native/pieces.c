/* Pieces of packets: all of a packet have one size but the last, so that each says where it
 * belongs, and none can leave a hole. */
#include "pieces.h"

#include <stdlib.h>
#include <string.h>

enum {
    TORN = 16, /* packets of which pieces may come in turn; one that lacks some by then is lost */
    MOST = 64, /* pieces of one, as many as a word has bits */
    LATE = 1 << 16 /* numbers by which a piece may have been overtaken */
};

typedef struct {
    uint64_t came; /* a bit per piece */
    uint32_t link_seq, total;
    uint16_t count; /* 0: none came yet */
} torn;

struct lc_pieces {
    uint32_t room; /* bytes for each packet */
    torn torn[TORN];
    uint8_t bytes[];
};

lc_pieces *lc_pieces_make(uint32_t packet_bytes) {
    /* What is never used is never touched. */
    lc_pieces *pieces = malloc(sizeof *pieces + (size_t)TORN * packet_bytes);
    if (!pieces)
        return NULL;
    memset(pieces, 0, sizeof *pieces);
    pieces->room = packet_bytes;
    return pieces;
}

static uint32_t piece_bytes(uint32_t total, uint32_t n) {
    return (total + n - 1) / n;
}

static int is_sound(const lc_pieces *pieces, const lc_header *h) {
    uint32_t total = h->op, offset = h->packet;
    if (h->count < 2 || h->count > MOST || h->slot >= h->count || total > pieces->room ||
        total <= LC_HEADER_BYTES)
        return 0;
    uint32_t bytes = piece_bytes(total, h->count);
    if (offset >= total || offset != h->slot * bytes)
        return 0;
    return h->length == (total - offset < bytes ? total - offset : bytes);
}

const uint8_t *lc_pieces_take(lc_pieces *pieces, const lc_header *header, const uint8_t *payload,
                              uint32_t *n) {
    if (!is_sound(pieces, header))
        return NULL;
    uint32_t at = header->link_seq % TORN;
    torn *t = &pieces->torn[at];
    uint8_t *whole = pieces->bytes + (size_t)at * pieces->room;
    int is_other =
        t->link_seq != header->link_seq || t->count != header->count || t->total != header->op;
    /* Of one that was given up for a later one. What is further back isn't: the numbers have come
     * round since this place was used. */
    if (t->count && is_other && t->link_seq - header->link_seq - 1 < LATE)
        return NULL;
    if (!t->count || is_other)
        *t = (torn){0, header->link_seq, header->op, header->count};
    uint64_t bit = 1ull << header->slot;
    if (t->came & bit)
        return NULL;
    t->came |= bit;
    memcpy(whole + header->packet, payload, header->length);
    *n = t->total;
    return t->came == UINT64_MAX >> (MOST - t->count) ? whole : NULL;
}

uint32_t lc_pieces_cut(struct iovec *iov, uint16_t n, const lc_header *like) {
    uint8_t *header = iov[0].iov_base, *payload = iov[1].iov_base;
    uint32_t total = LC_HEADER_BYTES + (uint32_t)iov[1].iov_len, bytes = piece_bytes(total, n);
    for (uint16_t i = 0; i < n; i++) {
        uint32_t offset = i * bytes;
        lc_header h = *like;
        h.type = LC_PIECE;
        h.op = total;
        h.packet = offset;
        h.slot = i;
        h.count = n;
        h.length = (uint16_t)(total - offset < bytes ? total - offset : bytes);
        uint8_t *to = i ? header + (size_t)i * LC_HEADER_BYTES : header - LC_HEADER_BYTES;
        lc_wire_put(to, &h);
        uint32_t before = i ? 0 : LC_HEADER_BYTES; /* the packet's own header, which lies behind */
        iov[2 * i] = (struct iovec){to, LC_HEADER_BYTES + before};
        iov[2 * i + 1] =
            (struct iovec){payload + (i ? offset - LC_HEADER_BYTES : 0), h.length - before};
    }
    return LC_HEADER_BYTES + bytes;
}
