/* The engine's surface for callers. */
#define _GNU_SOURCE
#include "loop.h"
#include "step.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const uint64_t SECOND_NS = 1000000000u;
static const uint64_t DRIVE_NS = 100000000; /* longest stay of a caller: it has signals to heed */

const char *lc_version(void) {
    return "0.1.0";
}

uint32_t lc_header_bytes(void) {
    return LC_HEADER_BYTES;
}

/* ---- open and close ---- */

static int losses_ok(const lc_config *c) {
    for (uint16_t i = 0; c->inject_loss && i < c->size; i++)
        if (!(c->inject_loss[i] >= 0 && c->inject_loss[i] <= 1))
            return 0;
    return c->inject.loss >= 0 && c->inject.loss <= 1;
}

static int config_ok(const lc_config *c) {
    return c->address && c->size >= 1 && c->rank < c->size && c->payload_bytes >= 64 &&
           c->payload_bytes % 8 == 0 && c->socket_buffer >= 0 &&
           c->deadline_min_ns <= c->deadline_max_ns && losses_ok(c) && c->pace_bytes_per_s >= 0;
}

static void free_peers(lc_engine *e) {
    for (uint16_t i = 0; e->peers && i < e->config.size; i++) {
        free(e->peers[i].records);
        free(e->peers[i].held);
        free(e->peers[i].early);
    }
    free(e->peers);
}

static void free_engine(lc_engine *e) {
    while (e->newest) {
        lc_op *op = e->newest;
        e->newest = op->older;
        lc_op_free(op, &e->pool, &e->pool_lock);
    }
    lc_pool_clear(&e->pool);
    lc_link_close(e->link);
    lc_waiter_close(&e->waiter);
    free_peers(e);
    free(e->tail);
    free(e->iov);
    free(e->headers);
    free(e->control_out);
    lc_cells_drop(&e->cells);
    free(e->peer_stats);
    pthread_cond_destroy(&e->changed);
    pthread_cond_destroy(&e->notified);
    pthread_mutex_destroy(&e->driving);
    pthread_mutex_destroy(&e->lock);
    pthread_mutex_destroy(&e->pool_lock);
    free(e);
}

static int make_peers(lc_engine *e) {
    e->peers = calloc(e->config.size, sizeof *e->peers);
    e->peer_stats = calloc(e->config.size, sizeof *e->peer_stats);
    if (!e->peers || !e->peer_stats)
        return 0;
    uint64_t now = lc_clock_now(e->clock);
    uint64_t day = lc_clock_time_of_day(e->clock);
    for (uint16_t i = 0; i < e->config.size; i++) {
        lc_peer *p = &e->peers[i];
        e->peer_stats[i].delivery_rate = 1.0;
        lc_pace_init(&p->pace, now, day - now, lc_wire_bytes_max(e));
        if (i == e->config.rank)
            continue;
        p->inject_loss = e->config.inject_loss ? e->config.inject_loss[i] : e->config.inject.loss;
        lc_inject faults = lc_inject_link(&e->config.inject, p->inject_loss);
        e->inject_active |= lc_inject_active(&faults);
        p->records = calloc(LC_RECORDS, sizeof *p->records);
        p->early = calloc(LC_OPS, sizeof *p->early);
        if (e->config.inject.reorder > 0)
            p->held = malloc(lc_wire_bytes_max(e));
        if (!p->records || !p->early || (e->config.inject.reorder > 0 && !p->held))
            return 0;
    }
    return 1;
}

static int make_cells(lc_engine *e) {
    if (e->config.size < 2)
        return 1;
    if (!lc_cells_make(&e->cells, e->config.eager_bytes, e->config.payload_bytes))
        return 0;
    e->eager = e->cells.n_cells / (e->config.size - 1u);
    return 1;
}

static void init_locks(lc_engine *e) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&e->changed, &attr);
    pthread_cond_init(&e->notified, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&e->driving, NULL);
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->pool_lock, NULL);
}

/* Sets failure->code to LC_OK if it could. */
static void open_link(lc_engine *e, const lc_config *config, lc_link *given, lc_failure *failure) {
    failure->code = LC_E_SYSTEM;
    if (!lc_waiter_open(&e->waiter)) {
        failure->sys_errno = errno;
        return;
    }
    failure->code = LC_OK;
    lc_link *link = given ? given : lc_link_open(config, e->clock, failure);
    if (link && lc_wire_bytes_max(e) > link->packet_max) {
        failure->code = LC_E_ARGUMENT;
        if (!given)
            lc_link_close(link);
        return;
    }
    e->link = link;
}

lc_engine *lc_engine_open_in(const lc_config *config, const lc_setting *setting,
                             lc_failure *failure) {
    memset(failure, 0, sizeof *failure);
    failure->peer = -1;
    failure->code = LC_E_ARGUMENT;
    if (!config_ok(config))
        return NULL;
    lc_engine *e = calloc(1, sizeof *e);
    failure->code = LC_E_MEMORY;
    if (!e)
        return NULL;
    e->config = *config;
    e->waiter.wake_fd = -1;
    e->clock = setting->clock;
    e->threadless = setting->link != NULL;
    init_locks(e);
    lc_rate_init(&e->rate, config->pace_bytes_per_s, lc_clock_now(e->clock));
    size_t packets = (size_t)LC_BATCH_RUNS * LC_RUN_PACKETS;
    e->tail = calloc(LC_TAIL, sizeof *e->tail);
    e->iov = calloc(2 * packets, sizeof *e->iov);
    e->headers = calloc(packets, LC_HEADER_BYTES);
    e->control_out = calloc(LC_BATCH_RUNS, config->payload_bytes);
    if (e->tail && e->iov && e->headers && e->control_out && make_cells(e) && make_peers(e)) {
        open_link(e, config, setting->link, failure);
    }
    if (failure->code != LC_OK) {
        free_engine(e);
        return NULL;
    }
    e->config.address = NULL; /* what the caller points to is not kept */
    e->config.inject_loss = NULL;
    return e;
}

lc_engine *lc_engine_open(const lc_config *config, lc_failure *failure) {
    const lc_setting real = {.clock = &lc_system_clock};
    return lc_engine_open_in(config, &real, failure);
}

static int start_thread(lc_engine *e) {
    /* Signals are Python's to handle: the thread takes none. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&e->thread, NULL, lc_progress, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return LC_E_SYSTEM;
    (void)pthread_setname_np(e->thread, "lossycoll");
    return LC_OK;
}

int lc_engine_start(lc_engine *e, uint64_t session, const lc_address *peers) {
    int bad = -1;
    uint16_t size = e->config.size;
    if (e->running)
        return LC_E_ARGUMENT;
    int code = lc_link_set_peers(e->link, peers, size, &bad);
    if (code != LC_OK)
        return code;
    uint32_t share = lc_link_credits(e->link, lc_wire_bytes_max(e)) / (size > 1 ? size - 1u : 1);
    e->window = share ? share : 1;
    e->expect = (lc_expect){session, e->config.group, e->config.rank, e->config.size,
                            e->config.payload_bytes};
    for (uint16_t i = 0; i < e->config.size; i++) {
        e->peers[i].pace.same_host = lc_link_is_here(e->link, i);
        e->peers[i].tx_window = 1; /* until the peer says what it can take */
    }
    if (e->threadless)
        e->now = lc_clock_now(e->clock);
    else
        code = start_thread(e);
    e->running = code == LC_OK;
    return code;
}

void lc_engine_close(lc_engine *e) {
    if (e->running && e->threadless) {
        lc_last_turn(e);
    } else if (e->running) {
        atomic_store(&e->stop, 1);
        lc_waiter_wake(&e->waiter);
        pthread_join(e->thread, NULL);
    }
    pthread_mutex_lock(&e->lock);
    e->closed = 1;
    pthread_cond_broadcast(&e->changed);
    pthread_cond_broadcast(&e->notified);
    while (e->callers)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    free_engine(e);
}

int lc_engine_turn(lc_engine *e) {
    return lc_turn(e);
}

uint64_t lc_engine_idle_ns(lc_engine *e) {
    return lc_idle_ns(e);
}

void lc_engine_link(lc_engine *e, lc_link_info *info) {
    lc_link_info_of(e->link, info);
}

/* ---- operations ---- */

static struct timespec deadline_after(uint64_t timeout_ns) {
    uint64_t most = 3600 * SECOND_NS;
    uint64_t at = lc_now() + (timeout_ns < most ? timeout_ns : most);
    return (struct timespec){(time_t)(at / SECOND_NS), (long)(at % SECOND_NS)};
}

/* Under the lock: closing waits until no caller is inside. */
static void leave(lc_engine *e) {
    e->callers--;
    if (e->closed)
        pthread_cond_broadcast(&e->changed);
}

int64_t lc_engine_submit(lc_engine *e, lc_call *call) {
    int code = LC_OK;
    lc_codec codec;
    if (!e->running || !lc_codec_make(&codec, call->encoding, call->dtype, 0) ||
        codec.wire_bytes(&codec, call->elements_per_packet) > e->config.payload_bytes)
        return LC_E_ARGUMENT;
    int simd = !(e->config.disable & LC_SIMD);
    lc_op *op = lc_op_build(call, e->config.rank, e->config.size, simd, e->inject_active, &e->pool,
                            &e->pool_lock, &code);
    if (!op)
        return code;
    op->submitted_ns = lc_clock_now(e->clock);
    pthread_mutex_lock(&e->lock);
    if (e->closed || e->failed.code) {
        code = e->closed ? LC_E_CLOSED : e->failed.code;
        pthread_mutex_unlock(&e->lock);
        lc_op_free(op, &e->pool, &e->pool_lock);
        return code;
    }
    op->number = e->submitted++;
    op->next = e->inbox;
    e->inbox = op;
    op->older = e->newest;
    if (e->newest)
        e->newest->newer = op;
    e->newest = op;
    atomic_store(&e->inbox_full, 1);
    op->undriven = call->waits && !call->notify;
    int wake = !op->undriven;
    pthread_mutex_unlock(&e->lock);
    call->ticket = (int64_t)(intptr_t)op;
    if (wake)
        lc_nudge(e);
    return call->ticket;
}

static lc_op *op_of(int64_t ticket) {
    return (lc_op *)(intptr_t)ticket;
}

int lc_engine_wait(lc_engine *e, int64_t ticket, uint64_t timeout_ns) {
    lc_op *op = op_of(ticket);
    struct timespec until = deadline_after(timeout_ns);
    int error = 0;
    pthread_mutex_lock(&e->lock);
    e->callers++;
    if (op->undriven) {
        op->undriven = 0;
        pthread_mutex_unlock(&e->lock);
        lc_drive(e, op, timeout_ns < DRIVE_NS ? timeout_ns : DRIVE_NS);
        pthread_mutex_lock(&e->lock);
    }
    while (!op->finished && !e->closed && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&e->changed, &e->lock, &until);
    int code = op->finished ? op->failure.code : e->closed ? LC_E_CLOSED : LC_PENDING;
    leave(e);
    pthread_mutex_unlock(&e->lock);
    return code;
}

static int is_finished(lc_engine *e, const lc_op *op) {
    pthread_mutex_lock(&e->lock);
    int finished = op->finished;
    pthread_mutex_unlock(&e->lock);
    return finished;
}

int lc_engine_result(lc_engine *e, int64_t ticket, lc_report *report, lc_failure *failure) {
    const lc_op *op = op_of(ticket);
    if (!is_finished(e, op))
        return LC_PENDING;
    *report = op->report;
    *failure = op->failure;
    return op->failure.code;
}

int lc_engine_arrived(lc_engine *e, int64_t ticket, uint16_t slot, uint16_t peer, uint8_t *arrived,
                      uint32_t n_packets) {
    lc_op *op = op_of(ticket);
    if (!is_finished(e, op))
        return LC_PENDING;
    const lc_in *in = peer < e->config.size ? lc_op_in(op, slot, peer) : NULL;
    if (!in || in->slot->n_packets != n_packets)
        return LC_E_ARGUMENT;
    for (uint32_t k = 0; k < n_packets; k++)
        arrived[k] = (uint8_t)lc_bit(in->arrived, k);
    return LC_OK;
}

int lc_engine_given_up(lc_engine *e, int64_t ticket, uint16_t slot, uint16_t peer,
                       uint8_t *given_up, uint32_t n_packets) {
    lc_op *op = op_of(ticket);
    if (!is_finished(e, op))
        return LC_PENDING;
    const lc_out *out = lc_op_out(op, slot, peer);
    if (!out || out->slot->n_packets != n_packets)
        return LC_E_ARGUMENT;
    for (uint32_t k = 0; k < n_packets; k++)
        given_up[k] = out->given_up && lc_bit(out->again, k);
    return LC_OK;
}

static lc_stream stream_of(const lc_op *op, const lc_in *in) {
    uint64_t begin = op->submitted_ns;
    return (lc_stream){.first_ns = in->started_ns ? in->started_ns - begin : 0,
                       .last_ns = in->started_ns ? in->last_ns - begin : 0,
                       .gap_ns = in->gap_ns,
                       .settled_ns = in->settled_ns ? in->settled_ns - begin : 0,
                       .packets = in->slot->n_packets,
                       .arrived = in->n_arrived,
                       .slot = in->slot->desc.number,
                       .peer = in->peer,
                       .cause = in->cause};
}

int lc_engine_streams(lc_engine *e, int64_t ticket, lc_stream *streams, uint32_t room) {
    lc_op *op = op_of(ticket);
    if (!is_finished(e, op))
        return LC_E_ARGUMENT;
    uint32_t n = 0;
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_sources; j++, n++)
            if (n < room)
                streams[n] = stream_of(op, &op->slots[i].ins[j]);
    return (int)n;
}

void lc_engine_release(lc_engine *e, int64_t ticket) {
    lc_op *op = op_of(ticket);
    pthread_mutex_lock(&e->lock);
    int finished = op->finished;
    if (finished) {
        if (op->newer)
            op->newer->older = op->older;
        else
            e->newest = op->older;
        if (op->older)
            op->older->newer = op->newer;
    }
    pthread_mutex_unlock(&e->lock);
    if (finished)
        lc_op_free(op, &e->pool, &e->pool_lock);
}

int64_t lc_engine_next(lc_engine *e, uint64_t timeout_ns) {
    struct timespec until = deadline_after(timeout_ns);
    int error = 0;
    int64_t ticket = 0;
    pthread_mutex_lock(&e->lock);
    e->callers++;
    while (!e->done_first && !e->closed && !e->next_stopped && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&e->notified, &e->lock, &until);
    lc_op *op = e->done_first;
    if (op) {
        e->done_first = op->next;
        if (!e->done_first)
            e->done_last = NULL;
        ticket = (int64_t)(intptr_t)op;
    } else if (e->closed || e->next_stopped) {
        ticket = LC_E_CLOSED;
    }
    leave(e);
    pthread_mutex_unlock(&e->lock);
    return ticket;
}

void lc_engine_stop_next(lc_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->next_stopped = 1;
    pthread_cond_broadcast(&e->notified);
    pthread_mutex_unlock(&e->lock);
}

/* ---- faults and figures ---- */

void lc_engine_abort(lc_engine *e, int code, int peer) {
    pthread_mutex_lock(&e->lock);
    if (!e->failed.code)
        e->failed = (lc_failure){.code = code, .peer = peer};
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    atomic_store(&e->abort_peer, peer);
    atomic_store(&e->abort_code, code);
    lc_nudge(e);
}

void lc_engine_peer_dead(lc_engine *e, int peer) {
    if (peer < 0 || peer >= e->config.size || peer == e->config.rank)
        return;
    atomic_store(&e->peers[peer].doomed, 1);
    atomic_store(&e->doom, 1);
    lc_nudge(e);
}

void lc_engine_stats(lc_engine *e, lc_stats *stats) {
    pthread_mutex_lock(&e->lock);
    *stats = e->stats;
    pthread_mutex_unlock(&e->lock);
}

int lc_engine_peer_stats(lc_engine *e, int peer, lc_peer_stats *stats) {
    if (peer < 0 || peer >= e->config.size)
        return LC_E_ARGUMENT;
    pthread_mutex_lock(&e->lock);
    *stats = e->peer_stats[peer];
    pthread_mutex_unlock(&e->lock);
    return LC_OK;
}

int lc_engine_event(lc_engine *e, lc_event *event) {
    pthread_mutex_lock(&e->lock);
    int found = e->events_in != e->events_out;
    if (found)
        *event = e->events[e->events_out++ % LC_EVENTS];
    pthread_mutex_unlock(&e->lock);
    return found;
}

void lc_engine_last_report(lc_engine *e, lc_report *report) {
    pthread_mutex_lock(&e->lock);
    *report = e->last;
    pthread_mutex_unlock(&e->lock);
}
