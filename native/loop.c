/* The progress loop. A turn takes what callers have left, then packets in, packets out, timers and
 * control; at its end operations complete and failures are executed, nowhere else. */
#include "loop.h"

#include <sched.h>

#include "batch.h"
#include "float_mode.h"
#include "forks.h"
#include "gate.h"
#include "linger.h"
#include "message.h"
#include "operations.h"
#include "page.h"
#include "path.h"
#include "silence.h"
#include "timers.h"

static const uint64_t PUBLISH_NS = 50000000;
static const uint64_t DRIVE_SPIN_NS = 200000; /* how long a caller that does the thread's work stays
                                                 awake after a packet */
static const uint64_t CROWDED_NS = 50000;     /* a yield that takes longer: others want the core */
/* and aren't tried again before, nor before so many times as long as it took: a yield to a busy
 * thread may cost a whole time slice, and that who sleeps afterwards isn't woken at once */
static const uint64_t CROWD_STAYS_NS = 2000000, CROWD_STAYS_TIMES = 128;
static const uint64_t CROWD_MOST_NS = 1000000000; /* a stopped process comes back from a long one */
static const uint64_t STAND_BY_NS = 2000000; /* how often the thread looks whether callers drive */

/* ---- what callers have left ---- */

static void enqueue(lc_op *op) {
    lc_group *g = op->group;
    if (op->letter) {
        lc_message_start(op);
        if (g->broken.code)
            lc_fail(g, &g->broken);
        return;
    }
    op->next = NULL;
    if (g->queue_last)
        g->queue_last->next = op;
    else
        g->queue_first = op;
    g->queue_last = op;
    g->host->queued++;
    if (g->broken.code) /* submitted while the failure was on its way */
        lc_fail(g, &g->broken);
}

/* Newest first, as they lie in the inbox. */
static void enqueue_all(lc_op *newest) {
    lc_op *oldest = NULL;
    while (newest) {
        lc_op *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    while (oldest) {
        lc_op *next = oldest->next;
        enqueue(oldest);
        oldest = next;
    }
}

static void adopt(lc_host *h, lc_group *g) {
    while (g) {
        lc_group *next = g->next;
        uint32_t at = g->config.number % LC_GROUPS;
        g->next = h->groups;
        h->groups = g;
        g->next_in_bucket = h->bucket[at];
        h->bucket[at] = g;
        h->published_ns = 0; /* its figures are told at once */
        for (uint16_t i = 0; i < h->n_interfaces; i++)
            if (h->interfaces[i].failed.code && lc_group_uses(g, &h->interfaces[i]))
                lc_fail(g, &h->interfaces[i].failed);
        g = next;
    }
}

static void note_departures(lc_group *g) {
    if (!atomic_exchange(&g->departures, 0))
        return;
    for (uint16_t i = 0; i < g->config.size; i++)
        if (atomic_load(&g->members[i].reported_dead) && !g->members[i].dead)
            lc_member_lost(g, i);
        else if (atomic_load(&g->members[i].left) && !g->mail->peers[i].gone)
            lc_left(g, i);
}

static void obey_abort(lc_group *g) {
    int code = atomic_exchange(&g->abort_code, 0);
    if (!code)
        return;
    lc_failure why = {.code = code, .peer = atomic_load(&g->abort_peer)};
    lc_fail(g, &why);
}

static void take_out(lc_host *h, lc_group *g) {
    lc_group **at = &h->groups;
    while (*at != g)
        at = &(*at)->next;
    *at = g->next;
    at = &h->bucket[g->config.number % LC_GROUPS];
    while (*at != g)
        at = &(*at)->next_in_bucket;
    *at = g->next_in_bucket;
}

static void settle_turn(lc_host *h) {
    lc_complete_touched(h);
    lc_execute_failures(h);
}

/* Whether a caller has submitted an operation of the group that the loop hasn't taken up. None can
 * from now on: that is looked at under the lock, too. Takes the lock. */
static int has_new(lc_host *h, const lc_group *g) {
    pthread_mutex_lock(&h->lock);
    const lc_op *op = h->inbox;
    while (op && op->group != g)
        op = op->next;
    pthread_mutex_unlock(&h->lock);
    return op != NULL;
}

/* Nothing of the group is left in the loop afterwards: its closer frees it. Takes the lock. */
static void let_go(lc_host *h, lc_group *g) {
    take_out(h, g);
    h->gone[h->n_gone++ % LC_GONE] = g->config.number;
    pthread_mutex_lock(&h->lock);
    g->closed = 1;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&h->lock);
}

static int may_start(const lc_group *g) {
    return g->queue_first && lc_gate_is_open(g->queue_first->call.gate) && g->active < LC_OPS / 2 &&
           !g->table[g->queue_first->number % LC_OPS] && !g->failing.code;
}

/* Takes operations of the group up in their order, as far as there is room: a caller is never kept
 * waiting. end: only those before this number; NULL: all. Returns whether there were any. */
static int start_some(lc_group *g, const uint32_t *end) {
    int started = 0;
    while (may_start(g) && (!end || (int32_t)(g->queue_first->number - *end) < 0)) {
        lc_op *op = g->queue_first;
        g->queue_first = op->next;
        if (!g->queue_first)
            g->queue_last = NULL;
        g->host->queued--;
        lc_op_start(op);
        started = 1;
    }
    return started;
}

static void tell_if(lc_host *h, int started) {
    if (started && h->config.eager_bytes)
        lc_tell_before_data(h);
}

/* What a peer had sent before it left, or was lost, may be here and unread: on a busy machine
 * others say that it has gone before this thread has its next turn. Operations that were submitted
 * before that are for it, too, and are started; later ones may be planned without it. */
static void take_last_words(lc_host *h) {
    int any = 0, started = 0;
    for (lc_group *g = h->groups; g; g = g->next) {
        if (!atomic_load(&g->departures))
            continue;
        uint32_t end = atomic_load(&g->departed_at);
        started |= start_some(g, &end);
        any = 1;
    }
    if (!any)
        return;
    tell_if(h, started);
    lc_receive_all(h);
    settle_turn(h);
}

static void look_at_groups(lc_host *h) {
    static const lc_failure closed = {.code = LC_E_CLOSED, .peer = -1};
    take_last_words(h);
    for (lc_group *g = h->groups; g; g = g->next) {
        obey_abort(g);
        note_departures(g);
        if (atomic_load(&g->closing))
            lc_fail(g, &closed);
    }
    settle_turn(h);
    lc_group *next;
    h->closing = 0;
    for (lc_group *g = h->groups; g; g = next) {
        next = g->next;
        if (!atomic_load(&g->closing))
            continue;
        if (g->broken.code && !has_new(h, g))
            let_go(h, g);
        else
            h->closing = 1;
    }
}

/* Takes the lock. */
static void attend(lc_host *h) {
    int look = atomic_load(&h->attention) ? atomic_exchange(&h->attention, 0) : 0;
    if (look) {
        pthread_mutex_lock(&h->lock);
        lc_op *newest = h->inbox;
        lc_group *opened = h->opened;
        h->inbox = NULL;
        h->opened = NULL;
        pthread_mutex_unlock(&h->lock);
        adopt(h, opened);
        enqueue_all(newest);
    }
    if (look & LC_LOOK_ADMISSIONS)
        lc_admit_waiting(h);
    if (look & LC_LOOK_GROUPS || h->closing)
        look_at_groups(h);
    else if (h->failing)
        settle_turn(h);
}

static void start_queued(lc_host *h) {
    int started = 0;
    for (lc_group *g = h->groups; g && h->queued; g = g->next)
        started |= start_some(g, NULL);
    tell_if(h, started);
}

/* ---- figures ---- */

static void show_silence(lc_peer_stats *to, const lc_group *g, const lc_member *m) {
    enum lc_silence silence = lc_silence_of(g, m);
    to->silence = (uint8_t)silence;
    to->silences = m->silences;
    to->silent_packets = silence == LC_NO_DATA ? m->empty.packets : m->path->unreached;
    if (silence)
        to->silent_ns = g->host->now - (silence == LC_NO_DATA     ? m->empty.since_ns
                                        : silence == LC_SILENT_TO ? m->path->unreached_ns
                                                                  : m->silent_from_ns);
}

static lc_peer_stats stats_of(const lc_group *g, const lc_member *m) {
    uint64_t total = m->packets_received + m->packets_missing;
    lc_peer_stats s = {.delivery_rate = total ? (double)m->packets_received / (double)total : 1.0,
                       .max_missing = -1};
    lc_show_counts(&s, m);
    lc_path *p = m->path;
    if (!p)
        return s;
    s.rtt_ns = p->pace.measure.rtt_ns;
    s.deadline_ns =
        lc_deadline_of(&p->deadline, 1, g->config.deadline_min_ns, g->config.deadline_max_ns);
    s.rate = p->pace.rate * p->pace.packet_bytes;
    s.window = lc_pace_window(&p->pace, p->tx_window);
    s.queue_ns = lc_pace_queue(&p->pace);
    show_silence(&s, g, m);
    int dead = s.silence == LC_SILENT_FROM || s.silence == LC_SILENT_TO;
    s.link_loss = dead ? 1 : lc_loss_share(&p->loss);
    s.link_burst = lc_loss_burst(&p->loss);
    s.expected_missing = m->recovery.expected;
    s.max_missing = m->max_missing;
    s.code = m->recovery.code;
    s.rounds = m->recovery.rounds;
    return s;
}

static int has_room(const lc_host *h) {
    return h->events_in - h->events_out < LC_EVENTS;
}

/* What is news of the paths themselves. */
static void take_path_events(lc_host *h, const lc_interface *via, uint16_t link) {
    for (uint16_t i = 0; via->link->routed && i < via->n_paths; i++) {
        lc_path *p = via->paths[i];
        lc_event event = {.kind = LC_EVENT_SINGLE, .peer = p->number, .link = link};
        if (p->aggregates.news && has_room(h)) {
            p->aggregates.news = 0;
            h->events[h->events_in++ % LC_EVENTS] = event;
        }
        if (p->size.news && has_room(h)) {
            p->size.news = 0;
            event.kind = LC_EVENT_SIZE;
            event.bytes = p->size.size;
            event.wanted = p->size.want;
            h->events[h->events_in++ % LC_EVENTS] = event;
        }
    }
}

/* Under the lock. What callers don't take in time is only counted. */
static void take_events(lc_host *h) {
    lc_event event;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        take_path_events(h, &h->interfaces[i], i);
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        while (has_room(h) && lc_link_event(h->interfaces[i].link, &event)) {
            event.link = i;
            h->events[h->events_in++ % LC_EVENTS] = event;
        }
}

static void take_figures(lc_host *h) {
    lc_link_stats all = {.send_calls = 0};
    for (uint16_t i = 0; i < h->n_interfaces; i++) {
        lc_link_stats of_one;
        lc_link_stats_of(h->interfaces[i].link, &of_one);
        all.overflow += of_one.overflow;
        all.send_calls += of_one.send_calls;
        all.receive_calls += of_one.receive_calls;
        all.refused += of_one.refused;
        all.failed += of_one.failed;
    }
    h->live.socket_overflow = all.overflow;
    h->live.send_calls = all.send_calls;
    h->live.receive_calls = all.receive_calls;
    h->live.fast_path_refusals = all.refused;
    h->live.send_failures = all.failed;
}

/* Takes the lock. */
static void publish(lc_host *h) {
    take_figures(h);
    pthread_mutex_lock(&h->lock);
    take_events(h);
    h->stats = h->live;
    for (lc_group *g = h->groups; g; g = g->next) {
        g->stats = g->live;
        for (uint16_t i = 0; i < g->config.size; i++)
            g->peer_stats[i] = stats_of(g, &g->members[i]);
    }
    lc_page_publish(h);
    pthread_mutex_unlock(&h->lock);
}

/* ---- waiting ---- */

static uint64_t gate_delay_by(const lc_host *h, const lc_interface *via) {
    uint64_t least = UINT64_MAX;
    uint32_t bytes = lc_wire_bytes_max(via);
    uint64_t own = via->link->local ? 0 : lc_rate_delay(&h->rate, h->now, bytes);
    for (uint16_t i = 0; i < via->n_paths && !lc_is_blocked(via); i++) {
        const lc_path *p = via->paths[i];
        if (!p->outs || !lc_window_room(p, lc_wire_bytes(p->outs)))
            continue;
        uint64_t delay = lc_later(lc_pace_delay(&p->pace, h->now, bytes), own);
        if (lc_leaves_by_port(p))
            delay = lc_later(delay, lc_uplink_delay(&lc_exit_of(p)->uplink, h->now, bytes));
        if (delay < least)
            least = delay;
    }
    return least;
}

/* How long until some rate lets a packet go; UINT64_MAX when none holds one back, or only such
 * as wait for their link. */
static uint64_t gate_delay(const lc_host *h) {
    uint64_t least = UINT64_MAX;
    for (uint16_t i = 0; i < h->n_interfaces; i++) {
        uint64_t delay = gate_delay_by(h, &h->interfaces[i]);
        if (delay < least)
            least = delay;
    }
    return least;
}

/* Lets others have the core for a moment, unless they took it for long lately: who yields to them
 * may be away for milliseconds, and who sleeps is woken before them. Returns whether it did. */
static int yield(lc_host *h) {
    if (h->now < h->crowded_until_ns)
        return 0;
    uint64_t begin = lc_clock_now(h->clock);
    sched_yield();
    uint64_t end = lc_clock_now(h->clock);
    if (end - begin > CROWDED_NS) {
        uint64_t stays = lc_later(CROWD_STAYS_NS, CROWD_STAYS_TIMES * (end - begin));
        h->crowded_until_ns = end + (stays < CROWD_MOST_NS ? stays : CROWD_MOST_NS);
    }
    return 1;
}

/* Answers come within microseconds while an operation runs, and waking up takes longer than that:
 * who looks for them looks again at once if something came lately. */
static int is_hot(const lc_host *h) {
    return h->active && h->now - h->busy_ns < h->spin_ns;
}

static int is_hot_for_caller(const lc_host *h) {
    return h->now - h->busy_ns < DRIVE_SPIN_NS;
}

/* Whether a caller wants something of who drives. */
static int is_wanted(lc_host *h) {
    return atomic_load(&h->attention) || atomic_load(&h->stop);
}

/* Takes the mutex `driving` again after a sleep. As long as callers drive, the thread only looks
 * now and then whether they still do, and their packets don't wake it. woken: somebody wants it. */
static void stand_by(lc_host *h, int woken) {
    lc_sleep sleep;
    for (;;) {
        uint32_t drives = atomic_load(&h->drives);
        int alone = woken || drives == h->drives_seen;
        h->drives_seen = drives;
        if (alone && pthread_mutex_trylock(&h->driving) == 0) {
            atomic_store(&h->standing_by, 0);
            return;
        }
        atomic_store(&h->standing_by, 1);
        lc_sleep_begin(&sleep, STAND_BY_NS);
        woken = lc_waiter_sleep(&h->waiter, &sleep);
    }
}

uint64_t lc_idle_ns(const lc_host *h) {
    uint64_t until = h->tick_ns > h->now ? h->tick_ns - h->now : 0;
    uint64_t delay = gate_delay(h); /* 0: a timer of this turn has made packets ready */
    return delay < until ? delay : until;
}

static void begin_sleep(const lc_host *h, lc_sleep *sleep, uint64_t longest_ns) {
    lc_sleep_begin(sleep, longest_ns);
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        if (!h->interfaces[i].failed.code)
            lc_sleep_on(sleep, h->interfaces[i].link, lc_is_blocked(&h->interfaces[i]));
}

/* A caller leaves the links, on which the thread may sleep. Returns whether something has come that
 * the thread would sleep through. */
static int leave_links(lc_host *h) {
    int come = 0;
    if (!atomic_load(&h->sleeping) || atomic_load(&h->standing_by))
        return 0;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        come |= lc_link_watch(h->interfaces[i].link);
    return come;
}

static void rest(lc_host *h) {
    if (is_hot(h) && yield(h))
        return;
    uint64_t until = lc_idle_ns(h);
    if (!until)
        return;
    lc_sleep sleep;
    begin_sleep(h, &sleep, until);
    atomic_store(&h->standing_by, 0);
    atomic_store(&h->sleeping, 1);
    pthread_mutex_unlock(&h->driving);
    int woken = is_wanted(h);
    if (!woken)
        woken = lc_waiter_sleep(&h->waiter, &sleep);
    if (atomic_load(&h->standing_by)) /* what was wanted is no more than that */
        woken = is_wanted(h);
    stand_by(h, woken);
    atomic_store(&h->sleeping, 0);
}

/* ---- turns ---- */

int lc_turn(lc_host *h) {
    lc_read_clock(h);
    lc_batch_completed(h);
    attend(h);
    start_queued(h);
    int busy = lc_receive(h);
    busy |= lc_send_data(h);
    if (busy)
        h->busy_ns = h->now;
    if (h->now >= h->tick_ns)
        lc_tick(h);
    lc_send_control(h);
    settle_turn(h);
    if (h->now - h->published_ns > PUBLISH_NS) {
        publish(h);
        h->published_ns = h->now;
    }
    return busy;
}

void *lc_progress(void *argument) {
    lc_host *h = argument;
    (void)lc_floats_exact();
    pthread_mutex_lock(&h->driving);
    h->now = lc_clock_now(h->clock);
    while (!atomic_load(&h->stop))
        if (!lc_turn(h))
            rest(h);
    pthread_mutex_unlock(&h->driving);
    return NULL;
}

void lc_nudge(lc_host *h) {
    if (atomic_load(&h->caller_sleeps))
        lc_waiter_wake(&h->caller_waiter);
    else if (atomic_load(&h->sleeping))
        lc_waiter_wake(&h->waiter);
}

/* A caller that drives sleeps on the links itself: a packet then wakes the one that waits for it,
 * and not the thread first. */
static void doze(lc_host *h, uint64_t longest_ns) {
    uint64_t until = lc_idle_ns(h);
    if (!until || !longest_ns)
        return;
    lc_sleep sleep;
    begin_sleep(h, &sleep, until < longest_ns ? until : longest_ns);
    atomic_store(&h->caller_sleeps, 1);
    if (!is_wanted(h))
        lc_waiter_sleep(&h->caller_waiter, &sleep);
    atomic_store(&h->caller_sleeps, 0);
}

/* Whether only answers are waited for: none of callers, and nothing is left to be sent. Then the
 * thread, which looks every now and then, does without being woken. */
static int waits_for_answers(const lc_host *h) {
    int sent = !h->listed;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        sent &= !lc_is_blocked(&h->interfaces[i]);
    return sent && h->collectives == h->lingering && !h->queued;
}

/* A thread that sleeps on the links would wake too late for timers, and for every packet of calls
 * to come. */
static void ask_to_stand_by(lc_host *h) {
    if (atomic_load(&h->sleeping) && !atomic_exchange(&h->standing_by, 1))
        lc_waiter_wake(&h->waiter);
    if (is_wanted(h))
        lc_nudge(h);
}

static void ask_to_drive(lc_host *h) {
    atomic_store(&h->standing_by, 0);
    lc_nudge(h);
}

/* Whether a caller may take turns now; a forked child never may. */
static int takes_turns(lc_host *h) {
    return h->forks == lc_forks() && pthread_mutex_trylock(&h->driving) == 0;
}

void lc_drive(lc_host *h, const lc_op *op, uint64_t longest_ns) {
    if (!takes_turns(h)) {
        lc_nudge(h);
        return;
    }
    atomic_fetch_add(&h->drives, 1);
    uint64_t begin = lc_clock_now(h->clock), floats = lc_floats_exact();
    h->busy_ns = begin;
    do {
        if (!lc_turn(h) && !op->finished && !(is_hot_for_caller(h) && yield(h)))
            doze(h, begin + longest_ns > h->now ? begin + longest_ns - h->now : 0);
    } while (!op->finished && h->now - begin < longest_ns && !atomic_load(&h->stop));
    lc_floats_as_before(floats);
    /* It would sleep as long as there was nothing to do when it fell asleep. */
    int needed = !op->finished || h->active || h->n_late_fins || h->queued || h->held_ns > h->now ||
                 atomic_load(&h->stop) || leave_links(h);
    int soon = op->finished && waits_for_answers(h) && (op->letter || lc_linger_sent(op));
    pthread_mutex_unlock(&h->driving);
    if (needed && soon)
        ask_to_stand_by(h);
    else if (needed)
        ask_to_drive(h);
    /* Who wanted something meanwhile woke the thread, which found the mutex taken. */
    else if (is_wanted(h))
        lc_nudge(h);
}

void lc_kick(lc_host *h) {
    if (!takes_turns(h)) {
        lc_nudge(h);
        return;
    }
    atomic_fetch_add(&h->drives, 1);
    uint64_t floats = lc_floats_exact();
    lc_turn(h);
    lc_floats_as_before(floats);
    int soon = waits_for_answers(h) && atomic_load(&h->standing_by);
    int needed = (h->active || leave_links(h)) && !soon;
    pthread_mutex_unlock(&h->driving);
    if (needed || is_wanted(h))
        lc_nudge(h);
}
