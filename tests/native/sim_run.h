/* Inside the simulation: a scenario that runs, which its files share. sim_run.c runs it,
 * sim_setup.c sets it up, sim_calls.c is what its processes call, sim_trouble.c is what goes wrong
 * by the processes' own doing, sim_check.c says what must be true in the end. */
#ifndef LC_SIM_RUN_H
#define LC_SIM_RUN_H

#include "link_memory.h"
#include "sim.h"

enum { LINKS = 2 }; /* of a process, at most */

static const uint64_t US = 1000, MS = 1000000, NEVER = UINT64_MAX;
static const uint64_t PATIENCE_NS = 300000000000u; /* that an operation may take */

typedef struct {
    uint16_t size;
    uint16_t members[SIM_RANKS]; /* process by rank */
    int rank_of[SIM_RANKS];      /* by process; -1: no member */
    lc_group *at[SIM_RANKS];     /* by process; NULL: not open there */
    uint64_t close_ns[SIM_RANKS];
    uint64_t aborts_ns[SIM_RANKS]; /* when a process ends it, by itself or since it hears of it */
    int aborted;                   /* some process has */
} group_state;

typedef struct {
    lc_host *host;
    uint64_t wake_ns;
    uint64_t dies_ns;             /* NEVER: it doesn't */
    uint64_t knows_ns[SIM_RANKS]; /* when it hears that another one has died */
    uint64_t next_submit_ns;
    uint32_t ops[SIM_OPS]; /* those of its groups */
    uint32_t n_ops, submitted, finished;
    int dead, poked, spins;
} process_state;

typedef struct {
    const sim_scenario *s;
    sim_outcome *out;
    memory_net *nets[LINKS]; /* those of s->links; time is that of the first */
    uint64_t random, begin_ns, last_submit_ns;
    uint64_t stall_from_ns, stall_to_ns;
    uint16_t stalled;
    process_state processes[SIM_RANKS];
    group_state groups[SIM_GROUPS];
    uint32_t group_of[SIM_OPS];
    uint32_t odd_op; /* the operation that one process takes for another; SIM_OPS: none */
    uint16_t odd_process;
    sim_op ops[SIM_OPS];
    sim_part *parts; /* SIM_RANKS for each operation */
} run;

/* All of these: the first failure stays. */
void sim_fail(run *r, const char *format, ...);
static inline int sim_failed(const run *r) {
    return r->out->failure[0] != 0;
}

static inline uint64_t time_of(const run *r) {
    return memory_now(r->nets[0]);
}

static inline group_state *group_of(run *r, uint32_t op) {
    return &r->groups[r->group_of[op]];
}

static inline sim_part *part_of(const run *r, uint32_t op, uint16_t rank) {
    return &r->parts[op * SIM_RANKS + rank];
}

/* The same by process. */
static inline sim_part *part_at(run *r, uint32_t op, uint16_t process) {
    return part_of(r, op, (uint16_t)group_of(r, op)->rank_of[process]);
}

/* ---- setting up, in this order ---- */

void sim_make_nets(run *r);
void sim_draw_groups(run *r);
void sim_draw_script(run *r);
void sim_open_hosts(run *r);
/* The first group is everybody's and there from the start; others are opened when they are used. */
void sim_open_group(run *r, uint32_t number, uint16_t process);

/* ---- what callers do ---- */

/* Whether a process has an operation to submit, and as few unfinished ones as it may have. */
int sim_may_submit(const run *r, const process_state *p);
void sim_submit_due(run *r, uint16_t process);
/* Takes what has ended. */
void sim_take_ended(run *r, uint16_t process);
/* What a group counted, before it goes. */
void sim_close_group(run *r, uint32_t number, uint16_t process);
/* Members leave a group, each when it likes to, once all have ended what it was for. */
void sim_leave_groups(run *r);
/* What came of operations that their processes didn't live to end. */
void sim_take_rest(run *r);
void sim_check_all_buffers(run *r);

/* ---- what goes wrong by the processes' own doing ---- */

void sim_draw_trouble(run *r);
/* Whether the process takes the operation for another. */
int sim_is_odd(const run *r, uint32_t op, uint16_t process);
/* Whether operations of the group may fail with the code. */
int sim_may_fail(const run *r, uint32_t group, int code);
/* The process ends the group, if it is time; and it has an error of the group, of which the others
 * hear. */
void sim_abort_due(run *r, uint32_t group, uint16_t process);
void sim_spread_failure(run *r, uint32_t group, uint16_t process);

/* ---- what must be true in the end ---- */

void sim_check(run *r);

#endif
