/* Parity of streams: what a sender makes of its packets, and what a receiver restores from it.
 *
 * sets.h says which packets are protected together, rs.h how; docs/parity.md has both. An encoder
 * belongs to a slot, a decoder to a stream that arrives. Their memory is laid out with the
 * operation (op.c), for the most parity that its level allows. */
#ifndef LC_PARITY_H
#define LC_PARITY_H

#include "rs.h"

enum { LC_PARITY_SHARE = 64 }; /* lc_level.most is in parts of it */

/* ---- what a level allows ---- */

/* Parity packets that there is room for beside n packets; 0: the level has none. */
uint32_t lc_parity_room(const lc_level *level, uint32_t n);
/* Whether a stream of n packets may have this code. */
int lc_parity_allows(const lc_level *level, uint32_t code, uint32_t n);

/* ---- what is sent ---- */

/* All streams of the slot send of the same rows, each as many as it needs. */
typedef struct {
    uint8_t *rows;    /* packets: by set, then by row */
    uint16_t *counts; /* the same */
    uint64_t *begun;  /* a bit per window: its rows hold something */
    uint64_t *sends;  /* a bit per window: some packet of it is ready */
    uint32_t *open;   /* by window: packets that are neither ready nor void. NULL: the slot has all
                         at once, in order */
    uint32_t *due;    /* windows of which none is open, in the order in which that came about, */
    uint32_t *due_at; /* and how many packets were ready then */
    uint32_t n_due;
    uint32_t taken; /* packets in the rows */
    uint32_t window, windows;
    lc_shape shape;
    uint16_t code;
    uint8_t known; /* code and shape are: fixed when a packet is first sent */
} lc_encoder;

uint32_t lc_parity_windows(uint32_t n);
/* For n packets; the memory has been set. */
void lc_encoder_prepare(lc_encoder *e, uint32_t n);
/* Packet k has become ready, or void. n_ready: that are, with it. */
void lc_encoder_settled(lc_encoder *e, uint32_t k, uint32_t n_ready, int is_void);
void lc_encoder_begin(lc_encoder *e, uint16_t code, uint32_t n);
/* Packet k is sent for the first time. */
void lc_encoder_add(lc_encoder *e, const lc_gf *gf, uint32_t k, const void *payload, uint32_t bytes,
                    uint32_t packet_bytes, uint16_t count);
/* Windows whose parity goes, if all of the stream is sent. */
uint32_t lc_encoder_windows(const lc_encoder *e);
/* Whether the i-th of them may go to a peer that has been sent the first `sent` packets. */
int lc_encoder_is_due(const lc_encoder *e, uint32_t i, uint32_t sent);
/* A parity packet: n + number on the wire, rows[at * packet bytes] here; its set's longest packet.
 */
typedef struct {
    size_t at;
    uint32_t number, longest;
} lc_encoded;

/* The next one of a stream of this code, which has sent the parity of `windows` of them and
 * `packets` of the next one's. All codes of a slot's streams have one k, and no more rows than the
 * slot's. */
lc_encoded lc_encoder_row(const lc_encoder *e, uint16_t code, uint32_t *windows, uint32_t *packets);

/* ---- what arrives ---- */

typedef struct {
    uint8_t *rows;    /* packets: by set, then by row. Sums of what has come of a set; or what keeps
                         says */
    uint16_t *counts; /* the same */
    uint16_t *left;   /* by set: packets that are not there; 0 also if it is not to be restored */
    uint8_t *n_rows;  /* by set: parity packets that have come */
    uint64_t *came;   /* a bit per parity packet */
    uint64_t *begun;  /* a bit per window: its rows hold something */
    lc_shape shape;
    uint16_t code;
    uint8_t known; /* code and shape are: a packet or FIN has said it */
    uint8_t keeps; /* rows are parity packets as they came: data are read where they lie, when
                      something lacks */
} lc_decoder;

enum { LC_RESTORED = 4, LC_PAYLOAD_MOST = 65536 /* no link has a larger one */ };

/* One set while it is restored. */
typedef struct {
    uint8_t packets[LC_RESTORED * LC_PAYLOAD_MOST];
    uint32_t e; /* packets that lack */
    uint8_t which[LC_ROWS_MOST], columns[LC_ROWS_MOST];
    uint16_t counts[LC_ROWS_MOST];
    uint8_t inverse[LC_ROWS_MOST * LC_ROWS_MOST];
} lc_restorer;

/* unprotected: packets have come before the code was known; nothing can be restored. */
void lc_decoder_begin(lc_decoder *d, uint16_t code, uint32_t n, int unprotected);
/* A packet has come, by its own way. Returns its set. */
uint32_t lc_decoder_add(lc_decoder *d, const lc_gf *gf, uint32_t k, const void *payload,
                        uint32_t bytes, uint32_t packet_bytes, uint16_t count);
/* Parity packet n + j has come, for the first time. Returns its set. */
uint32_t lc_decoder_add_row(lc_decoder *d, const lc_gf *gf, uint32_t j, const void *payload,
                            uint32_t bytes, uint32_t packet_bytes, uint16_t count);
/* Whether enough has come of the set to restore the rest. */
static inline int lc_decoder_can(const lc_decoder *d, uint32_t set) {
    return d->left[set] && d->n_rows[set] >= d->left[set];
}
/* Rows of a set, for rs.h. */
lc_rs_rows lc_decoder_rows(const lc_decoder *d, uint32_t set, uint32_t packet_bytes);
/* Finds what lacks of the set, and by which rows it comes back. Returns 0 if these don't match. */
int lc_decoder_find(const lc_decoder *d, uint32_t set, const uint64_t *arrived, lc_restorer *r);
/* Once the rows hold all that has come: the way back, and the counts of what lacks. Returns 0 if
 * there is none. */
int lc_decoder_solve(const lc_decoder *d, uint32_t set, lc_restorer *r);
/* Packets first to first + n - 1 of what lacks, n up to LC_RESTORED, into r->packets. */
void lc_decoder_restore(const lc_decoder *d, const lc_gf *gf, uint32_t set, lc_restorer *r,
                        uint32_t first, uint32_t n, uint32_t packet_bytes);

#endif
