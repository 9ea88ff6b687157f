/* The progress loop. A turn takes what callers have left, then packets in, packets out, timers and
 * control; at its end operations complete and failures are executed, nowhere else. */
#include "loop.h"

#include <sched.h>

#include "operations.h"
#include "timers.h"

static const uint64_t PUBLISH_NS = 50000000;
static const uint64_t SPIN_NS = 50000;        /* how long the thread stays awake after a packet */
static const uint64_t DRIVE_SPIN_NS = 200000; /* and a caller that does the thread's work */
static const uint64_t STAND_BY_NS = 2000000;  /* how often the thread looks whether callers drive */

static void take_inbox(lc_engine *e) {
    if (!atomic_load(&e->inbox_full))
        return;
    pthread_mutex_lock(&e->lock);
    atomic_store(&e->inbox_full, 0);
    lc_op *newest = e->inbox;
    e->inbox = NULL;
    pthread_mutex_unlock(&e->lock);
    lc_op *last = newest;
    lc_op *oldest = NULL;
    while (newest) {
        lc_op *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    if (e->queue_last)
        e->queue_last->next = oldest;
    else
        e->queue_first = oldest;
    e->queue_last = last;
    pthread_mutex_lock(&e->lock);
    lc_failure failed = e->failed;
    pthread_mutex_unlock(&e->lock);
    if (failed.code) /* submitted while the failure was on its way */
        lc_fail(e, &failed);
}

static int may_start(const lc_engine *e) {
    return e->queue_first && e->active < LC_OPS / 2 && !e->table[e->queue_first->number % LC_OPS] &&
           !lc_failing(e);
}

/* Takes operations up in their order, as far as there is room: a caller is never kept waiting. */
static void start_queued(lc_engine *e) {
    int started = 0;
    while (may_start(e)) {
        lc_op *op = e->queue_first;
        e->queue_first = op->next;
        if (!e->queue_first)
            e->queue_last = NULL;
        lc_op_start(e, op);
        started = 1;
    }
    /* READY goes before any eager packet, which else would have to wait at the peer. */
    if (started && e->eager)
        lc_send_control(e);
}

static void obey_abort(lc_engine *e) {
    int code = atomic_exchange(&e->abort_code, 0);
    if (!code)
        return;
    lc_failure why = {.code = code, .peer = atomic_load(&e->abort_peer)};
    lc_fail(e, &why);
}

static void bury_doomed(lc_engine *e) {
    if (!atomic_exchange(&e->doom, 0))
        return;
    for (uint16_t i = 0; i < e->config.size; i++)
        if (atomic_load(&e->peers[i].doomed) && !e->peers[i].dead)
            lc_bury(e, i);
}

/* Under the lock. What callers don't take in time is only counted. */
static void take_events(lc_engine *e) {
    lc_event event;
    while (e->events_in - e->events_out < LC_EVENTS && lc_link_event(e->link, &event))
        e->events[e->events_in++ % LC_EVENTS] = event;
}

static void publish(lc_engine *e) {
    lc_link_figures figures;
    lc_link_figures_of(e->link, &figures);
    e->live.socket_overflow = figures.overflow;
    e->live.send_calls = figures.send_calls;
    e->live.receive_calls = figures.receive_calls;
    e->live.fast_path_refusals = figures.refused;
    e->live.send_failures = figures.failed;
    pthread_mutex_lock(&e->lock);
    take_events(e);
    e->stats = e->live;
    for (uint16_t i = 0; i < e->config.size; i++) {
        lc_peer *p = &e->peers[i];
        uint64_t total = p->packets_received + p->packets_missing;
        e->peer_stats[i] = (lc_peer_stats){
            .packets_sent = p->packets_sent,
            .packets_received = p->packets_received,
            .packets_missing = p->packets_missing,
            .rtt_ns = p->pace.path.rtt_ns,
            .deadline_ns = lc_deadline_of(&p->deadline, 1, e->config.deadline_min_ns,
                                          e->config.deadline_max_ns),
            .delivery_rate = total ? (double)p->packets_received / (double)total : 1.0,
            .offered = p->offered,
            .delivered = p->delivered,
            .rate = p->pace.rate * p->pace.packet_bytes,
            .window = lc_pace_window(&p->pace, p->tx_window),
            .queue_ns = lc_pace_queue(&p->pace)};
    }
    pthread_mutex_unlock(&e->lock);
}

/* How long until some rate lets a packet go; UINT64_MAX when none holds one back. */
static uint64_t gate_delay(const lc_engine *e) {
    uint64_t least = UINT64_MAX;
    uint32_t bytes = lc_wire_bytes_max(e);
    uint64_t own = lc_rate_delay(&e->rate, e->now, bytes);
    for (uint16_t i = 0; i < e->config.size; i++) {
        const lc_peer *p = &e->peers[i];
        if (!p->outs || p->tx_next - p->tx_acked >= lc_pace_window(&p->pace, p->tx_window))
            continue;
        uint64_t delay = lc_pace_delay(&p->pace, e->now, bytes);
        delay = delay > own ? delay : own;
        if (delay < least)
            least = delay;
    }
    return least;
}

/* Answers come within microseconds while an operation runs; waking up takes longer than that. */
static int is_hot(const lc_engine *e) {
    return e->active && e->now - e->busy_ns < SPIN_NS;
}

/* Whether a caller wants something of who drives. */
static int is_wanted(lc_engine *e) {
    return atomic_load(&e->inbox_full) || atomic_load(&e->stop) || atomic_load(&e->abort_code) ||
           atomic_load(&e->doom);
}

/* Takes the mutex `driving` again after a sleep. As long as callers drive, the thread only looks
 * now and then whether they still do, and their packets don't wake it. woken: somebody wants it. */
static void stand_by(lc_engine *e, int woken) {
    for (;;) {
        uint32_t drives = atomic_load(&e->drives);
        int alone = woken || drives == e->drives_seen;
        e->drives_seen = drives;
        if (alone && pthread_mutex_trylock(&e->driving) == 0)
            return;
        woken = lc_waiter_sleep(&e->waiter, NULL, 0, 0, STAND_BY_NS);
    }
}

/* The link was full. */
static int is_blocked(const lc_engine *e) {
    return e->n_runs > 0 || e->control_waits;
}

uint64_t lc_idle_ns(const lc_engine *e) {
    uint64_t until = e->tick_ns > e->now ? e->tick_ns - e->now : 0;
    uint64_t delay = gate_delay(e);
    if (!delay && !is_blocked(e))
        return 0; /* a timer of this turn has made packets ready */
    return delay && delay < until ? delay : until;
}

static void rest(lc_engine *e) {
    if (is_hot(e)) {
        sched_yield();
        return;
    }
    uint64_t until = lc_idle_ns(e);
    uint32_t blocked = (uint32_t)is_blocked(e);
    if (!until)
        return;
    atomic_store(&e->sleeping, 1);
    pthread_mutex_unlock(&e->driving);
    int woken = is_wanted(e);
    if (!woken)
        woken = lc_waiter_sleep(&e->waiter, &e->link, 1, blocked, until);
    stand_by(e, woken);
    atomic_store(&e->sleeping, 0);
}

static void settle_turn(lc_engine *e) {
    lc_complete_touched(e);
    lc_execute_failure(e);
}

int lc_turn(lc_engine *e) {
    lc_read_clock(e);
    take_inbox(e);
    obey_abort(e);
    bury_doomed(e);
    settle_turn(e);
    start_queued(e);
    int busy = lc_receive(e);
    busy |= lc_send_data(e);
    if (busy)
        e->busy_ns = e->now;
    if (e->now >= e->tick_ns && !lc_failing(e))
        lc_tick(e);
    lc_send_control(e);
    settle_turn(e);
    if (e->now - e->published_ns > PUBLISH_NS) {
        publish(e);
        e->published_ns = e->now;
    }
    return busy;
}

void lc_last_turn(lc_engine *e) {
    take_inbox(e);
    lc_failure why = {.code = LC_E_CLOSED, .peer = -1};
    lc_fail(e, &why);
    settle_turn(e);
}

void *lc_progress(void *argument) {
    lc_engine *e = argument;
    pthread_mutex_lock(&e->driving);
    e->now = lc_clock_now(e->clock);
    while (!atomic_load(&e->stop))
        if (!lc_turn(e))
            rest(e);
    lc_last_turn(e);
    pthread_mutex_unlock(&e->driving);
    return NULL;
}

void lc_nudge(lc_engine *e) {
    if (atomic_load(&e->sleeping))
        lc_waiter_wake(&e->waiter);
}

void lc_drive(lc_engine *e, const lc_op *op, uint64_t longest_ns) {
    if (pthread_mutex_trylock(&e->driving) != 0) {
        lc_nudge(e);
        return;
    }
    atomic_fetch_add(&e->drives, 1);
    uint64_t begin = lc_clock_now(e->clock);
    e->busy_ns = begin;
    do {
        if (!lc_turn(e))
            sched_yield();
    } while (!op->finished && e->now - e->busy_ns < DRIVE_SPIN_NS && e->now - begin < longest_ns &&
             !atomic_load(&e->stop));
    /* It would sleep as long as there was nothing to do when it fell asleep. */
    int needed = e->active || e->n_tail || e->queue_first || atomic_load(&e->stop);
    pthread_mutex_unlock(&e->driving);
    /* Who wanted something meanwhile woke the thread, which found the mutex taken. */
    if (needed || is_wanted(e))
        lc_nudge(e);
}
