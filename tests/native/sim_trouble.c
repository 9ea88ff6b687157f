/* What goes wrong by the processes' own doing: one takes an operation for another, one ends a group
 * in the middle. Whoever has an error of a group lets the other members hear of it, as a program
 * does whose control plane works. */
#include "sim_run.h"

static const uint64_t HEARD_NS = 50000000; /* within so long */

void sim_draw_trouble(run *r) {
    uint64_t random = sim_mix(r->s->seed + 4);
    for (uint32_t n = 0; n < r->s->groups; n++)
        for (uint16_t i = 0; i < SIM_RANKS; i++)
            r->groups[n].aborts_ns[i] = NEVER;
    r->odd_op = SIM_OPS;
    if (r->s->odd) {
        r->odd_op = (uint32_t)sim_below(&random, r->s->ops);
        const group_state *g = group_of(r, r->odd_op);
        r->odd_process = g->members[sim_below(&random, g->size)];
    }
    if (r->s->aborts) {
        group_state *g = &r->groups[sim_below(&random, r->s->groups)];
        uint64_t span = (r->s->skew + 4 * r->s->delay) * US * r->s->ops + MS;
        g->aborts_ns[g->members[sim_below(&random, g->size)]] =
            r->begin_ns + sim_below(&random, span);
    }
}

int sim_is_odd(const run *r, uint32_t op, uint16_t process) {
    return op == r->odd_op && process == r->odd_process;
}

int sim_may_fail(const run *r, uint32_t group, int code) {
    if (sim_is_open(r->s) && sim_is_forgeable(code))
        return 1;
    int odd = r->odd_op < SIM_OPS && r->group_of[r->odd_op] == group;
    return (code == LC_E_MISMATCH && odd) ||
           (code == LC_E_ABORTED && (odd || r->groups[group].aborted));
}

void sim_spread_failure(run *r, uint32_t group, uint16_t process) {
    group_state *g = &r->groups[group];
    r->out->failed++;
    for (uint16_t i = 0; i < g->size; i++)
        if (g->members[i] != process && g->aborts_ns[g->members[i]] == NEVER)
            g->aborts_ns[g->members[i]] = time_of(r) + sim_below(&r->random, HEARD_NS);
}

void sim_abort_due(run *r, uint32_t group, uint16_t process) {
    group_state *g = &r->groups[group];
    if (!g->at[process] || time_of(r) < g->aborts_ns[process])
        return;
    g->aborts_ns[process] = NEVER;
    lc_failure failure;
    if (lc_group_failure(g->at[process], &failure) != LC_OK)
        return; /* it knows */
    g->aborted = 1;
    lc_group_abort(g->at[process], LC_E_ABORTED, -1);
    r->processes[process].poked = 1;
    sim_spread_failure(r, group, process);
}
