/* Plans as tables, and seeded faults. */
#ifndef LOSSYCOLL_PLAN_H
#define LOSSYCOLL_PLAN_H

#include "lossycoll_types.h"

/* cdef begin */

/* ---- plan tables (lossycoll/plan/model.py has the meaning of every field) ---- */
enum lc_combine { LC_COPY = 0, LC_ADD = 1 };
enum lc_finish {
    LC_FINISH_NONE = 0,
    LC_FINISH_MEAN = 1,
    LC_FINISH_STRATIFIED = 2,
    LC_FINISH_WEIGHTED = 3
};
enum lc_own { LC_OWN_NONE = 0, LC_OWN_INPUT = 1, LC_OWN_SLOT = 2 };
enum lc_target { LC_TARGET_NONE = 0, LC_TARGET_OUT = 1, LC_TARGET_SCRATCH = 2 };
enum lc_missing { LC_MISSING_KEEP = 0, LC_MISSING_OWN = 1, LC_MISSING_ZERO = 2 };

typedef struct {
    uint64_t offset;     /* elements, in the buffer that target names */
    uint64_t length;     /* elements */
    uint64_t own_offset; /* elements, in the input buffer, or in the range of the slot that feeds */
    uint32_t first_edge; /* sources first, then dests, in the edge table */
    uint32_t n_sources;
    uint32_t n_dests;
    uint16_t number; /* the wire's slot field at this rank */
    uint8_t combine;
    uint8_t own; /* where the rank's own contribution comes from */
    uint8_t finish;
    uint8_t target;
    uint8_t missing;
    uint8_t level; /* which of lc_call.levels */
    uint16_t feed; /* LC_OWN_SLOT: number of the slot whose result it is; that one stands before */
    uint16_t full_weight; /* of a stratified sum of which nothing is missing; 0: sources + 1 */
} lc_slot_desc;

typedef struct {
    uint16_t peer; /* rank in the group */
    uint16_t slot; /* slot number at that peer (unused for sources) */
} lc_edge;

/* How the streams of some slots travel. Both ends of a stream are of one level. */
enum { LC_LEVELS = 4 };

enum lc_choose { LC_CHOOSE_PARITY = 1, LC_CHOOSE_ROUNDS = 2 };

typedef struct {
    uint32_t elements_per_packet;
    uint8_t reliable;  /* resend until everything has arrived */
    uint8_t repair;    /* rounds of resending when not reliable */
    uint8_t selective; /* receivers may need single packets, which are resent until they come */
    uint8_t feedback;  /* receivers tell senders which packets they have given up */
    uint8_t choose;    /* lc_choose: what is chosen for each stream by what its path loses */
    uint8_t most;      /* parity, if it is chosen: at most so many packets for 64 */
    uint8_t plain;     /* elements travel as they are, however the call's are encoded */
    uint16_t code;     /* of parity, if it isn't (sets.h); 0: none */
    float max_missing; /* share that may be missing, where something is chosen; below 0: a tenth of
                          what the path loses */
} lc_level;

/* ---- seeded faults ---- */
typedef struct {
    double loss;    /* fraction of data packets, 0..1 */
    double burst;   /* mean burst length in packets; <= 1 means single losses */
    double dup;     /* fraction delivered twice */
    double reorder; /* fraction delivered after their successor */
    uint64_t seed;
} lc_inject;

/* cdef end */

#endif
