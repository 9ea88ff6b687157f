/* Inside the simulation: a scenario that runs, which its files share. sim_run.c runs it,
 * sim_setup.c sets it up, sim_calls.c is what its processes call, sim_trouble.c is what goes wrong
 * by the processes' own doing, sim_check.c says what must be true in the end. */
#ifndef LC_SIM_RUN_H
#define LC_SIM_RUN_H

#include "link_memory.h"
#include "sim.h"

enum { LINKS = 2 }; /* of a process, at most */
enum { SIM_SESSION = 0x5EED };

static const uint64_t US = 1000, MS = 1000000, NEVER = UINT64_MAX;

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
    lc_completions *completions; /* of its groups; owners are their numbers */
    uint64_t wake_ns;
    uint64_t dies_ns;             /* NEVER: it doesn't */
    uint64_t knows_ns[SIM_RANKS]; /* when it hears that another one has died */
    uint64_t next_submit_ns;
    uint32_t ops[SIM_OPS]; /* those of its groups */
    uint32_t n_ops, submitted, finished;
    int dead, poked, spins;
} process_state;

/* A send, and the receive that is meant for it. */
typedef struct {
    uint32_t group;
    uint16_t from, to; /* processes */
    int any;           /* the receive takes those of its tag from any rank */
    uint32_t number;   /* among those of its tag from one rank to the other */
    uint64_t tag, bytes;
    uint64_t send_ns, receive_ns;                    /* when they are posted */
    uint8_t *data, *room;                            /* room: a guard, where it goes, a guard */
    int64_t send, receive;                           /* tickets */
    int send_posted, receive_posted, sent, received; /* the latter: has ended, well or not */
    int code_sent, code_received;
    int taken;                           /* by some receive */
    int lossy_send, lossy_receive;       /* what each end asks for */
    uint8_t repair_send, repair_receive; /* the same */
    uint8_t missing;                     /* lc_missing of the receive */
    int64_t lacking;                     /* packets that the receive lacks */
} sim_message;

typedef struct sim_forger sim_forger;

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
    sim_message messages[SIM_MESSAGES];
    sim_forger *forger; /* NULL: there is none */
} run;

/* All of these: the first failure stays. */
void sim_fail(run *r, const char *format, ...);
static inline int sim_failed(const run *r) {
    return r->out->failure[0] != 0;
}

/* That an operation or a message may take. Forged records may hold one up for good. */
static inline uint64_t patience_ns(const sim_scenario *s) {
    return (s->forged ? 20 : 300) * 1000 * MS;
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
/* An error of a process, which is expected or not; and others hear of it. */
void sim_note_failure(run *r, uint32_t group, uint16_t process, int code, const char *what,
                      uint32_t number);
/* What came of operations that their processes didn't live to end. */
void sim_take_rest(run *r);
void sim_check_all_buffers(run *r);

/* ---- messages ---- */

void sim_draw_messages(run *r);
void sim_free_messages(run *r);
void sim_post_due(run *r, uint16_t process);
uint64_t sim_next_post(const run *r, uint16_t process);
/* Takes what has ended, and looks at what came. */
void sim_take_messages(run *r, uint16_t process);
/* Whether some process still waits for a message of the group, or for its being heard. */
int sim_group_talks(const run *r, uint32_t group);
void sim_say_who_talks(run *r);
void sim_check_messages(run *r);

/* ---- what a hostile process throws in ---- */

void sim_start_forging(run *r);
void sim_stop_forging(run *r);
/* Codes that forged packets may bring about. */
int sim_is_forgeable(int code);
/* Whether what was thrown could not touch what an operation (its number in the group), or messages
 * between two processes, give. */
int sim_spares_op(const run *r, uint32_t group, uint32_t number);
int sim_spares_messages(const run *r, uint32_t group, uint16_t from, uint16_t to);

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
/* The engine's counts agree with what they count. Between turns of the process. */
void sim_check_inside(run *r, uint16_t process);

#endif
