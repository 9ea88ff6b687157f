/* What the processes of a scenario call: they submit, wait for and release operations, look at what
 * became of their buffers, and leave groups. */
#include "sim_run.h"

#include <stdlib.h>
#include <string.h>

#include "op.h"

enum { GUARD = 64, GUARD_BYTE = 0xC3, POISON = 0xA5 };

/* ---- buffers ---- */

static void make_buffers(const sim_op *op, sim_part *p, uint16_t rank) {
    p->bytes = op->elements * sim_element_bytes(op->dtype);
    size_t each = (p->bytes + 7) / 8 * 8 + GUARD;
    p->memory = malloc(GUARD + 2 * each + 2 * p->bytes + 1);
    memset(p->memory, GUARD_BYTE, GUARD + 2 * each);
    p->in = p->memory + GUARD;
    p->out = op->in_place ? p->in : p->in + each;
    p->result = p->memory + GUARD + 2 * each;
    p->shown_result = p->result + p->bytes;
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
    if (p->shown && memcmp(p->result, p->shown_result, p->bytes) != 0)
        sim_fail(r, "rank %u: the result has changed after it was there", rank);
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

void sim_note_failure(run *r, uint32_t group, uint16_t process, int code, const char *what,
                      uint32_t number) {
    if (!sim_may_fail(r, group, code))
        sim_fail(r, "%s %u, process %u: ended with code %d", what, number, process, code);
    sim_spread_failure(r, group, process);
}

/* How a caller waits for its part: by lc_completions_next, or by doing the engine's work. */
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
        sim_open_group(r, r->group_of[number], process);
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
                    .deterministic = op->ordered,
                    .needed = op->selective ? op->needed[rank] : NULL,
                    .n_needed = op->selective ? op->n_needed[rank] : 0,
                    .weights = op->weighted ? op->weights[rank] : NULL,
                    .divisor = op->divisor,
                    .scale = op->scale,
                    .signature = op->seed + (uint64_t)sim_is_odd(r, number, process),
                    .notify = is_notified(r, number, rank),
                    .waits = does_wait(r, number, rank),
                    .timeout_ns = patience_ns(r->s)};
    memcpy(call.levels, op->levels, sizeof call.levels);
    p->ticket = lc_group_submit(g->at[process], &call);
    if (p->ticket > 0) {
        p->submitted = 1;
        p->submitted_ns = time_of(r);
        if (call.waits) /* as long as nothing may pass: a turn */
            lc_group_wait(g->at[process], p->ticket, 0);
    } else {
        p->finished = 1; /* the group has failed */
        p->code = (int)p->ticket;
        r->processes[process].finished++;
        sim_note_failure(r, r->group_of[number], process, p->code, "submitted operation", number);
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

/* The queue hands over all of the process's groups that have ended, each once: this one among the
 * next ones. */
static void take_notified(run *r, uint32_t number, uint16_t process) {
    while (!part_at(r, number, process)->notified && !sim_failed(r)) {
        uint64_t owner = r->s->groups;
        int64_t ticket = lc_completions_next(r->processes[process].completions, 0, &owner);
        int found = 0;
        for (uint32_t k = 0; k < r->s->ops && ticket > 0; k++) {
            if (r->group_of[k] != owner || part_at(r, k, process)->ticket != ticket)
                continue;
            sim_part *p = part_at(r, k, process);
            found = !p->notified && is_notified(r, k, (uint16_t)group_of(r, k)->rank_of[process]);
            p->notified = 1;
        }
        if (!found)
            sim_fail(r, "process %u: lc_completions_next says %lld of group %llu", process,
                     (long long)ticket, (unsigned long long)owner);
        r->out->notified++;
    }
}

/* A result that is there before the operation's end is what it is in the end. */
static void look_at_result(run *r, lc_group *group, sim_part *p) {
    if (p->shown || lc_group_wait_result(group, p->ticket, 0) != LC_OK)
        return;
    p->shown = 1;
    memcpy(p->shown_result, p->out, p->bytes);
    r->out->shown++;
}

void sim_take_ended(run *r, uint16_t process) {
    process_state *me = &r->processes[process];
    for (uint32_t i = 0; i < me->submitted; i++) {
        uint32_t number = me->ops[i];
        sim_part *p = part_at(r, number, process);
        lc_group *group = group_of(r, number)->at[process];
        uint16_t rank = (uint16_t)group_of(r, number)->rank_of[process];
        lc_failure failure;
        if (p->finished)
            continue;
        if (lc_group_result(group, p->ticket, &p->report, &failure) == LC_PENDING) {
            look_at_result(r, group, p);
            continue;
        }
        p->finished = 1;
        p->code = failure.code;
        p->finished_ns = time_of(r);
        if (p->code != LC_OK)
            sim_note_failure(r, r->group_of[number], process, p->code, "operation", number);
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

int sim_may_submit(const run *r, const process_state *p) {
    return p->submitted < p->n_ops && p->submitted - p->finished < r->s->deep;
}

void sim_submit_due(run *r, uint16_t process) {
    process_state *me = &r->processes[process];
    uint64_t now = time_of(r);
    while (sim_may_submit(r, me) && now >= me->next_submit_ns && !sim_failed(r)) {
        submit(r, process, me->ops[me->submitted++]);
        me->next_submit_ns = now + sim_below(&r->random, r->s->skew * US + 1);
        me->poked = 1;
        r->last_submit_ns = now;
        if (sim_happens(&r->random, r->s->rekeys))
            lc_host_rekey(me->host);
    }
}

void sim_close_group(run *r, uint32_t number, uint16_t process) {
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
    if ((stats.malformed || stats.foreign) && !r->s->forged)
        sim_fail(r, "process %u: %llu packets malformed, %llu foreign", process,
                 (unsigned long long)stats.malformed, (unsigned long long)stats.foreign);
    int aged = r->s->rekeys && (r->s->jitter || r->s->late); /* by more epochs than are taken */
    if ((stats.forged && !r->s->forged && !aged) ||
        (stats.replayed && !r->s->forged && !r->s->twice))
        sim_fail(r, "process %u: %llu packets forged, %llu replayed", process,
                 (unsigned long long)stats.forged, (unsigned long long)stats.replayed);
    if (number == 0) { /* these are the host's */
        r->out->refused += stats.forged + stats.replayed;
        r->out->replayed += stats.replayed;
    }
    if (stats.operations != finished && !r->processes[process].dead && code == LC_OK)
        sim_fail(r, "group %u, process %u: counts %llu operations", number, process,
                 (unsigned long long)stats.operations);
    r->out->missing += stats.packets_missing;
    r->out->recovered += stats.packets_recovered;
    r->out->kept += stats.order_kept;
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

void sim_leave_groups(run *r) {
    for (uint32_t n = 1; n < r->s->groups; n++) {
        group_state *g = &r->groups[n];
        int over = 1;
        for (uint32_t k = 0; k < r->s->ops && over; k++)
            for (uint16_t i = 0; i < g->size && r->group_of[k] == n; i++)
                over &= part_of(r, k, i)->finished || r->processes[g->members[i]].dead;
        over = over && !sim_group_talks(r, n);
        for (uint16_t i = 0; i < g->size && over; i++)
            if (g->close_ns[g->members[i]] == NEVER)
                g->close_ns[g->members[i]] = time_of(r) + sim_below(&r->random, 20 * MS);
    }
}

/* ---- in the end ---- */

void sim_take_rest(run *r) {
    for (uint32_t k = 0; k < r->s->ops; k++)
        for (uint16_t i = 0; i < r->ops[k].ranks; i++)
            if (part_of(r, k, i)->submitted && !part_of(r, k, i)->finished)
                take_streams(r, NULL, k, i);
}

void sim_check_all_buffers(run *r) {
    for (uint32_t k = 0; k < r->s->ops; k++)
        for (uint16_t i = 0; i < r->ops[k].ranks; i++)
            if (part_of(r, k, i)->submitted)
                check_buffers(r, &r->ops[k], part_of(r, k, i), k, i);
}
