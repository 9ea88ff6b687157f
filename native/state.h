/* Inside the engine: its state, which all files above this one share.
 *
 *   host        one per process: the links, the progress loop, and a path to each other process
 *   interface   one link of the host, and the batch on its way there
 *   path        what is known of the way to one process, and what waits to go there
 *   group       operations of some of the processes, its members; it has no socket and no thread
 *
 * A process is known by its number in the host, a member by its rank in the group.
 *
 * Who drives the host (the progress thread, or a caller that does its work meanwhile; never two at
 * once) holds `driving` and owns all fields but those that say otherwise. So no function here or
 * above takes a lock, unless its comment says which.
 *
 * A turn of the loop runs handlers (packets in, packets out, timers). Handlers change streams and
 * slots, queue records, touch operations and record failures. The loop alone ends operations,
 * executes failures and takes groups away, between handlers: so whatever a handler has looked up
 * stays valid until it returns. */
#ifndef LC_STATE_H
#define LC_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "aggregates.h"
#include "cells.h"
#include "clock.h"
#include "deadline.h"
#include "inject.h"
#include "loss.h"
#include "mailbox.h"
#include "out_of_band.h"
#include "pace.h"
#include "packet_size.h"
#include "pieces.h"
#include "recovery.h"
#include "seal.h"
#include "shared_rate.h"
#include "uplink.h"
#include "waiter.h"
#include "wire.h"

enum {
    LC_OPS = 256,    /* operations of a group in flight */
    LC_GROUPS = 256, /* buckets of the table of groups */
    LC_GONE = 4096,  /* groups that have been closed here, remembered */
    LC_EARLY = 512, /* operations that a process has posted and this one has not; at least LC_OPS */
    LC_RECORDS = 1024, /* control records queued for one peer; more are dropped, all are repeated */
    LC_LATE_FINS = 1024, /* streams of ended operations whose end a peer has not confirmed */
    LC_LATE_FIN_TRIES = 13,
    LC_FLIGHTS = 1024,   /* runs that a link has taken over and not completed */
    LC_EVENTS = 16,      /* of links, until a caller takes them */
    LC_UNITS = 1024,     /* packets on a path whose units are remembered; more than are in flight */
    LC_ACK_PACKETS = 64, /* the sender hears of so many at once, or of fewer after LC_ACK_NS */
    LC_ACK_NS = 1000000, /* at least, or half of the path's round trip, */
    LC_ACK_MAX_NS = 10000000,
    LC_FIN_AGAIN_NS = 1000000,   /* an end that is lost costs no round trips: it is told twice */
    LC_AGAIN_MAX_NS = 100000000, /* what is repeated to a silent peer is so far apart in the end */
    LC_HOLD_NS = 500000,         /* how long a record that isn't urgent waits for company */
    LC_REORDER_NS = 1000000,     /* floor of the reorder allowance */
    LC_DATAGRAM_BYTES = 65536    /* none is larger */
};

/* What a process has posted before this one did, in a group that may not be here yet. */
typedef struct {
    uint64_t signature, elements;
    uint32_t group;
    uint32_t op;
    uint32_t dtype;
    uint8_t patient;
    uint8_t known;
} lc_early;

/* A record on its way out. group: 0 for those about the path. */
typedef struct {
    lc_record record;
    uint32_t group;
} lc_queued;

/* A stream, by its names: its operation may have gone. */
typedef struct {
    uint32_t group, op;
    uint16_t slot;
} lc_stream_name;

/* Packets that a peer says it has sent, and of which none has come. */
typedef struct {
    uint64_t packets;
    uint64_t since_ns; /* when the first of them was heard of, */
    uint32_t times;    /* and how often others were */
} lc_emptiness;

typedef struct lc_interface lc_interface;
typedef struct lc_admission lc_admission;

typedef struct {
    uint16_t number;         /* of the process */
    uint8_t leaves_by;       /* LC_NEAR or LC_FAR */
    uint8_t far_level;       /* the rate at which its host sends to other sites, as it told last
                                (lc_rate_level); 0: not since somebody looked */
    lc_interface *interface; /* by which it is reached; NULL: nobody has had the number yet, nor
                                has a group it as a member, and all of the path is zero */
    lc_seal *seal;           /* NULL: what is sent there isn't sealed */
    lc_pace pace;
    lc_recovery_memo choices;
    lc_loss loss;
    double
        rate; /* bytes/s, of pace as long as it knows one: also when a pause has made it forget */
    lc_deadline deadline;
    lc_packet_size size;
    lc_aggregates aggregates;
    /* sending */
    uint32_t tx_next;     /* link_seq of the next packet */
    uint32_t tx_acked;    /* link_seq up to which the peer has seen packets */
    double tx_bytes;      /* of the packets between the two */
    uint32_t tx_window;   /* packets that the peer lets be in flight, of all groups; or units */
    uint32_t tx_units;    /* that have been sent, ever, */
    uint32_t *units_at;   /* and by which packet (a ring of LC_UNITS); NULL: a packet is a unit */
    uint32_t tx_received; /* packets that the peer says it has taken */
    uint32_t tx_runs;     /* runs of lost ones that it has counted */
    uint32_t tx_seen;     /* tx_acked when tx_received was told */
    uint32_t tx_lacks;    /* packets that it had seen later ones of then, and not taken */
    uint64_t probe_ns;    /* when to ask, if the window stays full */
    uint32_t tx_eager;    /* packets of operations for which the peer is not ready */
    lc_out *outs;         /* streams with something to send, the oldest operation first */
    lc_queued *records;   /* LC_RECORDS of them; NULL: the process isn't reached (lc_room) */
    uint32_t n_records;
    uint64_t hold_ns; /* until then they may wait for a packet to ride with; 0: they may not */
    uint64_t told_ns; /* when records last went out, */
    uint64_t unanswered_ns; /* and when the first of those that nothing has come after; 0: none */
    /* receiving */
    uint32_t rx_next; /* link_seq up to which packets have been seen */
    uint32_t rx_reported;
    uint32_t rx_taken;     /* packets taken, repeated ones included */
    lc_runs rx_runs;       /* of packets that have not come */
    lc_emptiness rx_empty; /* since one last came, of any group */
    uint32_t rx_largest;   /* datagram that has come since the peer was last told */
    lc_pieces *pieces;     /* of packets too large for the path; NULL: there are none by its link */
    uint32_t rx_units;     /* units taken that the peer has not been told of */
    uint32_t rx_echo_us;   /* the sender's clock in the latest packet, and ours when it came */
    uint64_t rx_echo_ns;   /* 0: it has been told */
    uint64_t rx_ack_ns;    /* when the peer was last told what came */
    uint32_t settled;      /* streams */
    uint64_t late_ns;      /* how late packets come after the end of their stream; fades */
    lc_stream_name last;  /* the stream that settled last, if some of it was missing: its packets */
    uint64_t last_fin_ns; /* may come when the operation has gone */
    lc_stream_name done;  /* the stream whose DONE went out before its FIN had come, if done_told:
                             that FIN, on its way by then, needs no answer */
    int done_told;
    int ack_due;
    uint64_t heard_ns;
    atomic_uchar pulse_asked;   /* somebody wants a sign of life, */
    _Atomic uint64_t pulse_ns;  /* and when there was one, as of the question before */
    uint64_t sent_ns;           /* when a datagram last went there */
    uint64_t reached_ns;        /* when the peer last heard one, as it says, */
    uint64_t unreached_ns;      /* when the first one went that it may not have heard, */
    uint32_t unreached;         /* how many of them there are, */
    uint64_t unreached_told_ns; /* and when it last spoke of it */
    uint64_t data_ns;           /* when a packet of some stream last came, */
    uint64_t data_order;        /* and of which: its operation's order, and its slot */
    uint16_t data_slot;
    uint64_t back_ns; /* when it was heard again after it had been still */
    uint8_t *held;    /* a datagram that injection delays */
    uint32_t held_bytes;
    lc_early *early;    /* LC_EARLY of them; NULL: it isn't reached */
    lc_waiting waiting; /* eager packets */
    /* messages of all groups */
    uint64_t mail_kept;      /* lc_mail_peer.kept, of those that are not gone, */
    uint64_t mail_announced; /* and announced, */
    uint64_t mail_used;      /* and used; under the host's lock */
} lc_path;

typedef struct {
    lc_path *path;           /* NULL: this process */
    double inject_loss;      /* share of its packets that injection drops here */
    int met;                 /* it has the group: packets may go ahead of its READY */
    uint64_t heard_ns;       /* when it last said anything in this group */
    lc_emptiness empty;      /* of rounds that have ended since data of the group last came */
    uint8_t silence;         /* lc_silence: an operation has given it up for that, */
    uint64_t silence_ns;     /* the latest one then, */
    uint64_t silent_from_ns; /* and nothing had come since then; */
    uint32_t silences;       /* times that one was the first to */
    int dead;
    atomic_int reported_dead; /* dead as soon as the loop takes notice; any thread sets it */
    atomic_int left;          /* the same of one that left in order */
    uint64_t packets_sent, packets_received, packets_missing;
    uint64_t offered, delivered; /* packets to be added up that might be lost */
    lc_recovery recovery;        /* the latest that were chosen against max_missing */
    float max_missing;           /* < 0: none were */
} lc_member;

/* A run that a link has taken over, as long as its memory is the link's (lc_link_completed). */
typedef struct {
    lc_op *op;
    uint64_t until; /* the link has completed so many packets */
} lc_flight;

/* Paths of an interface to other hosts that are paced together. */
typedef struct {
    lc_uplink uplink;
    uint16_t n_paths;
    uint16_t n_sending; /* of those, that had something to send in this turn */
    uint64_t looked_ns; /* when it was last looked for what the hosts of the site have told */
} lc_exit;

/* Paths of one wait for its link together, and for no other. */
struct lc_interface {
    lc_link *link;
    lc_path **paths; /* to the other processes that it reaches */
    uint16_t n_paths;
    uint16_t turn;              /* the path that sends first in this turn of the loop */
    lc_exit exits[LC_UPLINKS];  /* what its paths to other hosts may send together, */
    int paces_port;             /* if that is bounded */
    lc_shared_rate rate;        /* of its paths */
    double level;               /* packets/s beyond which none of them goes (fair_share.h), */
    uint64_t level_ns;          /* as of then */
    uint16_t turns_since_asked; /* turns since the link was last asked what has come */
    uint64_t moved_ns;          /* when something last went there or came */
    uint32_t window;            /* units that this process lets each of them have in flight: a small
                                   packet (lc_link.small_max) counts one, */
    uint32_t large_units;       /* and a larger one so many */
    uint32_t payload_bytes;     /* of a packet of data at most, */
    uint32_t control_bytes;     /* and of a packet of control */
    uint32_t tag_bytes;         /* that sealing adds to each datagram; 0: it isn't sealed */
    lc_expect expect;
    lc_cells cells;        /* for eager packets of its paths */
    uint32_t cell_payload; /* that one of them holds */
    uint32_t
        eager; /* packets of which each process may be in cells of each other; 0: none go ahead */
    int control_waits; /* the link was full when control was flushed */
    lc_failure failed; /* the link sends nothing any more; code 0: it works */
    /* the batch on its way to the link */
    lc_run runs[LC_BATCH_RUNS];
    lc_op *run_op[LC_BATCH_RUNS];
    uint32_t run_ahead[LC_BATCH_RUNS]; /* bytes of control before the packet of a run of one */
    int n_runs;
    lc_flight *flights; /* a ring of LC_FLIGHTS */
    uint32_t flights_in, flights_out;
    struct iovec *iov;    /* LC_BATCH_RUNS * LC_RUN_PACKETS * 2 */
    uint8_t *headers;     /* LC_BATCH_RUNS * LC_RUN_PACKETS */
    uint64_t *contents;   /* LC_BATCH_RUNS * LC_RUN_PACKETS */
    uint8_t *records_out; /* LC_BATCH_RUNS packets of control, each with room for a header */
    uint8_t *sealed;      /* LC_BATCH_RUNS runs as they are sent; NULL: without seals */
    uint32_t sealed_room; /* of each of these */
};

enum lc_attention {
    LC_LOOK_INBOX = 1,  /* operations or groups are new */
    LC_LOOK_GROUPS = 2, /* some group is aborted, closing, or has a member that died or left */
    LC_LOOK_ADMISSIONS = 4
};

/* The end of a stream that is repeated after the operation has gone, and perhaps its group. */
typedef struct {
    uint64_t next_ns;
    lc_stream_name stream; /* number of the slot there */
    uint32_t sent;
    uint16_t word;
    uint16_t process;
    uint8_t round;
    uint8_t tries;
} lc_late_fin;

struct lc_group {
    lc_host *host;
    lc_group *next, *next_in_bucket; /* among the host's */
    lc_group *next_registered;       /* under the host's lock */
    lc_group_config config;
    int inject_active; /* whether packets of any member suffer faults */
    lc_member *members;
    uint16_t *rank_of_process; /* 0xFFFF: no member */
    lc_op *table[LC_OPS];
    uint64_t held_until_ns;          /* a gate held operations back */
    lc_op *queue_first, *queue_last; /* submitted, not started: there was no room */
    uint32_t next_op;                /* number of the next operation that the loop takes up */
    uint32_t active;                 /* operations in table */
    uint32_t runs;                   /* of its operations (lc_op.runs) */
    lc_failure failing;              /* recorded, not yet executed; code 0: none */
    lc_failure broken;               /* the first failure; code 0: none */
    uint32_t broken_from;            /* operations from here on have failed with it */
    uint32_t n_dead;                 /* members */
    uint64_t linger_bytes;           /* that operations which linger have copied */
    lc_mailbox *mail;                /* messages */
    lc_stats live;

    /* shared with callers, under the host's lock */
    pthread_cond_t changed; /* some operation has finished, or the group has gone */
    lc_op *newest;          /* all operations that are not released */
    uint32_t submitted;     /* number of the next operation submitted */
    uint32_t callers;       /* inside lc_group_wait, or driving for it */
    int closed;             /* the loop has taken the group away */
    lc_failure failed;      /* code 0: sound */
    lc_report last;
    lc_stats stats;
    lc_peer_stats *peer_stats;
    /* any thread's, with LC_LOOK_GROUPS */
    atomic_int abort_code; /* lc_code to fail everything with, 0: none */
    atomic_int abort_peer;
    atomic_int departures;   /* some member was reported dead, or left, */
    atomic_uint departed_at; /* and this was the number of the next operation when the first did */
    atomic_int closing;      /* the loop is to take the group away */
    /* written by who drives */
    atomic_ullong lingering; /* operations that linger, above 32 bits: the number of the first */
    lc_page_group *page;     /* its block of the status page; NULL: none. Under the host's lock */
};

struct lc_host {
    lc_host_config config;
    const lc_clock *clock;
    lc_interface interfaces[LC_LINKS]; /* by number of the link */
    uint16_t n_interfaces;
    uint16_t turn;           /* the interface that sends first in this turn of the loop */
    lc_waiter waiter;        /* of the thread */
    lc_waiter caller_waiter; /* of a caller that drives */
    lc_path *paths;          /* by process */
    uint64_t session;
    lc_sealing sealing;
    uint64_t address_key;         /* of what its socket is bound to */
    lc_uplink_rank *uplink_ranks; /* that share its uplinks */
    uint8_t *unsealed;            /* a datagram that was sealed; NULL: none are */
    lc_oob_ring *oob;             /* NULL: there are none, and what looks like one is malformed */
    double row_rate;     /* bytes/s of a row of parity, while all processes here make some */
    uint64_t now;        /* of this turn of the loop */
    uint64_t came_ns;    /* when the kernel got the datagram that is looked at, */
    uint32_t came_bytes; /* and its size */
    uint64_t tick_ns;    /* when timers are looked at next */
    uint64_t awake_ns;   /* when the thread last came back from being stopped or starved */
    lc_rate rate;
    uint64_t busy_ns;          /* when something last happened */
    uint64_t crowded_until_ns; /* others want the core: nobody yields to them before. UINT64_MAX:
                                  there are more of them than cores */
    uint64_t spin_ns;          /* how long the thread stays awake after something happened */
    uint64_t published_ns;     /* when callers were last told the figures */
    uint64_t held_ns;          /* until then some path may hold records back */
    uint64_t started;          /* operations of all groups so far: their order */
    uint64_t contents;         /* numbers of packets with several receivers so far (lc_run) */
    pthread_mutex_t driving;   /* held by who drives */
    atomic_uint drives;        /* times that callers have driven */
    uint32_t drives_seen;      /* by the thread */
    atomic_int standing_by;    /* the thread looks every now and then whether callers drive, or has
                                  been asked to */

    lc_group *groups;
    lc_group *bucket[LC_GROUPS]; /* by number */
    uint32_t active;             /* operations in the groups' tables, and messages with timers */
    uint32_t lingering;          /* of those, operations that linger (linger.h) */
    uint32_t collectives;        /* of those in the tables, operations */
    uint32_t queued;             /* operations in their queues */
    uint32_t listed;             /* streams in the lists of all paths */
    lc_op *touched;              /* perhaps complete: lc_op.touched says who is in the list */
    int failing;                 /* some group is */
    int closing;                 /* some group is, whose memory a link still reads */
    lc_restorer *restorer;
    lc_late_fin *late_fins;
    uint32_t n_late_fins;
    uint32_t gone[LC_GONE]; /* numbers of groups that were closed, the latest ones */
    uint32_t n_gone;        /* so far */
    lc_stats live; /* what no group can be told for: lc_group_stats adds it to each group's */

    /* shared with callers, under lock */
    pthread_mutex_t lock;
    pthread_t thread;
    uint32_t forks;             /* before the process that opened it; another one's is a copy */
    int threadless;             /* who opened it takes its turns (step.h) */
    int running;                /* it has been started, before any group is opened */
    lc_op *inbox;               /* submitted to any group, newest first */
    lc_group *opened;           /* not yet among groups */
    lc_admission *admissions;   /* that wait for the loop, */
    pthread_cond_t admitted;    /* which has seen to some */
    lc_group *registered;       /* all that are not closed */
    lc_stats stats;             /* live, as last published */
    lc_event events[LC_EVENTS]; /* a ring */
    uint32_t events_in, events_out;
    lc_page *page; /* what others may read of it (page.h); NULL: nothing */
    /* any thread's */
    atomic_int attention; /* lc_attention bits: what callers have left */
    atomic_int stop;
    atomic_int sleeping;      /* the thread */
    atomic_int caller_sleeps; /* one that drives */
    pthread_mutex_t pool_lock;
    lc_pool pool;
    uint64_t pool_aged_ns; /* when that was last done */
};

/* ---- by name ---- */

int lc_group_gone(const lc_host *h, uint32_t number);       /* it was here, and was closed */
lc_group *lc_find_group(const lc_host *h, uint32_t number); /* NULL: it is not here */
lc_op *lc_find_op(const lc_group *g, uint32_t number);      /* NULL: not here, or not now */
int lc_op_posted(const lc_group *g, uint32_t number);       /* here, now or before */
int lc_op_failed(const lc_group *g, uint32_t number);       /* ended by the group's failure */
int lc_names(const lc_stream_name *name, uint32_t group, uint32_t op, uint16_t slot);

static inline lc_path *lc_path_from(const lc_in *in) {
    return in->slot->op->group->members[in->peer].path;
}
static inline lc_path *lc_path_to(const lc_out *out) {
    return out->slot->op->group->members[out->peer].path;
}

/* What an operation or a message has sent and received, to the group's figures. */
void lc_count_packets(lc_stats *t, const lc_report *r);
/* What was counted of a member; the other figures stay. Callers read them under the lock. */
void lc_show_counts(lc_peer_stats *to, const lc_member *m);

/* ---- what handlers leave to the loop ---- */

/* Something of the operation has ended, and with it perhaps the operation. The loop looks once a
 * turn (lc_complete_touched): while a turn's handlers run, no operation ends and none is freed. */
void lc_touch(lc_op *op);
/* Records the group's first failure, which the loop executes (lc_execute_failures). Until then
 * operations stay as they are, and handlers stop taking packets of the group. */
void lc_fail(lc_group *g, const lc_failure *why);

/* ---- small facts that several files need ---- */

static inline uint64_t lc_later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Whether some member of the group is reached by it. */
int lc_group_uses(const lc_group *g, const lc_interface *via);
/* It has taken fewer packets than were there to go: what goes there waits. */
static inline int lc_is_blocked(const lc_interface *via) {
    return via->n_runs > 0 || via->control_waits;
}
void lc_read_clock(lc_host *h); /* sets now */
/* Whether packets of the slot may go ahead on a path: the receiver can keep any of them. */
int lc_may_go_ahead(const lc_op_slot *s, const lc_path *p);
/* Bytes of a datagram at most; of a packet of control, and a header after it. */
static inline uint32_t lc_wire_bytes_max(const lc_interface *via) {
    return LC_HEADER_BYTES + via->tag_bytes + via->payload_bytes;
}
/* Of a packet with so many bytes of payload. */
static inline uint32_t lc_datagram_bytes(const lc_path *p, uint32_t payload) {
    return LC_HEADER_BYTES + p->interface->tag_bytes + payload;
}
/* What a packet of so many bytes takes of the window. */
static inline uint32_t lc_units(const lc_interface *via, uint32_t packet_bytes) {
    return packet_bytes <= via->link->small_max ? 1 : via->large_units;
}
/* Units of the window taken by packets that were sent and not yet acknowledged. */
static inline uint32_t lc_units_flying(const lc_path *p) {
    if (!p->units_at)
        return p->tx_next - p->tx_acked;
    return p->tx_units - p->units_at[(p->tx_acked - 1) % LC_UNITS];
}
/* Packets of so many bytes that the windows let go now. */
uint32_t lc_window_room(const lc_path *p, uint32_t packet_bytes);
static inline lc_exit *lc_exit_of(const lc_path *p) {
    return &p->interface->exits[p->leaves_by];
}
/* The rate at which this host sends to other sites, for those of its own (lc_rate_level). 0: it
 * doesn't, its own port holds that back, or it has one path there, which has a law of its own. */
uint8_t lc_far_level(const lc_interface *via, uint64_t now);
/* Whether what goes there leaves by a port that is paced, */
static inline int lc_leaves_by_port(const lc_path *p) {
    return p->interface->paces_port && !p->pace.same_host;
}
/* by the port's law: of a path that has the port for itself, its own law finds the rate. */
static inline int lc_shares_port(const lc_path *p) {
    return lc_leaves_by_port(p) && (lc_exit_of(p)->n_paths > 1 || lc_exit_of(p)->uplink.own);
}
/* How long packets that came may wait for an acknowledgement. On a slow path each would else have
 * one of its own, and they share the port with data. */
static inline uint64_t lc_ack_ns(const lc_path *p) {
    uint64_t part = lc_shares_port(p) ? p->pace.measure.rtt_ns / 2 : 0;
    return part < LC_ACK_NS ? LC_ACK_NS : part < LC_ACK_MAX_NS ? part : LC_ACK_MAX_NS;
}
/* Bytes of a stream's datagrams. */
static inline uint32_t lc_wire_bytes(const lc_out *out) {
    return LC_HEADER_BYTES + lc_path_to(out)->interface->tag_bytes + out->slot->packet_bytes;
}
/* Bytes before the payload of a datagram, and before a piece in one. */
static inline uint32_t lc_head_bytes(const lc_interface *via) {
    return LC_HEADER_BYTES + via->tag_bytes;
}
static inline uint32_t lc_control_room(const lc_interface *via) {
    return 2 * LC_HEADER_BYTES + via->control_bytes;
}
/* Nothing has come from the process for longer than it takes to answer what is asked every 100 ms.
 * It is stopped or starved, and then nothing is lost; or the path is out, for which deadline_max
 * is. */
int lc_still(const lc_host *h, const lc_path *p);
void lc_note_empty(lc_emptiness *e, uint64_t packets, uint64_t now);
/* How long it takes to answer what is asked every 100 ms. */
uint64_t lc_answer_ns(const lc_path *p);
/* The process has sent what comes before `next`, the last of which is here if `came`. Returns
 * whether that is news. */
int lc_link_seen(lc_path *p, uint32_t next, int came);
/* A packet that was noted as taken has come to nothing, and is lost like any other. */
void lc_link_lost(lc_path *p, uint32_t link_seq);

#endif
