/* Runs a scenario: time goes from one thing that happens to the next, and whoever has something to
 * do takes turns until nothing moves. */
#define _GNU_SOURCE
#include "sim_run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "step.h"
#include "wire.h"

enum { GUARD = 64, GUARD_BYTE = 0xC3, POISON = 0xA5, TURNS_MOST = 20000, SPINS_MOST = 100 };

static const uint64_t PATIENCE_NS = 300000000000u; /* that an operation may take */
static const uint64_t SESSION = 0x5EED;

static void set_time(run *r, uint64_t now) {
    for (uint64_t n = 0; n < r->s->links; n++)
        memory_set_now(r->nets[n], now);
}

/* By which link two processes reach each other. */
static uint16_t link_between(const run *r, uint16_t a, uint16_t b) {
    uint64_t pair = a < b ? (uint64_t)a << 8 | b : (uint64_t)b << 8 | a;
    return (uint16_t)((sim_mix(sim_mix(r->s->seed + 2) ^ pair) >> 16) % r->s->links);
}

/* The same by process. */
static sim_part *part_at(run *r, uint32_t op, uint16_t process) {
    return part_of(r, op, (uint16_t)group_of(r, op)->rank_of[process]);
}

void sim_fail(run *r, const char *format, ...) {
    va_list arguments;
    if (sim_failed(r))
        return;
    int n = snprintf(r->out->failure, sizeof r->out->failure,
                     "at %.6f s: ", (double)(time_of(r) - r->begin_ns) * 1e-9);
    va_start(arguments, format);
    vsnprintf(r->out->failure + n, sizeof r->out->failure - (size_t)n, format, arguments);
    va_end(arguments);
}

/* ---- setting up ---- */

static memory_path first_path(const sim_scenario *s) {
    return (memory_path){.delay_ns = s->delay * US,
                         .jitter_ns = s->jitter * US,
                         .late = (double)s->late / 1000,
                         .late_ns = s->late_by * US,
                         .loss = (double)s->loss / 1000,
                         .burst = (double)s->burst,
                         .twice = (double)s->twice / 1000,
                         .bytes_per_s = (double)s->mbit * 125000,
                         .queue_ns = s->queue * US};
}

/* Only the first net is bad, and only its links are ever full. */
static void make_nets(run *r) {
    const sim_scenario *s = r->s;
    for (uint64_t n = 0; n < s->links; n++) {
        r->nets[n] = memory_net_new((uint16_t)s->ranks, LC_HEADER_BYTES + (uint32_t)s->payload,
                                    (uint32_t)s->capacity, sim_mix(s->seed + 1 + 2 * n));
        for (uint16_t i = 0; i < s->ranks; i++)
            for (uint16_t j = 0; j < s->ranks; j++)
                *memory_path_of(r->nets[n], i, j) =
                    n ? (memory_path){.delay_ns = US} : first_path(s);
        memory_set_same_host(r->nets[n], n || s->same_host);
    }
    memory_set_full(r->nets[0], (double)s->full / 1000, 200 * US);
}

static lc_host *open_host(run *r, uint16_t process) {
    const sim_scenario *s = r->s;
    lc_host_config c = {.address = "memory",
                        .process = process,
                        .processes = (uint16_t)s->ranks,
                        .payload_bytes = (uint16_t)s->payload,
                        .eager_bytes = s->eager};
    lc_link *links[LINKS];
    lc_failure failure;
    for (uint64_t n = 0; n < s->links; n++)
        links[n] = memory_link_open(r->nets[n], process);
    lc_setting setting = {memory_clock(r->nets[0]), links, (uint16_t)s->links};
    lc_host *host = lc_host_open_in(&c, &setting, &failure);
    if (!host)
        abort();
    return host;
}

static void open_hosts(run *r) {
    for (uint16_t i = 0; i < r->s->ranks; i++)
        r->processes[i].host = open_host(r, i);
    for (uint16_t i = 0; i < r->s->ranks; i++) {
        lc_address peers[SIM_RANKS] = {{.port = 0}};
        for (uint16_t j = 0; j < r->s->ranks; j++)
            peers[j].link = link_between(r, i, j);
        if (lc_host_start(r->processes[i].host, SESSION, peers) != LC_OK)
            abort();
    }
}

/* The first group is everybody's and there from the start; others are opened when they are used. */
static void open_group(run *r, uint32_t number, uint16_t process) {
    const sim_scenario *s = r->s;
    group_state *g = &r->groups[number];
    lc_group_config c = {.number = number + 1,
                         .rank = (uint16_t)g->rank_of[process],
                         .size = g->size,
                         .members = g->members,
                         .fault_group = number,
                         .deadline_min_ns = s->deadline * US / 4,
                         .deadline_max_ns = s->deadline * US,
                         .inject = {.loss = (double)s->inject_loss / 1000,
                                    .burst = (double)s->inject_burst,
                                    .dup = (double)s->inject_dup / 1000,
                                    .reorder = (double)s->inject_reorder / 1000,
                                    .seed = s->seed},
                         .met = number == 0};
    lc_failure failure;
    g->at[process] = lc_group_open(r->processes[process].host, &c, &failure);
    if (!g->at[process])
        sim_fail(r, "group %u, process %u: %d", number, process, failure.code);
    for (uint16_t i = 0; i < g->size && g->at[process]; i++) /* those that died before */
        if (r->processes[g->members[i]].dead &&
            r->processes[process].knows_ns[g->members[i]] == NEVER)
            lc_group_peer_dead(g->at[process], i);
}

static void draw_groups(run *r) {
    for (uint32_t n = 0; n < r->s->groups; n++) {
        group_state *g = &r->groups[n];
        for (uint16_t i = 0; i < r->s->ranks; i++) {
            g->rank_of[i] = -1;
            g->close_ns[i] = NEVER;
            if (n == 0 || sim_happens(&r->random, 600))
                g->members[g->size++] = i;
        }
        if (g->size < 2) {
            g->size = 2;
            g->members[0] = 0;
            g->members[1] = 1;
        }
        for (uint16_t i = g->size; n && i > 1; i--) { /* ranks in any order */
            uint16_t j = (uint16_t)sim_below(&r->random, i), kept = g->members[i - 1];
            g->members[i - 1] = g->members[j];
            g->members[j] = kept;
        }
        for (uint16_t i = 0; i < g->size; i++)
            g->rank_of[g->members[i]] = i;
    }
    for (uint32_t k = 0; k < r->s->ops; k++) {
        r->group_of[k] = (uint32_t)sim_below(&r->random, r->s->groups);
        const group_state *g = group_of(r, k);
        for (uint16_t i = 0; i < g->size; i++) {
            process_state *p = &r->processes[g->members[i]];
            p->ops[p->n_ops++] = k;
        }
        sim_make_op(&r->ops[k], r->s, g->size, sim_mix(r->s->seed ^ (uint64_t)(k + 1) << 32));
    }
}

static void draw_script(run *r) {
    const sim_scenario *s = r->s;
    uint64_t span = (s->skew + s->delay) * US * s->ops + MS;
    for (uint16_t i = 0; i < s->ranks; i++) {
        r->processes[i].dies_ns = NEVER;
        r->processes[i].wake_ns = r->begin_ns;
        r->processes[i].next_submit_ns = r->begin_ns + sim_below(&r->random, s->skew * US + 1);
        for (uint16_t j = 0; j < SIM_RANKS; j++)
            r->processes[i].knows_ns[j] = NEVER;
    }
    for (uint64_t n = 0; n < s->dead; n++) {
        uint16_t who = (uint16_t)sim_below(&r->random, s->ranks);
        uint64_t when = r->begin_ns + sim_below(&r->random, span);
        if (r->processes[who].dies_ns != NEVER)
            continue;
        r->processes[who].dies_ns = when;
        for (uint16_t j = 0; j < s->ranks; j++)
            r->processes[j].knows_ns[who] = when + sim_below(&r->random, 50 * MS);
    }
    r->stalled = (uint16_t)sim_below(&r->random, s->ranks);
    r->stall_from_ns = s->stall ? r->begin_ns + sim_below(&r->random, span) : NEVER;
    r->stall_to_ns = s->stall ? r->stall_from_ns + s->stall * US : NEVER;
}

/* ---- buffers ---- */

static void make_buffers(const sim_op *op, sim_part *p, uint16_t rank) {
    p->bytes = op->elements * sim_element_bytes(op->dtype);
    size_t each = (p->bytes + 7) / 8 * 8 + GUARD;
    p->memory = malloc(GUARD + 2 * each + p->bytes + 1);
    memset(p->memory, GUARD_BYTE, GUARD + 2 * each);
    p->in = p->memory + GUARD;
    p->out = op->in_place ? p->in : p->in + each;
    p->result = p->memory + GUARD + 2 * each;
    for (uint64_t i = 0; i < op->elements; i++) {
        sim_store(op->dtype, p->in, i, sim_input(op, rank, i));
        if (!op->in_place)
            sim_store(op->dtype, p->out, i, sim_before(op, i));
    }
}

static int is_all(const uint8_t *at, size_t n, uint8_t value) {
    for (size_t i = 0; i < n; i++)
        if (at[i] != value)
            return 0;
    return 1;
}

/* The result is kept, and what belongs to the caller again is used for something else. */
static void take_buffers(run *r, const sim_op *op, sim_part *p, uint16_t rank) {
    uint32_t bytes = sim_element_bytes(op->dtype);
    memcpy(p->result, p->out, p->bytes);
    for (uint64_t i = 0; !op->in_place && i < op->elements; i++) {
        uint8_t was[8];
        sim_store(op->dtype, was, 0, sim_input(op, rank, i));
        if (memcmp(p->in + i * bytes, was, bytes) != 0)
            sim_fail(r, "rank %u: the input has changed", rank);
    }
    memset(p->in, POISON, p->bytes);
    memset(p->out, POISON, p->bytes);
}

static void check_buffers(run *r, const sim_op *op, const sim_part *p, uint32_t number,
                          uint16_t rank) {
    size_t each = (p->bytes + 7) / 8 * 8 + GUARD;
    const uint8_t *second = p->in + each;
    int good = is_all(p->memory, GUARD, GUARD_BYTE) &&
               is_all(p->in + p->bytes, each - p->bytes, GUARD_BYTE) &&
               (op->in_place ? is_all(second, each, GUARD_BYTE)
                             : is_all(second + p->bytes, each - p->bytes, GUARD_BYTE));
    if (!good)
        sim_fail(r, "operation %u, rank %u: written beside its buffers", number, rank);
    if (p->finished && !(is_all(p->in, p->bytes, POISON) && is_all(p->out, p->bytes, POISON)))
        sim_fail(r, "operation %u, rank %u: written after its end", number, rank);
}

/* ---- what callers do ---- */

/* How a caller waits for its part: by lc_group_next, or by doing the engine's work. */
static uint8_t is_notified(const run *r, uint32_t number, uint16_t rank) {
    return sim_mix(r->ops[number].seed ^ rank) % 1000 < r->s->notify;
}

static uint8_t does_wait(const run *r, uint32_t number, uint16_t rank) {
    return !is_notified(r, number, rank) &&
           sim_mix(r->ops[number].seed ^ 64u ^ rank) % 1000 < r->s->waits;
}

static void submit(run *r, uint16_t process, uint32_t number) {
    const sim_op *op = &r->ops[number];
    group_state *g = group_of(r, number);
    uint16_t rank = (uint16_t)g->rank_of[process];
    sim_part *p = part_of(r, number, rank);
    if (!g->at[process])
        open_group(r, r->group_of[number], process);
    if (sim_failed(r))
        return;
    make_buffers(op, p, rank);
    lc_call call = {.slots = op->slots[rank],
                    .edges = op->edges[rank],
                    .n_slots = op->n_slots[rank],
                    .n_edges = op->n_edges[rank],
                    .in = p->in,
                    .out = p->out,
                    .in_elements = op->elements,
                    .out_elements = op->elements,
                    .scratch_elements = op->scratch[rank],
                    .dtype = op->dtype,
                    .encoding = op->encoding,
                    .lingers = (uint8_t)r->s->lingers,
                    .needed = op->selective ? op->needed[rank] : NULL,
                    .n_needed = op->selective ? op->n_needed[rank] : 0,
                    .weights = op->weighted ? op->weights[rank] : NULL,
                    .divisor = op->divisor,
                    .scale = op->scale,
                    .signature = op->seed + (uint64_t)sim_is_odd(r, number, process),
                    .notify = is_notified(r, number, rank),
                    .waits = does_wait(r, number, rank),
                    .timeout_ns = PATIENCE_NS};
    memcpy(call.levels, op->levels, sizeof call.levels);
    p->ticket = lc_group_submit(g->at[process], &call);
    if (p->ticket > 0) {
        p->submitted = 1;
        p->submitted_ns = time_of(r);
        if (call.waits) /* as long as nothing may pass: a turn */
            lc_group_wait(g->at[process], p->ticket, 0);
    } else if (p->ticket < 0 && sim_may_fail(r, r->group_of[number], (int)p->ticket)) {
        p->finished = 1; /* the group has failed */
        p->code = (int)p->ticket;
        r->processes[process].finished++;
        sim_spread_failure(r, r->group_of[number], process);
    } else {
        sim_fail(r, "operation %u, rank %u: submit says %d", number, rank, (int)p->ticket);
    }
}

/* What came of one stream, and what its sender has heard of it. group: NULL for a process that died
 * in the middle of it. */
static void take_stream(run *r, lc_group *group, uint32_t number, uint16_t rank, uint32_t segment,
                        int tree, int from) {
    sim_part *p = part_of(r, number, rank);
    const sim_segment *g = &r->ops[number].segments[segment];
    int level = tree ? g->down_level[rank] : g->up_level[from];
    uint16_t slot = sim_slot(segment, tree, level);
    uint8_t *arrived = p->arrived[segment][tree][from];
    uint32_t n = sim_packets(&r->ops[number], g, level);
    const lc_in *in = lc_op_in((lc_op *)(intptr_t)p->ticket, slot, (uint16_t)from);
    p->cause[segment][tree][from] = in->cause;
    for (uint32_t k = 0; k < n; k++)
        arrived[k] = (uint8_t)lc_bit(in->arrived, k);
    uint8_t told[SIM_PACKETS];
    if (!group)
        return;
    int code = lc_group_arrived(group, p->ticket, slot, (uint16_t)from, told, n);
    if (code != LC_OK || memcmp(told, arrived, n) != 0)
        sim_fail(r, "operation %u, rank %u: lc_group_arrived is wrong", number, rank);
}

static void take_given_up(run *r, lc_group *group, uint32_t number, uint16_t rank, uint32_t segment,
                          int tree, uint16_t to) {
    sim_part *p = part_of(r, number, rank);
    const sim_segment *g = &r->ops[number].segments[segment];
    int level = tree ? g->down_level[to] : g->up_level[rank];
    int code =
        lc_group_given_up(group, p->ticket, sim_slot(segment, tree, level), to,
                          p->given_up[segment][tree][to], sim_packets(&r->ops[number], g, level));
    if (code != LC_OK)
        sim_fail(r, "operation %u, rank %u: lc_group_given_up says %d", number, rank, code);
}

static void take_streams(run *r, lc_group *group, uint32_t number, uint16_t rank) {
    const sim_op *op = &r->ops[number];
    for (uint32_t i = 0; i < op->n_segments; i++) {
        const sim_segment *g = &op->segments[i];
        for (uint16_t peer = 0; peer < op->ranks; peer++) {
            if (g->up_parent[peer] == rank)
                take_stream(r, group, number, rank, i, 0, peer);
            if (g->down_parent[rank] == peer)
                take_stream(r, group, number, rank, i, 1, peer);
            if (!op->feedback || !group)
                continue;
            if (g->up_parent[rank] == peer)
                take_given_up(r, group, number, rank, i, 0, peer);
            if (g->down_parent[peer] == rank)
                take_given_up(r, group, number, rank, i, 1, peer);
        }
    }
}

/* lc_group_next hands over all that have ended, each once: this one among the next ones. */
static void take_notified(run *r, uint32_t number, uint16_t process) {
    uint32_t group = r->group_of[number];
    while (!part_at(r, number, process)->notified && !sim_failed(r)) {
        int64_t ticket = lc_group_next(r->groups[group].at[process], 0);
        int found = 0;
        for (uint32_t k = 0; k < r->s->ops && ticket > 0; k++) {
            if (r->group_of[k] != group || part_at(r, k, process)->ticket != ticket)
                continue;
            sim_part *p = part_at(r, k, process);
            found = !p->notified && is_notified(r, k, (uint16_t)r->groups[group].rank_of[process]);
            p->notified = 1;
        }
        if (!found)
            sim_fail(r, "group %u, process %u: lc_group_next says %lld", group, process,
                     (long long)ticket);
        r->out->notified++;
    }
}

static void take_ended(run *r, uint16_t process) {
    process_state *me = &r->processes[process];
    for (uint32_t i = 0; i < me->submitted; i++) {
        uint32_t number = me->ops[i];
        sim_part *p = part_at(r, number, process);
        lc_group *group = group_of(r, number)->at[process];
        uint16_t rank = (uint16_t)group_of(r, number)->rank_of[process];
        lc_failure failure;
        if (p->finished || lc_group_result(group, p->ticket, &p->report, &failure) == LC_PENDING)
            continue;
        p->finished = 1;
        p->code = failure.code;
        p->finished_ns = time_of(r);
        if (p->code != LC_OK && !sim_may_fail(r, r->group_of[number], p->code))
            sim_fail(r, "operation %u, rank %u: ended with code %d, peer %d", number, rank, p->code,
                     failure.peer);
        if (p->code != LC_OK)
            sim_spread_failure(r, r->group_of[number], process);
        if (is_notified(r, number, rank))
            take_notified(r, number, process);
        take_streams(r, p->code == LC_OK ? group : NULL, number, rank);
        take_buffers(r, &r->ops[number], p, rank);
        r->out->lingered += lc_group_lingering(group, NULL) > 0;
        if (number % 2 == 0 || !r->s->lingers) /* others are freed with their group */
            lc_group_release(group, p->ticket);
        me->finished++;
        r->out->ended++;
    }
}

static int may_submit(const run *r, const process_state *p) {
    return p->submitted < p->n_ops && p->submitted - p->finished < r->s->deep;
}

static void submit_due(run *r, uint16_t process) {
    process_state *me = &r->processes[process];
    uint64_t now = time_of(r);
    while (may_submit(r, me) && now >= me->next_submit_ns && !sim_failed(r)) {
        submit(r, process, me->ops[me->submitted++]);
        me->next_submit_ns = now + sim_below(&r->random, r->s->skew * US + 1);
        me->poked = 1;
        r->last_submit_ns = now;
    }
}

/* What a group counted, before it goes. */
static void close_group(run *r, uint32_t number, uint16_t process) {
    group_state *g = &r->groups[number];
    lc_stats stats;
    uint64_t finished = 0;
    if (!g->at[process])
        return;
    for (uint32_t k = 0; k < r->s->ops; k++)
        if (r->group_of[k] == number)
            finished += (uint64_t)part_at(r, k, process)->finished;
    lc_failure failure;
    int code = lc_group_failure(g->at[process], &failure);
    if (code != LC_OK && !sim_may_fail(r, number, code))
        sim_fail(r, "group %u, process %u: has failed with code %d, peer %d", number, process,
                 failure.code, failure.peer);
    lc_group_stats(g->at[process], &stats);
    if (stats.malformed || stats.foreign)
        sim_fail(r, "process %u: %llu packets malformed, %llu foreign", process,
                 (unsigned long long)stats.malformed, (unsigned long long)stats.foreign);
    if (stats.operations != finished && !r->processes[process].dead && code == LC_OK)
        sim_fail(r, "group %u, process %u: counts %llu operations", number, process,
                 (unsigned long long)stats.operations);
    r->out->missing += stats.packets_missing;
    r->out->recovered += stats.packets_recovered;
    r->out->resent += stats.packets_resent;
    lc_group_close(g->at[process]);
    g->at[process] = NULL;
    r->processes[process].poked = 1;
    for (uint16_t i = 0; i < g->size; i++) { /* who leaves says so, and others hear of it */
        uint16_t other = g->members[i];
        if (g->at[other] && !r->processes[process].dead) {
            lc_group_peer_left(g->at[other], g->rank_of[process]);
            r->processes[other].poked = 1;
        }
    }
}

/* Members leave a group, each when it likes to, once all have ended what it was for. */
static void leave_groups(run *r) {
    for (uint32_t n = 1; n < r->s->groups; n++) {
        group_state *g = &r->groups[n];
        int over = 1;
        for (uint32_t k = 0; k < r->s->ops && over; k++)
            for (uint16_t i = 0; i < g->size && r->group_of[k] == n; i++)
                over &= part_of(r, k, i)->finished || r->processes[g->members[i]].dead;
        for (uint16_t i = 0; i < g->size && over; i++)
            if (g->close_ns[g->members[i]] == NEVER)
                g->close_ns[g->members[i]] = time_of(r) + sim_below(&r->random, 20 * MS);
    }
}

/* ---- time ---- */

static int is_stalled(const run *r, uint16_t rank) {
    uint64_t now = time_of(r);
    return rank == r->stalled && now >= r->stall_from_ns && now < r->stall_to_ns;
}

static void die(run *r, uint16_t rank) {
    r->processes[rank].dead = 1;
    for (uint64_t n = 0; n < r->s->links; n++)
        for (uint16_t j = 0; j < r->s->ranks; j++)
            memory_path_of(r->nets[n], rank, j)->cut = memory_path_of(r->nets[n], j, rank)->cut = 1;
}

static void obey_script(run *r) {
    uint64_t now = time_of(r);
    for (uint16_t i = 0; i < r->s->ranks; i++)
        if (!r->processes[i].dead && now >= r->processes[i].dies_ns)
            die(r, i);
    for (uint16_t i = 0; i < r->s->ranks; i++) {
        process_state *me = &r->processes[i];
        for (uint16_t j = 0; j < r->s->ranks; j++)
            if (!me->dead && now >= me->knows_ns[j] && j != i) {
                me->knows_ns[j] = NEVER;
                for (uint32_t n = 0; n < r->s->groups; n++)
                    if (r->groups[n].at[i] && r->groups[n].rank_of[j] >= 0)
                        lc_group_peer_dead(r->groups[n].at[i], r->groups[n].rank_of[j]);
                me->poked = 1;
            }
        for (uint32_t n = 0; n < r->s->groups && !me->dead && !is_stalled(r, i); n++)
            sim_abort_due(r, n, i);
        for (uint32_t n = 0; n < r->s->groups && !me->dead; n++)
            if (now >= r->groups[n].close_ns[i] && !is_stalled(r, i)) {
                close_group(r, n, i);
                take_ended(r, i);
            }
        if (!me->dead && !is_stalled(r, i))
            submit_due(r, i);
    }
}

static void take_turns(run *r, uint16_t rank) {
    process_state *me = &r->processes[rank];
    uint64_t now = time_of(r);
    int turns = 1;
    while (lc_host_turn(me->host) && turns < TURNS_MOST)
        turns++;
    r->out->turns += (uint64_t)turns;
    if (turns == TURNS_MOST)
        sim_fail(r, "rank %u: %d turns at once", rank, turns);
    uint64_t idle = lc_host_idle_ns(me->host);
    me->spins = idle ? 0 : me->spins + 1;
    if (me->spins == SPINS_MOST)
        sim_fail(r, "rank %u: has nothing to do, and doesn't rest", rank);
    me->wake_ns = idle < NEVER - now ? now + idle : NEVER;
    me->poked = 0;
    take_ended(r, rank);
    submit_due(r, rank);
    if (me->poked)
        me->wake_ns = now;
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* When something happens next; and who is woken by it. */
static uint64_t next_of(run *r, uint16_t rank) {
    const process_state *me = &r->processes[rank];
    uint64_t next = me->wake_ns;
    if (me->dead)
        return NEVER;
    for (uint64_t n = 0; n < r->s->links; n++)
        next = least(next, memory_next(r->nets[n], rank));
    if (may_submit(r, me))
        next = least(next, me->next_submit_ns);
    for (uint32_t n = 0; n < r->s->groups; n++)
        if (r->groups[n].at[rank])
            next = least(next, least(r->groups[n].close_ns[rank], r->groups[n].aborts_ns[rank]));
    for (uint16_t j = 0; j < r->s->ranks; j++)
        next = least(next, me->knows_ns[j]);
    if (is_stalled(r, rank) ||
        (rank == r->stalled && next >= r->stall_from_ns && next < r->stall_to_ns))
        next = r->stall_to_ns;
    return least(next, me->dies_ns);
}

static int all_ended(const run *r) {
    for (uint16_t i = 0; i < r->s->ranks; i++) {
        if (r->processes[i].dead)
            continue;
        if (r->processes[i].finished < r->processes[i].n_ops)
            return 0;
        for (uint32_t n = 0; n < r->s->groups; n++)
            if (r->groups[n].at[i] && lc_group_lingering(r->groups[n].at[i], NULL))
                return 0;
    }
    return 1;
}

static void say_who_waits(run *r) {
    for (uint16_t i = 0; i < r->s->ranks; i++) {
        const process_state *p = &r->processes[i];
        for (uint32_t n = 0; n < r->s->groups && !p->dead; n++)
            if (r->groups[n].at[i] && lc_group_lingering(r->groups[n].at[i], NULL))
                sim_fail(r, "group %u, process %u: still lingers", n, i);
        for (uint32_t k = 0; k < p->n_ops && !p->dead; k++)
            if (!part_at(r, p->ops[k], i)->finished)
                sim_fail(r, "operation %u, process %u: hasn't ended (submitted: %d)", p->ops[k], i,
                         part_at(r, p->ops[k], i)->submitted);
    }
}

static void go_on(run *r) {
    uint64_t end = NEVER;
    int still = 0;
    while (!sim_failed(r)) {
        uint64_t now = NEVER;
        uint64_t next[SIM_RANKS];
        leave_groups(r);
        for (uint16_t i = 0; i < r->s->ranks; i++) {
            next[i] = next_of(r, i);
            now = least(now, next[i]);
        }
        if (end == NEVER && all_ended(r))
            end = time_of(r) + r->s->drain * US;
        if (now >= end)
            break;
        if (now > r->last_submit_ns + 2 * PATIENCE_NS) {
            say_who_waits(r);
            break;
        }
        still = now > time_of(r) ? 0 : still + 1;
        if (still == TURNS_MOST)
            sim_fail(r, "time stands still");
        set_time(r, now > time_of(r) ? now : time_of(r));
        obey_script(r);
        for (uint16_t i = 0; i < r->s->ranks && !sim_failed(r); i++)
            if (!r->processes[i].dead && !is_stalled(r, i) &&
                (next[i] <= now || r->processes[i].poked))
                take_turns(r, i);
    }
}

/* What came of operations that their processes didn't live to end. */
static void take_rest(run *r) {
    for (uint32_t k = 0; k < r->s->ops; k++)
        for (uint16_t i = 0; i < r->ops[k].ranks; i++)
            if (part_of(r, k, i)->submitted && !part_of(r, k, i)->finished)
                take_streams(r, NULL, k, i);
}

static void check_all_buffers(run *r) {
    for (uint32_t k = 0; k < r->s->ops; k++)
        for (uint16_t i = 0; i < r->ops[k].ranks; i++)
            if (part_of(r, k, i)->submitted)
                check_buffers(r, &r->ops[k], part_of(r, k, i), k, i);
}

/* The random numbers of packets and those of all else are apart, so that a smaller network goes
 * through the same. */
void sim_run(const sim_scenario *s, sim_outcome *out) {
    run *r = calloc(1, sizeof *r);
    if (!r)
        abort();
    memset(out, 0, sizeof *out);
    r->s = s;
    r->out = out;
    r->random = sim_mix(s->seed);
    r->parts = calloc(s->ops * SIM_RANKS, sizeof *r->parts);
    make_nets(r);
    r->begin_ns = r->last_submit_ns = time_of(r);
    draw_groups(r);
    draw_script(r);
    sim_draw_trouble(r);
    open_hosts(r);
    for (uint16_t i = 0; i < s->ranks; i++)
        open_group(r, 0, i);
    go_on(r);
    if (!sim_failed(r)) {
        take_rest(r);
        sim_check(r);
        check_all_buffers(r);
    }
    out->virtual_ns = time_of(r) - r->begin_ns;
    for (uint64_t n = 0; n < s->links; n++) {
        out->packets += memory_counts_of(r->nets[n]).sent;
        out->lost += memory_counts_of(r->nets[n]).lost;
        out->second += n ? memory_counts_of(r->nets[n]).sent : 0;
    }
    for (uint32_t n = 0; n < s->groups; n++)
        for (uint16_t i = 0; i < s->ranks; i++)
            close_group(r, n, i);
    for (uint16_t i = 0; i < s->ranks; i++)
        lc_host_close(r->processes[i].host);
    for (uint32_t k = 0; k < s->ops * SIM_RANKS; k++)
        free(r->parts[k].memory);
    for (uint64_t n = 0; n < s->links; n++)
        memory_net_free(r->nets[n]);
    free(r->parts);
    free(r);
}
