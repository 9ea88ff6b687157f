/* Sets a scenario up: nets, hosts and groups, and what is drawn of the script. */
#include "sim_run.h"

#include <stdlib.h>

#include "step.h"
#include "wire.h"

/* By which link two processes reach each other. */
static uint16_t link_between(const run *r, uint16_t a, uint16_t b) {
    uint64_t pair = a < b ? (uint64_t)a << 8 | b : (uint64_t)b << 8 | a;
    return (uint16_t)((sim_mix(sim_mix(r->s->seed + 2) ^ pair) >> 16) % r->s->links);
}

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

static uint32_t datagram_bytes(const sim_scenario *s) {
    return LC_HEADER_BYTES + (uint32_t)s->payload + (s->sealed ? LC_TAG_BYTES : 0);
}

/* Only the first net is bad, and only its links are ever full. */
void sim_make_nets(run *r) {
    const sim_scenario *s = r->s;
    for (uint64_t n = 0; n < s->links; n++) {
        r->nets[n] = memory_net_new((uint16_t)s->ranks, datagram_bytes(s), (uint32_t)s->capacity,
                                    sim_mix(s->seed + 1 + 2 * n));
        for (uint16_t i = 0; i < s->ranks; i++)
            for (uint16_t j = 0; j < s->ranks; j++)
                *memory_path_of(r->nets[n], i, j) =
                    n ? (memory_path){.delay_ns = US} : first_path(s);
        memory_set_same_host(r->nets[n], n || s->same_host);
        memory_set_late(r->nets[n], s->reads * US);
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
    r->processes[process].completions = lc_completions_open();
    lc_host *host = lc_host_open_in(&c, &setting, &failure);
    if (!host)
        abort();
    return host;
}

/* The secret of the way from one process to another. */
static void put_secret(uint64_t seed, uint16_t from, uint16_t to, uint8_t *at) {
    for (uint64_t i = 0; i < LC_SECRET_BYTES; i++)
        at[i] = (uint8_t)sim_mix(sim_mix(seed ^ (uint64_t)from << 16 ^ to) + i);
}

static void seal(const run *r, uint16_t process) {
    uint8_t secrets[SIM_RANKS][2][LC_SECRET_BYTES];
    for (uint16_t i = 0; i < r->s->ranks; i++) {
        put_secret(r->s->seed, process, i, secrets[i][0]);
        put_secret(r->s->seed, i, process, secrets[i][1]);
    }
    lc_seal_config c = {.cipher = (uint8_t)(1 + r->s->seed % 3),
                        .clear = r->s->sealed == 2,
                        .filter = 99,
                        .secrets = secrets[0][0]};
    lc_failure failure;
    if (lc_host_seal(r->processes[process].host, &c, &failure) != LC_OK)
        abort();
}

void sim_open_hosts(run *r) {
    for (uint16_t i = 0; i < r->s->ranks; i++)
        r->processes[i].host = open_host(r, i);
    for (uint16_t i = 0; r->s->sealed && i < r->s->ranks; i++)
        seal(r, i);
    for (uint16_t i = 0; i < r->s->ranks; i++) {
        lc_address peers[SIM_RANKS] = {{.port = 0}};
        for (uint16_t j = 0; j < r->s->ranks; j++)
            peers[j].link = link_between(r, i, j);
        if (lc_host_start(r->processes[i].host, SIM_SESSION, peers) != LC_OK)
            abort();
    }
}

void sim_open_group(run *r, uint32_t number, uint16_t process) {
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
                         .met = number == 0,
                         .completions = r->processes[process].completions,
                         .owner = number};
    lc_failure failure;
    g->at[process] = lc_group_open(r->processes[process].host, &c, &failure);
    if (!g->at[process])
        sim_fail(r, "group %u, process %u: %d", number, process, failure.code);
    for (uint16_t i = 0; i < g->size && g->at[process]; i++) /* those that died before */
        if (r->processes[g->members[i]].dead &&
            r->processes[process].knows_ns[g->members[i]] == NEVER)
            lc_group_peer_dead(g->at[process], i);
}

void sim_draw_groups(run *r) {
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

void sim_draw_script(run *r) {
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
