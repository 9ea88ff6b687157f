/* One operation as the engine sees it: slots, the streams into them and out of them.
 *
 * Everything of an operation lies in one block of memory that is taken when it is submitted;
 * while packets move, nothing is allocated. docs/streams.md has the states and their edges. */
#ifndef LC_OP_H
#define LC_OP_H

#include "codec.h"
#include "lossycoll.h"
#include "parity.h"
#include "pool.h"
#include "rank_order.h"

typedef struct lc_op lc_op;
typedef struct lc_op_slot lc_op_slot;
struct lc_letter;

enum lc_in_state {
    LC_IN_OPEN = 0, /* packets of the round are under way */
    LC_IN_CLOSING,  /* the round has been sent, the reorder allowance runs */
    LC_IN_SETTLED   /* every packet has arrived or has been given up */
};

enum {
    LC_LINGER_BYTES = 1 << 16, /* the most that is copied of an operation */
    LC_LARGE_BYTES = 1 << 22   /* results from here on are copied past the caches */
};

/* A stream that arrives: one slot's packets from one peer. */
typedef struct {
    lc_op_slot *slot;
    uint64_t *arrived;   /* a bit per packet */
    uint64_t *lost;      /* a bit per packet that injection drops in this round, or NULL; parity
                            packets follow the others */
    uint64_t *needed;    /* a bit per packet that must not be given up, or NULL: none */
    lc_decoder *decoder; /* NULL: no parity */
    uint64_t started_ns; /* first packet; 0: none yet */
    uint64_t last_ns;    /* latest packet */
    uint64_t gap_ns;     /* longest silence between two packets */
    uint64_t excused_ns; /* the peer said that it waits itself: the deadline starts anew */
    uint64_t fin_ns;     /* when the end of the round was told */
    uint64_t close_ns;   /* when CLOSING ends */
    uint64_t nack_ns;    /* when the round is asked for again; 0: none is asked for */
    uint64_t ask_ns;     /* when the peer is asked where the stream is */
    uint64_t settled_ns; /* 0: not yet */
    uint32_t n_arrived;
    uint32_t n_told;    /* packets that the peer says it has sent in this round */
    uint32_t tell_next; /* what is missing from here on is still to be told; 0: all has been */
    uint16_t peer;
    uint8_t round;
    uint8_t state;
    uint8_t cause;     /* why it settled */
    uint8_t came;      /* some packet of the stream has come since the round began */
    uint8_t reporting; /* settled, but the sender may not know yet what was given up */
    uint8_t rounds;    /* of resending, where the level is not reliable: the level's, so far */
    uint8_t told; /* the code word is known: a packet of the first round, or FIN, has said it */
    uint16_t word;
} lc_in;

enum lc_out_state {
    LC_OUT_OPEN = 0, /* packets of the round are still to be sent */
    LC_OUT_SENT,     /* all sent; the peer is told until it answers */
    LC_OUT_DONE      /* the peer has settled the stream */
};

/* A stream that is sent: one slot's packets to one peer. */
typedef struct lc_out {
    lc_op_slot *slot;
    struct lc_out *next, *prev; /* the peer's list of streams with something to send */
    uint64_t *again;            /* a bit per packet to be resent in this round; or given up */
    uint64_t *told;             /* a bit per packet of which NACKs of this round have spoken */
    uint64_t sent_ns;           /* when the round was */
    uint64_t fin_ns;            /* when FIN is told, or repeated */
    uint32_t fin_tries;
    uint32_t cursor; /* round 0: next in the slot's order of readiness; later: where to look on */
    uint32_t sent;   /* packets of this round */
    uint32_t due;    /* windows whose parity has been sent, */
    uint32_t parity; /* and parity packets of the next one */
    uint32_t again_left; /* bits in again; 0 once it is given up. Never more than there are: who
                            looks for the next bit looks until it is found */
    uint32_t n_told;     /* bits in told */
    uint16_t peer;
    uint16_t number; /* of the slot at the peer */
    uint8_t round;
    uint8_t state;
    uint8_t listed;
    uint8_t given_up;    /* the peer has: again says what */
    uint8_t fin_put_off; /* FIN is due, and has been put off */
    uint8_t suspended;   /* nothing comes from the peer, and nobody waits for it meanwhile */
    uint16_t code;       /* of the parity, from the first packet on; 0: none */
    uint8_t rounds;      /* of resending, as of what arrives */
} lc_out;

struct lc_op_slot {
    lc_op *op;
    lc_slot_desc desc;
    const lc_level *level;    /* among the call's */
    lc_op_slot *feeder;       /* the slot whose result is the own contribution, or NULL */
    lc_op_slot *first_fed;    /* of those that this one feeds, */
    lc_op_slot *next_fed;     /* and the next one that the same slot feeds */
    uint64_t *fed;            /* a bit per packet that the feeder has given something to; or NULL */
    const lc_codec *in_codec; /* how what comes is encoded, */
    const lc_codec *out_codec; /* and what is sent */
    uint32_t in_bytes;         /* payload of a full packet that comes, encoded, */
    uint32_t packet_bytes;     /* and of one that is sent */
    uint32_t n_packets;
    uint32_t n_ready;    /* packets that may be sent on */
    uint32_t n_void;     /* packets that nobody contributed to */
    uint32_t n_encoded;  /* of a slot that has all at once: the packets before it are */
    int at_once;         /* it waits for nothing: its packets are the own input */
    uint16_t *pending;   /* per packet: sources that have not settled */
    uint16_t *count;     /* per packet: weight of what has come; with own once it is ready. At most
                            the group's size, so it can't wrap */
    uint32_t *ready;     /* packets in the order in which they became ready; NULL: 0, 1, 2, ... */
    const uint8_t *own;  /* own contribution, with a feeder only where fed says so; NULL: none */
    uint8_t *value;      /* the result, in the wire type; for LC_TARGET_NONE the own contribution */
    uint8_t *acc;        /* the running sum; value itself where the types allow it */
    const uint8_t *sent; /* where the elements lie that are sent: in value, or still in the input */
    uint8_t *encoded;    /* packets as they travel (payload.h); NULL: as those elements lie there */
    uint64_t contents;   /* of several receivers: numbers its packets for links; 0: of one */
    lc_encoder *encoder; /* parity of what is sent; NULL: none */
    lc_rank_order *rank_order; /* contributions are added in the order of ranks, in which ins
                                  stand then; NULL: as they come */
    lc_in *ins;
    lc_out *outs;
    uint16_t *in_of_peer; /* rank -> index in ins; NULL for a single source */
};

/* One peer's part in an operation. */
typedef struct {
    uint8_t source;   /* some slot takes from it */
    uint8_t dest;     /* some slot gives to it */
    uint8_t at_once;  /* one gives it what is there from the start */
    uint8_t ready;    /* it has posted the operation */
    uint8_t agreed;   /* it is known to mean the same by it */
    uint8_t patient;  /* it says that it can wait to hear that its streams are done */
    uint32_t eager;   /* packets sent to it while it was not ready */
    uint64_t want_ns; /* when it is asked again whether it has */
    uint64_t want_wait_ns;
    uint64_t failed_ns; /* when it first said that it has failed of another rank's call; 0: no */
} lc_op_peer;

struct lc_op {
    lc_group *group;
    struct lc_letter *letter; /* of a message (mailbox.h), freed with it; NULL: a collective */
    lc_call call;             /* slots and edges are not kept */
    lc_codec codec;
    lc_codec gather; /* of finished sums that are sent */
    lc_codec plain;  /* of levels on which nothing is encoded */
    const lc_gf *gf;
    uint32_t number;
    uint16_t rank;     /* of this engine in its group */
    uint64_t rounding; /* of what this rank draws to round elements */
    uint64_t order;    /* among the operations of all groups: when it was started */
    uint32_t element_bytes;
    uint32_t acc_bytes;
    int may_lose; /* some level is not reliable: on others, senders may lack what was lost there */
    int in_place; /* what it reads and what it writes overlap */
    int is_large; /* the result is more than caches hold until it is used */
    uint32_t n_slots;
    uint32_t n_numbers;       /* entries of slot_of_number */
    uint32_t slots_unsettled; /* slots with sources that have unsettled packets */
    uint32_t outs_open;       /* streams that keep the operation from completing */
    uint32_t reporting;       /* streams of whose end the sender has to know */
    uint32_t runs;            /* of its packets, in a batch or with a link that may read them */
    lc_op_slot *slots;
    uint16_t *slot_of_number; /* 0xFFFF: none */
    lc_op_peer *peers;        /* one per rank of the group */
    double *weights;          /* by rank, or NULL */
    uint64_t submitted_ns, started_ns;
    lc_report report;
    lc_failure failure;
    lc_op *next; /* in the inbox, in the queue, or among the completions */
    lc_op *next_touched;
    int touched;          /* in the host's list of those that are perhaps complete */
    lc_op *older, *newer; /* all operations that are not released; under the host's lock */
    uint8_t *copy;        /* room for what it sends, if it may linger (linger.h) */
    uint32_t copy_bytes;  /* 0: it may not */
    lc_report told;       /* to callers: the report of one that lingers goes on counting */
    uint64_t *block;      /* the memory of all of the above */
    size_t block_bytes;
    /* under the host's lock, as older and newer */
    int finished;       /* the caller has it back */
    int shown;          /* the caller may read the result; the loop sets it */
    int lingers;        /* the loop still has it, whatever the caller does */
    int released;       /* the caller has forgotten it, and the loop frees it */
    int undriven;       /* who waits for it first does the engine's work */
    lc_page_call *page; /* its place on the status page; NULL: none */
    /* of who drives */
    uint8_t quiet; /* its end is told with others': neither FIN nor DONE unless it takes long */
};

/* Checks the call and lays the operation out. rank, size: of this engine in its group. *code says
 * why there is none: LC_E_ARGUMENT or LC_E_MEMORY. Not in the progress thread. */
lc_op *lc_op_build(const lc_call *call, uint16_t rank, uint16_t size, int simd, int inject,
                   lc_pool *pool, pthread_mutex_t *pool_lock, int *code);
void lc_op_free(lc_op *op, lc_pool *pool, pthread_mutex_t *pool_lock);
/* Of contributions, and of finished sums. Returns whether there are such. */
int lc_codecs_make(const lc_call *call, int simd, lc_codec *codec, lc_codec *gather);

/* The stream of a slot number from a peer, or NULL if the plan has none. */
lc_in *lc_op_in(lc_op *op, uint16_t number, uint16_t peer);
/* The stream to a slot number at a peer, or NULL. */
lc_out *lc_op_out(lc_op *op, uint16_t number, uint16_t peer);

/* Whether a slot's result is a partial sum, to be added to others. */
static inline int lc_is_partial(const lc_op_slot *s) {
    while (s->desc.combine == LC_COPY && s->feeder)
        s = s->feeder;
    return s->desc.combine == LC_ADD && s->desc.finish == LC_FINISH_NONE;
}

static inline uint32_t lc_words(uint32_t bits) {
    return (bits + 63) / 64;
}
static inline int lc_bit(const uint64_t *bits, uint32_t i) {
    return (bits[i / 64] >> (i % 64)) & 1;
}
static inline void lc_bit_set(uint64_t *bits, uint32_t i) {
    bits[i / 64] |= 1ull << (i % 64);
}
static inline void lc_bit_clear(uint64_t *bits, uint32_t i) {
    bits[i / 64] &= ~(1ull << (i % 64));
}

/* Room for a slot's copy. */
static inline uint64_t lc_copy_bytes(uint64_t bytes) {
    return (bytes + 63) & ~(uint64_t)63;
}

/* Rounds are 8 bits on the wire. 0 is the first sending alone; a reliable stream that needs more
 * than 255 repairs goes on at 1. */
static inline uint8_t lc_next_round(uint8_t round) {
    return round == 255 ? 1 : (uint8_t)(round + 1);
}

/* Whether the sender of a stream of so many rounds waits for what its receiver misses. */
static inline int lc_resends(const lc_level *level, uint8_t rounds) {
    return level->reliable || rounds || level->selective || level->feedback;
}

/* What the stream's packets of the first round, and FIN, say of its means against loss. */
static inline uint16_t lc_out_word(const lc_out *out) {
    int chosen = out->slot->level->choose & LC_CHOOSE_ROUNDS;
    return lc_word(out->code, chosen ? out->rounds : 0);
}

/* Whether what is missing at the end of the round is given up. */
static inline int lc_is_last_round(const lc_in *in) {
    return !in->slot->level->reliable && in->round >= in->rounds;
}

/* The packet of the feeder that holds packet k: packets of a feeder are never cut by those that
 * they feed. */
static inline uint32_t lc_feeding_packet(const lc_op_slot *slot, uint32_t k) {
    uint64_t at = slot->desc.own_offset + (uint64_t)k * slot->level->elements_per_packet;
    return (uint32_t)(at / slot->feeder->level->elements_per_packet);
}

/* Whether a packet that must not be given up has not arrived. */
static inline int lc_in_lacks(const lc_in *in) {
    for (uint32_t i = 0; in->needed && i < lc_words(in->slot->n_packets); i++)
        if (in->needed[i] & ~in->arrived[i])
            return 1;
    return 0;
}

/* Elements of packet k. */
static inline uint32_t lc_slot_elements(const lc_op_slot *slot, uint32_t k) {
    uint32_t most = slot->level->elements_per_packet;
    uint64_t left = slot->desc.length - (uint64_t)k * most;
    return left < most ? (uint32_t)left : most;
}

#endif
