/* Scenarios: drawn, printed, read. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {
#define SIM_FIELD(name, what) #name,
    SIM_FIELDS(SIM_FIELD)
#undef SIM_FIELD
};

static uint64_t *field(sim_scenario *s, int i) {
    return (uint64_t *)(void *)s + i;
}

void sim_print(const sim_scenario *s) {
    sim_scenario copy = *s;
    for (int i = 0; i < SIM_N_FIELDS; i++)
        if (*field(&copy, i))
            fprintf(stderr, "%s=%llu ", names[i], (unsigned long long)*field(&copy, i));
    fprintf(stderr, "\n");
}

int sim_set(sim_scenario *s, const char *text) {
    for (int i = 0; i < SIM_N_FIELDS; i++) {
        size_t n = strlen(names[i]);
        if (strncmp(text, names[i], n) == 0 && text[n] == '=') {
            *field(s, i) = strtoull(text + n + 1, NULL, 10);
            return 1;
        }
    }
    return 0;
}

static uint64_t clamp(uint64_t v, uint64_t least, uint64_t most) {
    return v < least ? least : v > most ? most : v;
}

void sim_tidy(sim_scenario *s) {
    s->ranks = clamp(s->ranks, 2, SIM_RANKS);
    s->groups = clamp(s->groups, 1, SIM_GROUPS);
    s->ops = clamp(s->ops, 1, SIM_OPS);
    s->deep = clamp(s->deep, 1, SIM_OPS);
    s->segments = clamp(s->segments, 1, SIM_SEGMENTS);
    s->packets = clamp(s->packets, 1, SIM_PACKETS);
    s->payload = clamp(s->payload / 8 * 8, 64, 1024);
    s->capacity = clamp(s->capacity, 16, 100000);
    s->delay = clamp(s->delay, 1, 1000000);
    s->dtypes = clamp(s->dtypes, 0, 2);
    s->dead = clamp(s->dead, 0, s->ranks - 1);
    s->deadline = clamp(s->deadline, 300000, 10000000);
    s->drain = clamp(s->drain, 1000, 100000000);
    s->links = clamp(s->links, 1, 2);
    s->messages = clamp(s->messages, 0, SIM_MESSAGES);
    s->message_bytes = clamp(s->message_bytes, 0, 200000);
    s->sealed = clamp(s->sealed, 0, lc_crypto_load(NULL) ? 0 : 2);
    s->any = s->any && !s->dead; /* whose message another receive took would wait for good */
}

int sim_has_trouble(const sim_scenario *s) {
    return s->odd || s->aborts || sim_is_open(s);
}

int sim_is_open(const sim_scenario *s) {
    return s->forged && !s->sealed;
}

int sim_is_clean(const sim_scenario *s) {
    return sim_loses_nothing(s) && !sim_has_trouble(s);
}

int sim_loses_nothing(const sim_scenario *s) {
    return !s->jitter && !s->late && !s->loss && !s->twice && !s->queue && !s->inject_loss &&
           !s->inject_reorder && !s->stall && !s->dead && !s->forged;
}

/* Mostly small: what goes wrong goes wrong with little as well, and little is fast. */
static uint64_t size(uint64_t *random, uint64_t most) {
    uint64_t limit = sim_happens(random, 100) ? most : sim_happens(random, 500) ? most / 8 : 4;
    return 1 + sim_below(random, limit);
}

/* 1 to most, the lesser half more often. */
static uint64_t few(uint64_t *random, uint64_t most) {
    return 1 + sim_below(random, sim_happens(random, 600) ? (most + 1) / 2 : most);
}

static uint64_t one_of(uint64_t *random, const uint64_t *values, size_t n) {
    return values[sim_below(random, n)];
}
#define ONE_OF(random, ...)                                                                        \
    one_of(random, (const uint64_t[]){__VA_ARGS__},                                                \
           sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t))

static void draw_network(sim_scenario *s, uint64_t *r) {
    s->delay = ONE_OF(r, 1, 20, 50, 200, 1000, 5000, 20000);
    s->mbit = ONE_OF(r, 0, 0, 0, 0, 10, 100);
    s->full = ONE_OF(r, 0, 0, 0, 100, 500);
    s->skew = ONE_OF(r, 0, 0, 100, 2000, 50000, 400000);
    s->inject_dup = ONE_OF(r, 0, 0, 0, 0, 0, 200);
    if (sim_happens(r, 250))
        return; /* nothing is lost here */
    s->jitter = ONE_OF(r, 0, 0, 10, 500, 5000);
    s->late = ONE_OF(r, 0, 0, 0, 10, 100);
    s->late_by = ONE_OF(r, 100, 2000, 20000, 200000);
    s->loss = ONE_OF(r, 0, 0, 5, 20, 100, 100, 300, 500);
    s->burst = ONE_OF(r, 1, 1, 4);
    s->twice = ONE_OF(r, 0, 0, 0, 50, 300);
    s->queue = s->mbit ? ONE_OF(r, 0, 1000, 20000) : 0;
    s->inject_loss = ONE_OF(r, 0, 0, 0, 10, 100, 300);
    s->inject_burst = ONE_OF(r, 1, 1, 3);
    s->inject_reorder = ONE_OF(r, 0, 0, 0, 0, 0, 200);
    s->stall = sim_happens(r, 150) ? ONE_OF(r, 20000, 150000, 300000, 900000) : 0;
    s->dead = sim_happens(r, 150) ? 1 + sim_below(r, 2) : 0;
}

sim_scenario sim_draw(uint64_t seed) {
    uint64_t state = seed * 0x2545F4914F6CDD1Du;
    uint64_t *r = &state;
    sim_scenario s = {.seed = seed};
    s.ranks = 1 + few(r, SIM_RANKS - 1);
    s.groups = ONE_OF(r, 1, 1, 2, 3);
    s.ops = few(r, SIM_OPS);
    s.deep = 1 + sim_below(r, SIM_OPS);
    s.segments = few(r, SIM_SEGMENTS);
    s.packets = size(r, SIM_PACKETS);
    s.payload = ONE_OF(r, 64, 64, 128, 256);
    s.sums = sim_happens(r, 900);
    s.dtypes = sim_below(r, 3);
    s.in_place = sim_happens(r, 500);
    s.weights = sim_happens(r, 300);
    s.reliable = ONE_OF(r, 0, 300, 1000);
    s.repair = ONE_OF(r, 0, 0, 1, 3);
    s.fec = ONE_OF(r, 0, 0, 1, 2);
    s.feedback = sim_happens(r, 300);
    s.selective = sim_happens(r, 300);
    s.eager = ONE_OF(r, 0, 1000, 4000, 16384, 100000);
    s.capacity = ONE_OF(r, 32, 64, 200, 1000);
    s.same_host = sim_happens(r, 300);
    s.deadline = ONE_OF(r, 300000, 1000000, 3000000);
    s.drain = ONE_OF(r, 20000, 20000, 20000, 20000, 1000000);
    draw_network(&s, r);
    s.levels = sim_happens(r, 400);
    s.lingers = sim_happens(r, 500);
    s.links = 1 + (uint64_t)sim_happens(r, 300);
    s.odd = sim_happens(r, 80);
    s.aborts = sim_happens(r, 80);
    s.notify = ONE_OF(r, 0, 0, 500);
    s.waits = ONE_OF(r, 0, 0, 500);
    s.reads = ONE_OF(r, 0, 0, 0, 10, 300, 3000);
    s.messages = sim_happens(r, 400) ? few(r, SIM_MESSAGES) : 0;
    s.message_bytes = ONE_OF(r, 100, 300, 300, 2000, 2000, 10000, 140000);
    if (s.loss > 100 || s.queue) /* many packets would crawl for minutes */
        s.message_bytes = ONE_OF(r, 100, 2000);
    s.any = sim_happens(r, 300);
    s.forged = sim_happens(r, 100) ? ONE_OF(r, 20, 200, 1000) : 0;
    s.lossy = ONE_OF(r, 0, 700, 700);
    if (s.lossy && s.messages && sim_happens(r, 200)) { /* ever less is resent of most of them */
        s.message_bytes = 140000;
        s.messages = few(r, 12);
        s.payload = 256;
        s.lossy = ONE_OF(r, 900, 1000);
    }
    if (sim_happens(r, 300)) {
        s.sealed = ONE_OF(r, 1, 1, 2);
        s.rekeys = ONE_OF(r, 0, 0, 300);
        s.forged = ONE_OF(r, 0, 0, 50, 1000);
    }
    s.ordered = ONE_OF(r, 0, 500, 1000);
    sim_tidy(&s);
    return s;
}
