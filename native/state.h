/* Inside the engine: its state, which all files above this one share.
 *
 * Who drives the engine (the progress thread, or a caller that does its work meanwhile; never two
 * at once) holds `driving` and owns all fields but those that say otherwise. So no function here
 * or above takes a lock, unless its comment says which.
 *
 * A turn of the loop runs handlers (packets in, packets out, timers). Handlers change streams and
 * slots, queue records, touch operations and record failures. The loop alone ends operations and
 * executes failures, between handlers: so whatever a handler has looked up stays valid until it
 * returns. */
#ifndef LC_STATE_H
#define LC_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "cells.h"
#include "clock.h"
#include "deadline.h"
#include "fec.h"
#include "inject.h"
#include "op.h"
#include "pace.h"
#include "waiter.h"
#include "wire.h"

enum {
    LC_OPS = 256,      /* operations in flight */
    LC_RECORDS = 1024, /* control records queued for one peer; more are dropped, all are repeated */
    LC_TAIL = 1024,    /* streams of ended operations whose end a peer has not confirmed */
    LC_TAIL_TRIES = 13,
    LC_EVENTS = 16,      /* of links, until a caller takes them */
    LC_ACK_PACKETS = 64, /* the sender hears of so many at once, or of fewer after LC_ACK_NS */
    LC_ACK_NS = 1000000,
    LC_FIN_AGAIN_NS = 1000000, /* an end that is lost costs no round trips: it is told twice */
    LC_REORDER_NS = 1000000    /* floor of the reorder allowance */
};

/* What a peer has posted before this rank did. */
typedef struct {
    uint64_t signature, elements;
    uint32_t op;
    uint32_t dtype;
    uint32_t known;
} lc_early;

typedef struct {
    lc_pace pace;
    lc_fec_path fec;
    lc_deadline deadline;
    /* sending */
    uint32_t tx_next;     /* link_seq of the next packet */
    uint32_t tx_acked;    /* link_seq up to which the peer has seen packets */
    uint32_t tx_window;   /* packets that the peer lets be in flight */
    uint32_t tx_received; /* packets that the peer says it has taken */
    uint32_t tx_seen;     /* tx_acked when tx_received was told */
    uint64_t probe_ns;    /* when to ask, if the window stays full */
    uint32_t tx_eager;    /* packets of operations for which the peer is not ready */
    lc_out *outs;         /* streams with something to send, by operation */
    /* receiving */
    uint32_t rx_next; /* link_seq up to which packets have been seen */
    uint32_t rx_reported;
    uint32_t rx_taken;   /* packets taken, repeated ones included */
    uint32_t rx_echo_us; /* the sender's clock in the latest packet, and ours when it came */
    uint64_t rx_echo_ns; /* 0: it has been told */
    uint64_t rx_ack_ns;  /* when the peer was last told what came */
    uint32_t settled;    /* streams */
    uint64_t late_ns;    /* how late packets come after the end of their stream; fades */
    uint32_t last_op;    /* the stream that settled last, if some of it was missing: its packets */
    uint16_t last_slot;  /* may come when the operation has gone */
    uint64_t last_fin_ns;
    uint32_t done_op; /* the stream whose DONE went out before its FIN had come, if done_told: that
                         FIN, on its way by then, needs no answer */
    uint16_t done_slot;
    int done_told;
    int ack_due;
    uint64_t heard_ns;
    uint64_t back_ns;        /* when it was heard again after it had been still */
    uint64_t barren_ns;      /* the first round's end since data last came; 0: none has ended */
    uint64_t barren_packets; /* that the peer says it has sent in rounds since then */
    uint32_t barren_rounds;
    lc_record *records;
    uint32_t n_records;
    uint8_t *held; /* a datagram that injection delays */
    uint32_t held_bytes;
    double inject_loss; /* share of its packets that injection drops here */
    lc_early *early;    /* LC_OPS of them */
    lc_waiting waiting; /* eager packets */
    int dead;
    atomic_int doomed; /* dead as soon as the thread takes notice; any thread sets it */
    uint64_t packets_sent, packets_received, packets_missing;
    uint64_t offered, delivered; /* packets to be added up that might be lost */
} lc_peer;

/* The end of a stream that is repeated after the operation has gone. */
typedef struct {
    uint64_t next_ns;
    uint32_t op;
    uint32_t sent;
    uint16_t peer;
    uint16_t number;
    uint8_t round;
    uint8_t tries;
} lc_tail;

struct lc_engine {
    lc_config config;
    int inject_active; /* whether packets of any peer suffer faults */
    const lc_clock *clock;
    lc_link *link;
    lc_waiter waiter;
    lc_peer *peers;
    lc_expect expect;
    uint32_t window;   /* packets that this rank lets each peer have in flight */
    lc_cells cells;    /* for eager packets of all peers */
    uint32_t eager;    /* packets of which each rank may be in cells of each other */
    uint64_t now;      /* of this turn of the loop */
    uint64_t came_ns;  /* when the kernel got the datagram that is looked at */
    uint64_t tick_ns;  /* when timers are looked at next */
    uint64_t awake_ns; /* when the thread last came back from being stopped or starved */
    lc_rate rate;
    uint64_t busy_ns;        /* when something last happened */
    uint16_t turn;           /* the peer that sends first in this turn */
    uint64_t published_ns;   /* when callers were last told the figures */
    pthread_mutex_t driving; /* held by who drives */
    atomic_uint drives;      /* times that callers have driven */
    uint32_t drives_seen;    /* by the thread */

    lc_op *table[LC_OPS];
    lc_op *queue_first, *queue_last; /* submitted, not started: there was no room */
    uint32_t next_op;                /* number of the next operation that this thread takes up */
    uint32_t active;                 /* operations in table */
    lc_op *touched;                  /* perhaps complete: lc_op.touched says who is in the list */
    lc_failure failing;              /* recorded, not yet executed; code 0: none */
    lc_failure broken;               /* the first failure; code 0: none */
    uint32_t broken_from;            /* operations from here on have failed with it */
    lc_tail *tail;
    uint32_t n_tail;
    uint32_t n_dead; /* peers */

    /* the batch on its way to the link */
    lc_run runs[LC_BATCH_RUNS];
    lc_op *run_op[LC_BATCH_RUNS];
    int n_runs;
    struct iovec *iov;    /* LC_BATCH_RUNS * LC_RUN_PACKETS * 2 */
    uint8_t *headers;     /* LC_BATCH_RUNS * LC_RUN_PACKETS */
    uint8_t *control_out; /* LC_BATCH_RUNS payloads */
    int control_waits;    /* the link was full when control was flushed */

    /* shared with callers */
    pthread_mutex_t lock;
    pthread_cond_t changed;  /* some operation has finished */
    pthread_cond_t notified; /* for lc_engine_next */
    pthread_t thread;
    int threadless;    /* who opened it takes its turns (step.h) */
    int running;       /* it has been started (caller's side) */
    lc_op *inbox;      /* submitted, newest first; under lock */
    lc_op *newest;     /* all operations that are not released; under lock */
    lc_op *done_first; /* finished, with notify; under lock */
    lc_op *done_last;
    uint32_t submitted; /* number of the next operation submitted; under lock */
    uint32_t callers;   /* inside lc_engine_wait or _next, or driving; under lock */
    int closed;         /* under lock */
    int next_stopped;   /* under lock */
    lc_failure failed;  /* code 0: sound; under lock */
    lc_report last;     /* under lock */
    lc_stats stats; /* written by the thread under lock at the end of each turn that changed it */
    lc_stats live;  /* the thread's own */
    lc_peer_stats *peer_stats;  /* under lock */
    lc_event events[LC_EVENTS]; /* a ring; under lock, as the next */
    uint32_t events_in, events_out;
    atomic_int inbox_full; /* something is in the inbox */
    atomic_int stop;
    atomic_int sleeping;
    atomic_int abort_code; /* lc_code to fail everything with, 0: none */
    atomic_int abort_peer;
    atomic_int doom; /* some peer is doomed */
    pthread_mutex_t pool_lock;
    lc_pool pool;
};

/* ---- by number ---- */

lc_op *lc_find_op(lc_engine *e, uint32_t number);      /* NULL: not here, or not now */
int lc_op_posted(const lc_engine *e, uint32_t number); /* here, now or before */
int lc_op_failed(const lc_engine *e, uint32_t number); /* ended by the engine's failure */

/* ---- what handlers leave to the loop ---- */

/* Something of the operation has ended, and with it perhaps the operation. The loop looks once a
 * turn (lc_complete_touched): while a turn's handlers run, no operation ends and none is freed. */
void lc_touch(lc_engine *e, lc_op *op);
/* Records the first failure, which the loop executes (lc_execute_failure). Until then operations
 * stay as they are, and handlers that look at lc_failing stop taking packets. */
void lc_fail(lc_engine *e, const lc_failure *why);
int lc_failing(const lc_engine *e);

/* ---- small facts that several files need ---- */

static inline uint64_t lc_later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

void lc_read_clock(lc_engine *e); /* sets now */
uint32_t lc_wire_bytes_max(const lc_engine *e);
/* Nothing has come from the peer for longer than it takes to answer what is asked every 100 ms. It
 * is stopped or starved, and then nothing is lost; or the path is out, for which deadline_max is.
 */
int lc_still(const lc_engine *e, const lc_peer *peer);
/* The peer has sent what comes before `next`. Returns whether that is news. */
int lc_link_seen(lc_peer *peer, uint32_t next);

#endif
