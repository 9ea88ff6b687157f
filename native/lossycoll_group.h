/* A group: its calls, messages and reports. */
#ifndef LOSSYCOLL_GROUP_H
#define LOSSYCOLL_GROUP_H

#include "lossycoll_host.h"
#include "lossycoll_plan.h"

/* cdef begin */

/* Some of the host's processes. Its members are numbered by rank. */
typedef struct {
    uint32_t number; /* on the wire: equal for all members, of no other group of theirs; not 0 */
    uint16_t rank;
    uint16_t size;
    const uint16_t *members;  /* processes by rank; NULL: those of the same numbers */
    uint32_t fault_group;     /* keys injected faults and random rounding; equal on all ranks */
    uint64_t definition;      /* what members must agree on besides each call; part of the
                                 signature of every operation */
    uint64_t deadline_min_ns; /* floor of the learnt deadline */
    uint64_t deadline_max_ns; /* how long a stream or a path may be silent */
    uint64_t link_ns;         /* how long a reliable operation waits for a link that delivers
                                 nothing of what its peer sends; 0: as long as for the peer */
    uint64_t reorder_ns;      /* least time a stream waits after its end; 0: one millisecond */
    lc_inject inject;
    const double *inject_loss; /* loss of packets from each rank to this one (size entries), in
                                  place of inject.loss; NULL: alike from all */
    uint8_t met; /* every member is known to have the group by now: packets may go ahead at once */
    lc_completions *completions; /* of calls with notify; NULL: there are none. It outlives the
                                    group */
    uint64_t owner;              /* what lc_completions_next names the group by */
    const char *name;            /* of the status page; NULL: none. Not kept */
} lc_group_config;

enum lc_cause {
    LC_CAUSE_COMPLETE = 0,
    LC_CAUSE_LOSS = 1,
    LC_CAUSE_DEADLINE = 2,
    LC_CAUSE_PEER = 3, /* a peer died: what it still owed was given up */
    LC_CAUSE_FAILED = 4
};

/* Figures of one operation at this rank. A "contribution" is one rank's addend in one packet. */
typedef struct {
    uint32_t op;
    int32_t cause;
    uint64_t packets_sent;
    uint64_t packets_resent;  /* of those sent, in repair rounds */
    uint64_t resent_reliable; /* of those, in streams that are reliable */
    uint64_t parity_sent;     /* of those sent, parity */
    uint64_t parity_received;
    uint64_t packets_received;  /* settled by arrival; parity is not counted */
    uint64_t packets_recovered; /* of those, by parity */
    uint64_t nan_groups; /* groups of few bits that were NaN as a whole when they were encoded */
    uint64_t packets_missing;  /* settled by being given up */
    uint64_t packets_injected; /* dropped by injection */
    uint64_t bytes_sent;       /* headers included */
    uint64_t bytes_received;
    uint64_t contribution_packets; /* finished packets that the next two figures describe */
    uint64_t contributions;        /* their contributions, added up */
    uint32_t contributions_min;
    uint32_t deadline_hits; /* streams ended by the deadline */
    uint64_t own_filled;    /* packets filled by on_missing="own" */
    uint64_t kept;          /* packets left as they were */
    uint64_t zero_filled;   /* packets filled by on_missing="zero" */
    uint64_t alone;         /* stratified packets to which no other rank contributed */
    uint64_t order_kept; /* packets that waited for those of lower ranks (lc_call.deterministic), */
    uint64_t order_bytes; /* and the most memory that they took at a time */
    uint64_t elapsed_ns;
    float max_missing; /* the greatest of its levels; < 0: none has one */
} lc_report;

/* A stream of a finished operation that came here. Times are since it was submitted. */
typedef struct {
    uint64_t first_ns, last_ns; /* when its first and its last packet came; 0: none did */
    uint64_t gap_ns;            /* longest silence between two packets */
    uint64_t settled_ns;        /* 0: it has not, since the operation failed */
    uint32_t packets;
    uint32_t arrived;
    uint16_t slot; /* number here */
    uint16_t peer;
    uint16_t code;  /* of its parity, as far as is known (native/sets.h) */
    uint8_t rounds; /* of resending */
    uint8_t cause;  /* why it settled */
} lc_stream;

typedef struct {
    const lc_slot_desc *slots;
    const lc_edge *edges;
    uint32_t n_slots;
    uint32_t n_edges;
    const void *in;
    void *out; /* may equal in */
    uint64_t in_elements;
    uint64_t out_elements;
    uint64_t scratch_elements;
    lc_level levels[LC_LEVELS]; /* those that slots name are looked at, and the first */
    uint8_t dtype;
    uint8_t encoding;        /* lc_encoding, with its parameters: how packets carry the elements */
    uint8_t gather_encoding; /* of finished sums that are sent, and of all that comes to a copy; 0:
                                encoding is. With another one, neither is LC_ENCODING_SAME */
    uint8_t notify;          /* the ticket comes out of the group's lc_completions, which there must
                                be */
    uint8_t waits;         /* the caller waits for it at once: the first wait does the engine's work
                              itself, as long as packets come, and nobody does before; not with
                              notify */
    uint8_t keeps_sums;    /* sums that are sent encoded stay here as they were, not as others get
                              them */
    uint8_t deterministic; /* contributions are added in the order of ranks, whatever comes first */
    uint8_t lingers;       /* where this rank has its result, and sends little, it is done once
                              that is copied. What fails it later fails the group */
    const uint8_t *needed; /* which this rank needs: a byte for each packet of each copy that comes
                              from a peer on a selective level, in the plan's order; NULL: none. Not
                              read after submit */
    uint64_t n_needed;
    const double *weights; /* by rank: what contributions are multiplied by; NULL: 1. Not read
                              after submit */
    double divisor; /* of LC_FINISH_WEIGHTED; 0: the weights of what went in, added up, and the
                       own contribution is multiplied by this rank's. They are above 0, and no
                       sum is partial */
    double scale;   /* world for SUM, 1 for a mean */
    uint64_t signature;
    uint64_t timeout_ns; /* for peers that never take part */
    lc_gate *gate;       /* NULL: the input is there */
    int64_t ticket;      /* set by submit: what it returns, for callers that an interrupt may keep
                            from seeing that */
    const char *text;    /* of the status page; NULL: none. Not read after submit */
    int64_t seq;         /* of it: number of the caller's call; -1: it has none */
} lc_call;

/* A send or a receive. Messages from one rank to another arrive in the order of their sends. */
typedef struct {
    void *data; /* the elements, or room for them */
    uint64_t elements;
    uint64_t tag;           /* a receive gets messages of its tag alone */
    uint64_t timeout_ns;    /* 0: none */
    int64_t ticket;         /* set by post: what it returns */
    uint32_t type;          /* of the elements: equal at both ends; means nothing here */
    uint16_t element_bytes; /* 1 to 64 */
    int32_t peer;           /* rank in the group; -1: a receive from any */
    uint8_t receive;
    /* Where both ends of a message of more than 64 KiB are lossy, packets may be missing: */
    uint8_t lossy;
    uint8_t repair;  /* rounds of resending: those of the end that wants more */
    uint8_t missing; /* of a receive: LC_MISSING_KEEP or LC_MISSING_ZERO */
} lc_message;

/* Makes a group at this process: no other is asked, and none needs to have it yet. After
 * lc_host_start. NULL on failure (LC_E_ARGUMENT also where its number is taken). */
lc_group *lc_group_open(lc_host *host, const lc_group_config *config, lc_failure *failure);
/* Fails what is pending and frees the group. Nobody else may be calling any more, but for those
 * that wait. */
void lc_group_close(lc_group *group);
/* Hands an operation to the group. Returns a ticket (> 0), or an lc_code < 0 at once. Buffers
 * belong to the engine until the ticket is done. Operation numbers are given in submit order. */
int64_t lc_group_submit(lc_group *group, lc_call *call);
/* What one of several equal calls has of its own; buffers and gate as addresses. */
typedef struct {
    uintptr_t in, out, gate;
    int64_t seq;
    int64_t ticket; /* as lc_call's */
} lc_call_case;
/* As lc_group_submit, of a call that is kept and may be submitted by several threads. */
int64_t lc_group_submit_case(lc_group *group, const lc_call *call, lc_call_case *own);
/* LC_OK when done, LC_PENDING after timeout_ns, or the code the operation failed with. */
int lc_group_wait(lc_group *group, int64_t ticket, uint64_t timeout_ns);
/* As lc_group_wait, but LC_OK as soon as the result is there, whatever becomes of the operation
 * later: all that comes here has settled, and what fills gaps is in place. Streams to peers may
 * still be open: the buffers may be read, and not be written before the ticket is done. An
 * operation with `waits`, a message, and one that has gaps to fill in place, have it when they are
 * done. */
int lc_group_wait_result(lc_group *group, int64_t ticket, uint64_t timeout_ns);
int lc_group_result(lc_group *group, int64_t ticket, lc_report *report, lc_failure *failure);
/* Why the group takes no operation any more; returns its code, LC_OK if it does. */
int lc_group_failure(lc_group *group, lc_failure *failure);
/* Which packets of the stream (slot number here, peer) of an operation that is finished, or has its
 * result, arrived: a byte for each of its n_packets. LC_PENDING: it hasn't. LC_E_ARGUMENT if there
 * is no such stream, or of another length. */
int lc_group_arrived(lc_group *group, int64_t ticket, uint16_t slot, uint16_t peer,
                     uint8_t *arrived, uint32_t n_packets);
/* Which packets of the stream to (slot number there, peer) of a finished operation with feedback
 * the peer has given up: a byte for each of its n_packets. LC_E_ARGUMENT as above. */
int lc_group_given_up(lc_group *group, int64_t ticket, uint16_t slot, uint16_t peer,
                      uint8_t *given_up, uint32_t n_packets);
/* The streams of a finished operation that came here, in the plan's order, as many as there is room
 * for. Returns how many there are. */
int lc_group_streams(lc_group *group, int64_t ticket, lc_stream *streams, uint32_t room);
/* How many operations are done for their callers and not for the peers, who need packets. *oldest:
 * the number of the first of those, where there is one; NULL: not asked for. */
uint32_t lc_group_lingering(lc_group *group, uint32_t *oldest);
/* Forgets a finished ticket, which nobody may be waiting for. One with notify must have been taken
 * from lc_completions before. */
void lc_group_release(lc_group *group, int64_t ticket);
/* As if the ticket, which has no notify yet, had been submitted with it. */
void lc_group_notify(lc_group *group, int64_t ticket);
/* One queue for the finished tickets of any groups of any hosts. NULL: no memory. */
lc_completions *lc_completions_open(void);
/* Nobody may be calling, and all groups that were opened with it are closed. */
void lc_completions_close(lc_completions *completions);
/* The next finished ticket among those with notify, and its group's owner; 0 after timeout_ns;
 * LC_E_CLOSED while it is stopped and empty. Tickets of groups that were closed don't come. */
int64_t lc_completions_next(lc_completions *completions, uint64_t timeout_ns, uint64_t *owner);
/* Wakes who waits in lc_completions_next, or has them wait again. */
void lc_completions_stop(lc_completions *completions, int stopped);
/* Posts a send or a receive. Returns a ticket as lc_group_submit, which is finished when the
 * message is; 0: a small message is on its way, and its memory may change; or a code < 0. */
int64_t lc_group_post(lc_group *group, lc_message *message);
/* The rank that a finished receive was served by, or -1. */
int lc_group_source(lc_group *group, int64_t ticket);
/* How many messages that count as sent may not have reached their receivers yet. */
uint32_t lc_group_unheard(lc_group *group);
/* The peer has left in order: what came from it before can be received, and nothing else. */
void lc_group_peer_left(lc_group *group, int peer);
void lc_group_abort(lc_group *group, int code, int peer);
/* From now on the peer counts as lost altogether, for good: what it owes is given up, in reliable
 * operations too, what is owed to it is dropped, and its packets are not believed. */
void lc_group_peer_dead(lc_group *group, int peer);
void lc_group_last_report(lc_group *group, lc_report *report);

/* cdef end */

#endif
