/* Runs a scenario: time goes from one thing that happens to the next, and whoever has something to
 * do takes turns until nothing moves. */
#define _GNU_SOURCE
#include "sim_run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

enum { TURNS_MOST = 20000, SPINS_MOST = 100, INSIDE_EVERY = 16 };

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

/* ---- time ---- */

static void set_time(run *r, uint64_t now) {
    for (uint64_t n = 0; n < r->s->links; n++)
        memory_set_now(r->nets[n], now);
}

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
                sim_close_group(r, n, i);
                sim_take_ended(r, i);
                sim_take_messages(r, i);
            }
        if (!me->dead && !is_stalled(r, i)) {
            sim_submit_due(r, i);
            sim_post_due(r, i);
        }
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
    if (r->out->turns % INSIDE_EVERY < (uint64_t)turns)
        sim_check_inside(r, rank);
    uint64_t idle = lc_host_idle_ns(me->host);
    me->spins = idle ? 0 : me->spins + 1;
    if (me->spins == SPINS_MOST)
        sim_fail(r, "rank %u: has nothing to do, and doesn't rest", rank);
    me->wake_ns = idle < NEVER - now ? now + idle : NEVER;
    me->poked = 0;
    sim_take_ended(r, rank);
    sim_take_messages(r, rank);
    sim_submit_due(r, rank);
    sim_post_due(r, rank);
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
    if (sim_may_submit(r, me))
        next = least(next, me->next_submit_ns);
    next = least(next, sim_next_post(r, rank));
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
    for (uint32_t n = 0; n < r->s->groups; n++)
        if (sim_group_talks(r, n))
            return 0;
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
    sim_say_who_talks(r);
}

static void go_on(run *r) {
    uint64_t end = NEVER;
    int still = 0;
    while (!sim_failed(r)) {
        uint64_t now = NEVER;
        uint64_t next[SIM_RANKS];
        sim_leave_groups(r);
        for (uint16_t i = 0; i < r->s->ranks; i++) {
            next[i] = next_of(r, i);
            now = least(now, next[i]);
        }
        if (end == NEVER && all_ended(r))
            end = time_of(r) + r->s->drain * US;
        if (now >= end)
            break;
        if (now > r->last_submit_ns + 2 * patience_ns(r->s)) {
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

/* ---- a scenario ---- */

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
    sim_make_nets(r);
    r->begin_ns = r->last_submit_ns = time_of(r);
    sim_draw_groups(r);
    sim_draw_script(r);
    sim_draw_messages(r);
    sim_draw_trouble(r);
    sim_open_hosts(r);
    sim_start_forging(r);
    for (uint16_t i = 0; i < s->ranks; i++)
        sim_open_group(r, 0, i);
    go_on(r);
    if (!sim_failed(r)) {
        sim_take_rest(r);
        sim_check(r);
        sim_check_all_buffers(r);
        sim_check_messages(r);
    }
    out->virtual_ns = time_of(r) - r->begin_ns;
    for (uint64_t n = 0; n < s->links; n++) {
        out->packets += memory_counts_of(r->nets[n]).sent;
        out->lost += memory_counts_of(r->nets[n]).lost;
        out->second += n ? memory_counts_of(r->nets[n]).sent : 0;
    }
    for (uint32_t n = 0; n < s->groups; n++)
        for (uint16_t i = 0; i < s->ranks; i++)
            sim_close_group(r, n, i);
    for (uint16_t i = 0; i < s->ranks; i++) {
        lc_host_close(r->processes[i].host);
        lc_completions_close(r->processes[i].completions);
    }
    for (uint32_t k = 0; k < s->ops * SIM_RANKS; k++)
        free(r->parts[k].memory);
    for (uint64_t n = 0; n < s->links; n++)
        memory_net_free(r->nets[n]);
    sim_stop_forging(r);
    sim_free_messages(r);
    free(r->parts);
    free(r);
}
