/* The engine's surface for callers: hosts, groups, and their operations. */
#define _GNU_SOURCE
#include "completions.h"
#include "gate.h"
#include "host.h"
#include "linger.h"
#include "loop.h"
#include "mix.h"
#include "page.h"
#include "path.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const uint64_t DRIVE_NS = 100000000; /* longest stay of a caller: it has signals to heed */
#define ROUNDING 0x726F756E64u /* keeps what is drawn apart from injected faults ("round") */

const char *lc_version(void) {
    return "0.2.0";
}

uint32_t lc_wire_version(void) {
    return LC_WIRE_VERSION;
}

uint32_t lc_header_bytes(void) {
    return LC_HEADER_BYTES;
}

static void refuse(lc_failure *failure, int code) {
    *failure = (lc_failure){.code = code, .peer = -1};
}

static void call_attention(lc_host *h, int what) {
    atomic_fetch_or(&h->attention, what);
}

/* ---- hosts ---- */

void lc_host_close(lc_host *h) {
    while (h->registered)
        lc_group_close(h->registered);
    lc_host_free(h);
}

/* ---- groups ---- */

static int losses_ok(const lc_group_config *c) {
    for (uint16_t i = 0; c->inject_loss && i < c->size; i++)
        if (!(c->inject_loss[i] >= 0 && c->inject_loss[i] <= 1))
            return 0;
    return c->inject.loss >= 0 && c->inject.loss <= 1;
}

static int group_config_ok(const lc_host *h, const lc_group_config *c) {
    return h->running && c->number && c->size >= 1 && c->size <= h->config.processes &&
           c->rank < c->size && c->deadline_min_ns <= c->deadline_max_ns && losses_ok(c);
}

static void free_group(lc_group *g) {
    lc_mailbox_free(g->mail, &g->host->pool, &g->host->pool_lock);
    while (g->newest) {
        lc_op *op = g->newest;
        g->newest = op->older;
        lc_op_free(op, &g->host->pool, &g->host->pool_lock);
    }
    free(g->members);
    free(g->rank_of_process);
    free(g->peer_stats);
    pthread_cond_destroy(&g->changed);
    free(g);
}

static void init_conditions(lc_group *g) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &attr);
    pthread_condattr_destroy(&attr);
}

/* Returns 0 if the members aren't processes of the host, all different, with this one at `rank`. */
static int place_members(lc_group *g, const lc_group_config *c) {
    lc_host *h = g->host;
    memset(g->rank_of_process, 0xFF, h->config.processes * sizeof *g->rank_of_process);
    for (uint16_t i = 0; i < c->size; i++) {
        uint16_t process = c->members ? c->members[i] : i;
        if (process >= h->config.processes || g->rank_of_process[process] != 0xFFFF ||
            (process == h->config.process) != (i == c->rank))
            return 0;
        g->rank_of_process[process] = i;
        g->peer_stats[i].delivery_rate = 1.0;
        if (i == c->rank)
            continue;
        lc_member *m = &g->members[i];
        m->max_missing = -1;
        g->peer_stats[i].max_missing = -1;
        m->path = &h->paths[process];
        m->met = c->met;
        m->inject_loss = c->inject_loss ? c->inject_loss[i] : c->inject.loss;
        lc_inject faults = lc_inject_link(&c->inject, m->inject_loss);
        g->inject_active |= lc_inject_active(&faults);
    }
    return 1;
}

/* Hands the group to the loop, unless its number is taken. */
static int register_group(lc_host *h, lc_group *g) {
    int taken = 0;
    pthread_mutex_lock(&h->lock);
    for (const lc_group *other = h->registered; other; other = other->next_registered)
        taken |= other->config.number == g->config.number;
    if (!taken) {
        for (uint16_t i = 0; i < g->config.size; i++) /* some aren't reached */
            if (g->members[i].path)
                lc_path_begin(h, g->members[i].path, &h->interfaces[0], lc_clock_now(h->clock));
        g->next_registered = h->registered;
        h->registered = g;
        g->next = h->opened;
        h->opened = g;
        lc_page_open_group(g, g->config.name);
        g->config.name = NULL;
        call_attention(h, LC_LOOK_INBOX);
    }
    pthread_mutex_unlock(&h->lock);
    return !taken;
}

lc_group *lc_group_open(lc_host *h, const lc_group_config *config, lc_failure *failure) {
    refuse(failure, LC_E_ARGUMENT);
    if (!group_config_ok(h, config))
        return NULL;
    lc_group *g = calloc(1, sizeof *g);
    refuse(failure, LC_E_MEMORY);
    if (!g)
        return NULL;
    g->host = h;
    g->config = *config;
    g->config.members = NULL; /* what the caller points to is not kept */
    g->config.inject_loss = NULL;
    init_conditions(g);
    g->members = calloc(config->size, sizeof *g->members);
    g->peer_stats = calloc(config->size, sizeof *g->peer_stats);
    g->rank_of_process = malloc(h->config.processes * sizeof *g->rank_of_process);
    g->mail = lc_mailbox_new(config->size);
    int made = g->members && g->peer_stats && g->rank_of_process && g->mail;
    if (made)
        refuse(failure, LC_E_ARGUMENT);
    if (!made || !place_members(g, config) || !register_group(h, g)) {
        free_group(g);
        return NULL;
    }
    refuse(failure, LC_OK);
    return g;
}

void lc_group_close(lc_group *g) {
    lc_host *h = g->host;
    atomic_store(&g->closing, 1);
    call_attention(h, LC_LOOK_GROUPS);
    lc_nudge(h);
    while (h->threadless && !g->closed)
        lc_turn(h);
    pthread_mutex_lock(&h->lock);
    while (!g->closed || g->callers)
        pthread_cond_wait(&g->changed, &h->lock);
    lc_group **at = &h->registered;
    while (*at != g)
        at = &(*at)->next_registered;
    *at = g->next_registered;
    lc_page_close_group(g);
    pthread_mutex_unlock(&h->lock);
    lc_completions_drop(g);
    free_group(g);
}

/* ---- operations ---- */

/* Under the lock: closing waits until no caller is inside. */
static void leave(lc_group *g) {
    g->callers--;
    if (g->closed)
        pthread_cond_broadcast(&g->changed);
}

/* Under the lock. LC_OK, or why the group takes no operation any more. */
static int refusal_of(const lc_group *g) {
    return atomic_load(&g->closing) ? LC_E_CLOSED : g->failed.code;
}

static uint64_t rounding_of(const lc_group *g, const lc_op *op) {
    if (!op->codec.low.stochastic && !op->gather.low.stochastic)
        return 0;
    const uint64_t name[] = {g->config.fault_group, op->number, g->config.rank};
    return lc_key_of(ROUNDING, name, sizeof name / sizeof name[0]);
}

/* Under the lock. */
static void put_in_inbox(lc_group *g, lc_op *op) {
    lc_host *h = g->host;
    op->number = g->submitted++;
    op->rounding = rounding_of(g, op);
    op->next = h->inbox;
    h->inbox = op;
    op->older = g->newest;
    if (g->newest)
        g->newest->newer = op;
    g->newest = op;
    lc_page_begin(op, op->call.text);
    op->call.text = NULL;
    call_attention(h, LC_LOOK_INBOX);
}

static int is_carried(const lc_op_slot *s, uint16_t peer) {
    uint32_t most = s->op->group->members[peer].path->interface->payload_bytes;
    return s->in_bytes <= most && s->packet_bytes <= most;
}

/* Whether the links of all of its streams carry its packets. */
static int fits_links(const lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_sources; j++)
            if (!is_carried(s, s->ins[j].peer))
                return 0;
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (!is_carried(s, s->outs[j].peer))
                return 0;
    }
    return 1;
}

int64_t lc_group_submit(lc_group *g, lc_call *call) {
    lc_host *h = g->host;
    int code = LC_OK;
    lc_codec codec, gather, plain;
    if ((call->notify && !g->config.completions) || !lc_codecs_make(call, 0, &codec, &gather))
        return LC_E_ARGUMENT;
    (void)lc_codec_make(&plain, LC_ENCODING_SAME, call->dtype, 0);
    /* Links are asked about streams: a level may be for a link that only others have. */
    for (int i = 0; i < LC_LEVELS; i++) {
        const lc_level *level = &call->levels[i];
        uint32_t n = level->elements_per_packet;
        if (level->plain ? plain.wire_bytes(&plain, n) > UINT16_MAX
                         : codec.wire_bytes(&codec, n) > UINT16_MAX ||
                               gather.wire_bytes(&gather, n) > UINT16_MAX)
            return LC_E_ARGUMENT;
    }
    int simd = !(h->config.disable & LC_SIMD);
    lc_op *op = lc_op_build(call, g->config.rank, g->config.size, simd, g->inject_active, &h->pool,
                            &h->pool_lock, &code);
    if (!op)
        return code;
    op->group = g;
    if (!fits_links(op)) {
        lc_op_free(op, &h->pool, &h->pool_lock);
        return LC_E_ARGUMENT;
    }
    op->call.signature ^= g->config.definition;
    op->submitted_ns = lc_clock_now(h->clock);
    op->undriven = call->waits && !call->notify;
    int wake = !op->undriven;
    pthread_mutex_lock(&h->lock);
    code = refusal_of(g);
    if (code == LC_OK)
        put_in_inbox(g, op);
    pthread_mutex_unlock(&h->lock);
    if (code != LC_OK) {
        lc_op_free(op, &h->pool, &h->pool_lock);
        return code;
    }
    call->ticket = (int64_t)(intptr_t)op;
    /* What opens a gate wakes the loop: if it has been opened before, there was nothing to find. */
    if (wake && lc_gate_is_open(call->gate))
        lc_nudge(h);
    return call->ticket;
}

int64_t lc_group_submit_case(lc_group *g, const lc_call *call, lc_call_case *own) {
    lc_call whole = *call;
    whole.in = (const void *)own->in;
    whole.out = (void *)own->out;
    whole.gate = (lc_gate *)own->gate;
    whole.seq = own->seq;
    int64_t ticket = lc_group_submit(g, &whole);
    own->ticket = whole.ticket;
    return ticket;
}

static lc_op *op_of(int64_t ticket) {
    return (lc_op *)(intptr_t)ticket;
}

/* Until the operation is finished, or its result is shown, if that is enough. */
static int wait_for(lc_group *g, lc_op *op, uint64_t timeout_ns, int result) {
    struct timespec until = lc_time_after(timeout_ns);
    int error = 0;
    pthread_mutex_lock(&g->host->lock);
    g->callers++;
    if (op->undriven) {
        op->undriven = 0;
        pthread_mutex_unlock(&g->host->lock);
        lc_drive(g->host, op, timeout_ns < DRIVE_NS ? timeout_ns : DRIVE_NS);
        pthread_mutex_lock(&g->host->lock);
    }
    while (timeout_ns && !op->finished && !(result && op->shown) && !g->closed &&
           error != ETIMEDOUT)
        error = pthread_cond_timedwait(&g->changed, &g->host->lock, &until);
    int code = result && op->shown ? LC_OK
               : op->finished      ? op->failure.code
               : g->closed         ? LC_E_CLOSED
                                   : LC_PENDING;
    leave(g);
    pthread_mutex_unlock(&g->host->lock);
    return code;
}

int lc_group_wait(lc_group *g, int64_t ticket, uint64_t timeout_ns) {
    return wait_for(g, op_of(ticket), timeout_ns, 0);
}

int lc_group_wait_result(lc_group *g, int64_t ticket, uint64_t timeout_ns) {
    return wait_for(g, op_of(ticket), timeout_ns, 1);
}

static int is_finished(lc_group *g, const lc_op *op) {
    pthread_mutex_lock(&g->host->lock);
    int finished = op->finished;
    pthread_mutex_unlock(&g->host->lock);
    return finished;
}

static int has_settled(lc_group *g, const lc_op *op) {
    pthread_mutex_lock(&g->host->lock);
    int settled = op->finished || op->shown;
    pthread_mutex_unlock(&g->host->lock);
    return settled;
}

int lc_group_result(lc_group *g, int64_t ticket, lc_report *report, lc_failure *failure) {
    const lc_op *op = op_of(ticket);
    if (!is_finished(g, op))
        return LC_PENDING;
    *report = op->told;
    *failure = op->failure;
    return op->failure.code;
}

int lc_group_failure(lc_group *g, lc_failure *failure) {
    pthread_mutex_lock(&g->host->lock);
    *failure = g->failed;
    pthread_mutex_unlock(&g->host->lock);
    return failure->code;
}

int lc_group_arrived(lc_group *g, int64_t ticket, uint16_t slot, uint16_t peer, uint8_t *arrived,
                     uint32_t n_packets) {
    lc_op *op = op_of(ticket);
    if (!has_settled(g, op))
        return LC_PENDING;
    const lc_in *in = peer < g->config.size ? lc_op_in(op, slot, peer) : NULL;
    if (!in || in->slot->n_packets != n_packets)
        return LC_E_ARGUMENT;
    for (uint32_t k = 0; k < n_packets; k++)
        arrived[k] = (uint8_t)lc_bit(in->arrived, k);
    return LC_OK;
}

int lc_group_given_up(lc_group *g, int64_t ticket, uint16_t slot, uint16_t peer, uint8_t *given_up,
                      uint32_t n_packets) {
    lc_op *op = op_of(ticket);
    if (!is_finished(g, op))
        return LC_PENDING;
    const lc_out *out = lc_op_out(op, slot, peer);
    if (!out || out->slot->n_packets != n_packets)
        return LC_E_ARGUMENT;
    for (uint32_t k = 0; k < n_packets; k++)
        given_up[k] = out->slot->level->feedback && out->given_up && lc_bit(out->again, k);
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
                       .code = in->decoder ? in->decoder->code : 0,
                       .rounds = in->rounds,
                       .cause = in->cause};
}

int lc_group_streams(lc_group *g, int64_t ticket, lc_stream *streams, uint32_t room) {
    lc_op *op = op_of(ticket);
    if (!is_finished(g, op))
        return LC_E_ARGUMENT;
    uint32_t n = 0;
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_sources; j++, n++)
            if (n < room)
                streams[n] = stream_of(op, &op->slots[i].ins[j]);
    return (int)n;
}

uint32_t lc_group_lingering(lc_group *g, uint32_t *oldest) {
    return lc_lingering(g, oldest);
}

void lc_group_release(lc_group *g, int64_t ticket) {
    lc_op *op = op_of(ticket);
    pthread_mutex_lock(&g->host->lock);
    int finished = op->finished;
    int lingers = op->lingers;
    op->released = finished;
    if (finished) {
        if (op->newer)
            op->newer->older = op->older;
        else
            g->newest = op->older;
        if (op->older)
            op->older->newer = op->newer;
    }
    pthread_mutex_unlock(&g->host->lock);
    if (finished && !lingers) /* else the loop frees it */
        lc_op_free(op, &g->host->pool, &g->host->pool_lock);
}

void lc_group_notify(lc_group *g, int64_t ticket) {
    if (!g->config.completions)
        return;
    lc_op *op = op_of(ticket);
    pthread_mutex_lock(&g->host->lock);
    op->undriven = 0; /* perhaps nobody waits for it */
    op->call.notify = 1;
    if (op->finished)
        lc_completions_put(op);
    pthread_mutex_unlock(&g->host->lock);
    lc_nudge(g->host);
}

/* ---- faults and figures ---- */

void lc_group_abort(lc_group *g, int code, int peer) {
    lc_host *h = g->host;
    pthread_mutex_lock(&h->lock);
    if (!g->failed.code)
        g->failed = (lc_failure){.code = code, .peer = peer};
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&h->lock);
    atomic_store(&g->abort_peer, peer);
    atomic_store(&g->abort_code, code);
    call_attention(h, LC_LOOK_GROUPS);
    lc_nudge(h);
}

/* Takes the lock. */
static void depart(lc_group *g, int peer, int dead) {
    if (peer < 0 || peer >= g->config.size || peer == g->config.rank)
        return;
    lc_member *m = &g->members[peer];
    pthread_mutex_lock(&g->host->lock);
    atomic_store(dead ? &m->reported_dead : &m->left, 1);
    if (!atomic_load(&g->departures))
        atomic_store(&g->departed_at, g->submitted);
    atomic_store(&g->departures, 1);
    pthread_mutex_unlock(&g->host->lock);
    call_attention(g->host, LC_LOOK_GROUPS);
    lc_nudge(g->host);
}

void lc_group_peer_dead(lc_group *g, int peer) {
    depart(g, peer, 1);
}

void lc_group_peer_left(lc_group *g, int peer) {
    depart(g, peer, 0);
}

void lc_group_stats(lc_group *g, lc_stats *stats) {
    lc_host *h = g->host;
    pthread_mutex_lock(&h->lock);
    *stats = g->stats;
    stats->malformed += h->stats.malformed;
    stats->foreign += h->stats.foreign;
    stats->forged += h->stats.forged;
    stats->replayed += h->stats.replayed;
    stats->stale += h->stats.stale;
    stats->socket_overflow = h->stats.socket_overflow;
    stats->send_calls = h->stats.send_calls;
    stats->receive_calls = h->stats.receive_calls;
    stats->control_sent = h->stats.control_sent;
    stats->control_received = h->stats.control_received;
    stats->fast_path_refusals = h->stats.fast_path_refusals;
    stats->send_failures = h->stats.send_failures;
    pthread_mutex_unlock(&h->lock);
}

int lc_group_peer_stats(lc_group *g, int peer, lc_peer_stats *stats) {
    if (peer < 0 || peer >= g->config.size)
        return LC_E_ARGUMENT;
    pthread_mutex_lock(&g->host->lock);
    *stats = g->peer_stats[peer];
    pthread_mutex_unlock(&g->host->lock);
    return LC_OK;
}

void lc_group_last_report(lc_group *g, lc_report *report) {
    pthread_mutex_lock(&g->host->lock);
    *report = g->last;
    pthread_mutex_unlock(&g->host->lock);
}
