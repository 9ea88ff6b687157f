/* The whole protocol in virtual time: hosts of several processes in one thread, on links of memory,
 * with random groups, plans, networks, pauses and deaths. A scenario is a row of numbers, drawn
 * from a seed, and running it depends on nothing else; so a failure is replayed by its numbers, and
 * made smaller by making them smaller.
 *
 * sim_scenario.c draws scenarios, sim_plan.c makes operations of one, sim_run.c (with sim_setup.c,
 * sim_calls.c and sim_messages.c), sim_trouble.c and sim_forge.c run them, sim_reference.c says
 * what they must give, sim_check.c and sim_inside.c what else must be true, test_sim.c runs many.
 */
#ifndef LC_SIM_H
#define LC_SIM_H

#include "lossycoll.h"

enum {
    SIM_RANKS = 6,
    SIM_GROUPS = 3,
    SIM_OPS = 6,
    SIM_SEGMENTS = 4,
    SIM_PACKETS = 200,
    SIM_MESSAGES = 40
};

/* ---- scenarios ---- */

/* X(name, what it is): shares are in thousandths, times in microseconds. */
#define SIM_FIELDS(X)                                                                              \
    X(seed, "of everything that the other fields leave open")                                      \
    X(ranks, "processes, 2 to SIM_RANKS")                                                          \
    X(groups, "1 to SIM_GROUPS; all processes are in the first")                                   \
    X(ops, "operations, 1 to SIM_OPS")                                                             \
    X(deep, "operations that a rank has in flight at once")                                        \
    X(segments, "of an operation, at most")                                                        \
    X(packets, "of a segment, at most")                                                            \
    X(payload, "bytes of a packet, a multiple of 8")                                               \
    X(sums, "1: segments may be reduced; 0: they are copied")                                      \
    X(dtypes, "0: float32; 1: all types; 2: float32 that travels in 16 bits as well")              \
    X(in_place, "1: may be")                                                                       \
    X(weights, "1: may be")                                                                        \
    X(reliable, "share of the operations")                                                         \
    X(repair, "rounds, at most")                                                                   \
    X(fec, "1: may be; 2: may be left to the loss")                                                \
    X(feedback, "1: may be")                                                                       \
    X(selective, "1: may be")                                                                      \
    X(eager, "bytes")                                                                              \
    X(capacity, "packets of a receive buffer")                                                     \
    X(same_host, "1: ranks take each other for neighbours")                                        \
    X(delay, "one way")                                                                            \
    X(jitter, "up to so much more")                                                                \
    X(late, "share of packets that take late_by more")                                             \
    X(late_by, "")                                                                                 \
    X(loss, "share")                                                                               \
    X(burst, "mean length of a run of losses")                                                     \
    X(twice, "share of packets that come twice")                                                   \
    X(full, "share of sends that find the link full")                                              \
    X(mbit, "rate of a path; 0: no bound")                                                         \
    X(queue, "longest wait at the bottleneck; 0: no bound")                                        \
    X(inject_loss, "share")                                                                        \
    X(inject_burst, "")                                                                            \
    X(inject_dup, "share")                                                                         \
    X(inject_reorder, "share")                                                                     \
    X(skew, "between a rank's operations, at most")                                                \
    X(stall, "how long one rank stands still in the middle")                                       \
    X(dead, "ranks that die")                                                                      \
    X(deadline, "deadline_max")                                                                    \
    X(drain, "how long the network is watched after the last operation")                           \
    X(levels, "1: operations may have several")                                                    \
    X(lingers, "1: ranks that only send don't wait for their peers")                               \
    X(links, "of each process, 1 or 2: some pairs use the second, which is quick and loses "       \
             "nothing")                                                                            \
    X(odd, "1: a rank takes an operation for another")                                             \
    X(aborts, "1: a rank ends a group in the middle")                                              \
    X(notify, "share of the operations that are taken by lc_completions_next")                     \
    X(waits, "share of the others whose callers do the engine's work")                             \
    X(reads, "how late links read what they have taken over; 0: at once")                          \
    X(messages, "sends, and receives for them, up to SIM_MESSAGES")                                \
    X(message_bytes, "of a message, at most")                                                      \
    X(any, "1: some receives are from any rank")                                                   \
    X(forged, "packets of whose passing a hostile process makes use, share")                       \
    X(lossy, "share of the sends, and of the receives, that let packets of a message be missing")  \
    X(sealed, "1: what is sent is sealed, 2: payloads stay in clear")                              \
    X(rekeys, "share of the submits after which a process asks for new keys")                      \
    X(ordered, "share of the operations that add up in the order of ranks")

typedef struct {
#define SIM_FIELD(name, what) uint64_t name;
    SIM_FIELDS(SIM_FIELD)
#undef SIM_FIELD
} sim_scenario;

enum { SIM_N_FIELDS = sizeof(sim_scenario) / sizeof(uint64_t) };

sim_scenario sim_draw(uint64_t seed);
/* "name=value ..." of all fields. */
void sim_print(const sim_scenario *s);
/* Sets a field from "name=value". Returns whether there is one of that name. */
int sim_set(sim_scenario *s, const char *text);
/* Puts fields that make no sense into their ranges. */
void sim_tidy(sim_scenario *s);
/* Nothing can be lost in it. */
int sim_is_clean(const sim_scenario *s);
/* The same but for what the processes themselves do wrong. */
int sim_loses_nothing(const sim_scenario *s);
int sim_has_trouble(const sim_scenario *s);
/* A hostile process can say what it wants. */
int sim_is_open(const sim_scenario *s);

/* ---- chance ---- */

static inline uint64_t sim_mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline uint64_t sim_next(uint64_t *state) {
    return sim_mix((*state)++);
}

/* 0 to limit - 1; 0 for 0. */
static inline uint64_t sim_below(uint64_t *state, uint64_t limit) {
    return limit ? (sim_next(state) >> 16) % limit : 0;
}

static inline int sim_happens(uint64_t *state, uint64_t thousandths) {
    return sim_below(state, 1000) < thousandths;
}

/* ---- operations ---- */

/* Levels of an operation that has several. On the way up, packets are larger at first; once a sum
 * is on the upper level it stays there. On the way down they are of one size, and any hop may be on
 * either level. Where levels meet at a rank, one slot feeds another. */
enum { SIM_LEVEL = 0, SIM_LEVEL_UP = 1, SIM_LEVEL_DOWN = 2 };

/* What becomes of one range of elements: contributions go up a tree to its root, which reduces
 * them; the result goes down another. A root alone in the first has something of its own to send.
 * sim_slot says which slots take part. */
typedef struct {
    uint64_t offset, length;
    uint32_t n_packets;
    int reduced;
    uint16_t n_up, n_down;         /* members of the trees, the root among them */
    uint16_t up[SIM_RANKS];        /* the root first, everyone after his parent */
    uint16_t down[SIM_RANKS];      /* the same */
    int up_parent[SIM_RANKS];      /* by rank; -1: none */
    int down_parent[SIM_RANKS];    /* the same */
    uint8_t up_level[SIM_RANKS];   /* of the hop to its parent */
    uint8_t down_level[SIM_RANKS]; /* of the hop from its parent */
    uint8_t own[SIM_RANKS];        /* it contributes */
    uint8_t finish, missing;
} sim_segment;

typedef struct {
    uint32_t n_segments;
    uint16_t ranks; /* of its group */
    sim_segment segments[SIM_SEGMENTS];
    uint64_t elements;
    uint32_t per_packet; /* but on SIM_LEVEL_UP, where packets are `times` as large */
    uint32_t times;
    lc_level levels[LC_LEVELS];
    uint16_t code;
    uint8_t dtype, encoding, reliable, repair, most, feedback, selective, in_place, weighted;
    uint8_t ordered, rough; /* rough: sums depend on their order */
    double scale, divisor;
    double weights[SIM_RANKS][SIM_RANKS]; /* receiver, sender */
    uint64_t seed;
    /* the table of each rank */
    lc_slot_desc slots[SIM_RANKS][4 * SIM_SEGMENTS];
    lc_edge edges[SIM_RANKS][4 * SIM_SEGMENTS * (SIM_RANKS + 1)];
    uint32_t n_slots[SIM_RANKS], n_edges[SIM_RANKS];
    uint64_t scratch[SIM_RANKS];
    uint8_t needed[SIM_RANKS][SIM_SEGMENTS * SIM_PACKETS];
    uint32_t n_needed[SIM_RANKS];
} sim_op;

void sim_make_op(sim_op *op, const sim_scenario *s, uint16_t ranks, uint64_t seed);
/* Number of the slot that takes part in a segment's tree (0 up, 1 down) on a level. */
static inline uint16_t sim_slot(uint32_t segment, int tree, int level) {
    return (uint16_t)(2 * segment + (uint32_t)tree + (level ? 2 * SIM_SEGMENTS : 0));
}
/* Packets of a segment on a level. */
static inline uint32_t sim_packets(const sim_op *op, const sim_segment *g, int level) {
    return level == SIM_LEVEL_UP ? (g->n_packets + op->times - 1) / op->times : g->n_packets;
}
/* Whether single packets can be needed of what comes down to a rank. */
static inline int sim_may_need(const sim_segment *g, uint16_t rank) {
    return g->down_parent[rank] >= 0 && g->down_level[rank] == SIM_LEVEL;
}
uint32_t sim_element_bytes(int dtype);
/* What rank contributes as element i: small integers, whose sums are exact in every type, unless
 * they are to be rough. */
double sim_input(const sim_op *op, uint16_t rank, uint64_t i);
/* What stands in the output before, unless it is the input as well. */
double sim_before(const sim_op *op, uint64_t i);
void sim_store(int dtype, void *at, uint64_t i, double value);
/* What is left of a float32 that has travelled. */
double sim_travelled(const sim_op *op, double value);

/* ---- what became of it ---- */

/* One rank's part in one operation. */
typedef struct {
    int64_t ticket;
    int submitted, notified, shown, finished, code;
    lc_report report;
    uint64_t submitted_ns, finished_ns;
    uint8_t *memory; /* guard, input, guard, output, guard */
    uint8_t *in, *out, *result, *shown_result;
    size_t bytes; /* of each buffer */
    /* what came: by segment, tree (0 up, 1 down), sender and packet; and why the stream settled */
    uint8_t arrived[SIM_SEGMENTS][2][SIM_RANKS][SIM_PACKETS];
    uint8_t cause[SIM_SEGMENTS][2][SIM_RANKS];
    uint8_t given_up[SIM_SEGMENTS][2][SIM_RANKS][SIM_PACKETS]; /* by receiver: what it says */
} sim_part;

/* What an operation must have given at a rank that ended it, from what arrived everywhere. Returns
 * NULL, or what is wrong. */
const char *sim_compare(const sim_op *op, const sim_part *parts, uint16_t rank);

typedef struct {
    char failure[400]; /* "": none */
    uint64_t packets, lost, overflow, missing, recovered, resent, virtual_ns, turns;
    uint64_t second; /* of the packets, by second links */
    uint64_t ended, lingered, notified;
    uint64_t shown;          /* results that were there before their operation's end */
    uint64_t sent, received; /* messages */
    uint64_t lacking;        /* packets that messages lack */
    uint64_t kept;           /* packets that waited for those of lower ranks */
    uint64_t thrown;         /* forged packets */
    uint64_t refused;        /* those that a seal kept out, replayed ones among them, */
    uint64_t replayed;       /* of which there were so many */
    uint64_t failed;         /* times that a process had an error of a group */
} sim_outcome;

void sim_run(const sim_scenario *s, sim_outcome *outcome);

#endif
