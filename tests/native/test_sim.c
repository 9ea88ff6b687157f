/* Random scenarios of the whole protocol (sim.h). Arguments:
 *   -scenarios=N    how many (1500)
 *   -seconds=N      or for how long
 *   -first=N        seed of the first one (1)
 *   NAME=N ...      fields that are the same in all of them
 *   seed=N ...      only the scenario with this seed: what is drawn, if no other field is given,
 *                   else with the fields that are given
 * A scenario that fails is made smaller as long as it still fails, and then printed as arguments
 * that run it again. */
#define _DEFAULT_SOURCE
#include "check.h"
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int fails(const sim_scenario *s, sim_outcome *out) {
    sim_run(s, out);
    return out->failure[0] != 0;
}

/* Whether two failures say the same, numbers apart. */
static int is_like(const char *a, const char *b) {
    while (*a || *b) {
        a += strspn(a, "-.0123456789");
        b += strspn(b, "-.0123456789");
        if (*a != *b)
            return 0;
        a += *a != 0;
        b += *b != 0;
    }
    return 1;
}

/* Each field to nothing, to half, to one less: whatever still fails stays. */
static void shrink(sim_scenario *s, const char *failure) {
    sim_outcome out;
    int smaller = 1;
    for (int turn = 0; turn < 20 && smaller; turn++) {
        smaller = 0;
        for (int i = 1; i < SIM_N_FIELDS; i++) { /* not the seed */
            for (int how = 0; how < 3; how++) {
                sim_scenario tried = *s;
                uint64_t *field = (uint64_t *)(void *)&tried + i;
                if (!*field)
                    break;
                *field = how == 0 ? 0 : how == 1 ? *field / 2 : *field - 1;
                sim_tidy(&tried);
                if (memcmp(&tried, s, sizeof tried) == 0 || !fails(&tried, &out) ||
                    !is_like(out.failure, failure))
                    continue;
                *s = tried;
                smaller = 1;
                break;
            }
        }
    }
}

static void show_failure(sim_scenario s, const sim_outcome *out) {
    sim_outcome smaller;
    fprintf(stderr, "scenario %llu: %s\n", (unsigned long long)s.seed, out->failure);
    shrink(&s, out->failure);
    if (fails(&s, &smaller))
        fprintf(stderr, "  smaller: %s\n", smaller.failure);
    fprintf(stderr, "  again with: test_sim ");
    sim_print(&s);
}

typedef struct {
    uint64_t scenarios, failures, packets, lost, missing, recovered, resent, clean, lingered,
        second;
    uint64_t ended, notified, shown, failed;
    uint64_t sent, received, lacking, thrown, refused, replayed, kept;
    double virtual_s;
} sums;

static void run_one(const sim_scenario *s, sums *t) {
    sim_outcome out;
    t->scenarios++;
    if (fails(s, &out) && ++t->failures <= 3)
        show_failure(*s, &out);
    t->packets += out.packets;
    t->lost += out.lost;
    t->second += out.second;
    t->notified += out.notified;
    t->shown += out.shown;
    t->failed += out.failed;
    t->missing += out.missing;
    t->sent += out.sent;
    t->received += out.received;
    t->lacking += out.lacking;
    t->thrown += out.thrown;
    t->refused += out.refused;
    t->replayed += out.replayed;
    t->kept += out.kept;
    t->recovered += out.recovered;
    t->resent += out.resent;
    t->ended += out.ended;
    t->lingered += out.lingered;
    t->clean += (uint64_t)sim_is_clean(s);
    t->virtual_s += 1e-9 * (double)out.virtual_ns;
}

/* Scenarios that once failed, made smaller. */
static const struct {
    const char *name, *fields;
} known[] = {
    {"the result that a dead rank owes is put in place while others still read what it replaces",
     "seed=432 ranks=4 groups=1 ops=1 deep=1 segments=1 packets=1 payload=64 sums=1 "
     "dtypes=1 in_place=1 fec=2 capacity=16 delay=1 skew=50000 dead=1 deadline=300000 "
     "drain=1000"},
    {"the same, of a rank that has given a stream up",
     "seed=91 ranks=3 ops=6 deep=1 segments=1 packets=19 payload=64 sums=1 dtypes=1 "
     "in_place=1 reliable=131 feedback=1 selective=1 eager=980 capacity=63 delay=48 "
     "jitter=5000 late=94 late_by=1980 loss=500 burst=4 deadline=300000 drain=1000"},
    {"a rank that stood still tells what it has given up to one that has ended the operation",
     "seed=203 ranks=2 groups=1 ops=3 deep=1 segments=1 packets=1 payload=64 sums=1 "
     "feedback=1 capacity=16 delay=1 jitter=1242 stall=449981 deadline=300000 drain=1000"},
    {"a packet is needed that its sender never got",
     "seed=91 ranks=4 groups=1 ops=1 deep=1 segments=1 packets=188 payload=64 sums=1 "
     "dtypes=2 fec=2 feedback=1 selective=1 capacity=16 same_host=1 delay=1 jitter=2499 "
     "late=1 loss=50 deadline=300000 drain=1000"},
    {"a stream that has begun stands still while an older operation is sent",
     "seed=2 ranks=4 ops=2 deep=2 segments=1 packets=75 payload=64 sums=1 dtypes=1 fec=1 "
     "feedback=1 capacity=16 delay=9981 deadline=300000 drain=1000"},
    {"a needed stream waits for an older operation before it begins",
     "seed=306 ranks=3 groups=3 ops=3 deep=3 segments=1 packets=99 payload=64 sums=1 "
     "in_place=1 weights=1 feedback=1 selective=1 capacity=16 delay=9963 deadline=300000 "
     "drain=1000"},
    {"packets go ahead to a process that only said that it has no such group yet",
     "seed=10 ranks=4 groups=2 ops=2 deep=1 segments=1 packets=1 payload=64 sums=1 "
     "feedback=1 eager=481 capacity=16 delay=1 skew=50000 deadline=300000 drain=1000"},
    {"a stream is sent for longer than its receiver may be silent",
     "seed=2 ranks=4 groups=1 ops=1 deep=1 segments=1 packets=99 payload=64 dtypes=1 "
     "capacity=16 delay=9963 deadline=300000 drain=1000"},
    {"a packet that waits passes for that of another group, which bears the same numbers",
     "seed=5002820 ranks=4 groups=3 ops=6 deep=2 segments=1 packets=1 payload=64 sums=1 "
     "eager=1008 capacity=16 delay=1 skew=400000 deadline=300000 drain=1000 levels=1 links=1"},
    {"a rank has failed of another's call after its own caller had its report",
     "seed=139010 ranks=3 groups=1 ops=1 deep=1 segments=1 packets=1 payload=64 dtypes=1 "
     "reliable=980 capacity=16 delay=1 jitter=2496 dead=1 deadline=300000 drain=1000 lingers=1 "
     "links=1 odd=1"},
    {"a rank that stood still asks for packets of a stream that its sender has suspended",
     "seed=5016315 ranks=3 groups=3 ops=5 deep=1 segments=2 packets=1 payload=64 sums=1 dtypes=1 "
     "repair=1 capacity=16 delay=1 jitter=1 stall=899980 deadline=300000 drain=1000 links=1"},
    {"a forged NACK of the first sending makes a message go that isn't granted",
     "seed=50269 ranks=2 groups=1 ops=1 deep=1 segments=1 packets=1 payload=64 sums=1 eager=128 "
     "capacity=27 delay=1 deadline=300000 drain=1000 levels=1 links=1 messages=8 "
     "message_bytes=139998 forged=99"},
    {"a stream stands behind messages, which its receiver takes for later ones",
     "seed=1006722 ranks=2 groups=3 ops=4 deep=2 segments=1 packets=1 payload=64 sums=1 weights=1 "
     "fec=1 selective=1 capacity=16 delay=19997 deadline=300000 drain=1000 links=1 messages=10 "
     "message_bytes=2499"},
};

static void test_known(void) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        sim_scenario s = {.seed = 0};
        sim_outcome out;
        for (const char *field = known[i].fields; *field; field += strspn(field, " ")) {
            CHECK_AT(sim_set(&s, field), "%s", field);
            field += strcspn(field, " ");
        }
        sim_tidy(&s);
        CHECK_AT(!fails(&s, &out), "%s: %s", known[i].name, out.failure);
    }
}

typedef struct {
    double seconds;
    unsigned long long first, number;
    int n_fields;
    char **fields; /* "name=value" */
} options;

static options read_options(int argc, char **argv) {
    options o = {.first = 1, .number = 1500, .fields = argv + 1};
    for (int i = 1; i < argc; i++) {
        (void)sscanf(argv[i], "-seconds=%lf", &o.seconds);
        (void)sscanf(argv[i], "-first=%llu", &o.first);
        (void)sscanf(argv[i], "-scenarios=%llu", &o.number);
        if (argv[i][0] != '-')
            o.fields[o.n_fields++] = argv[i];
    }
    return o;
}

static void set_fields(const options *o, sim_scenario *s) {
    for (int i = 0; i < o->n_fields; i++)
        if (!sim_set(s, o->fields[i])) {
            fprintf(stderr, "no field: %s\n", o->fields[i]);
            exit(2);
        }
    sim_tidy(s);
}

static int replay(const options *o, sim_scenario s) {
    sim_outcome out;
    if (o->n_fields == 1)
        s = sim_draw(s.seed);
    int bad = fails(&s, &out);
    if (bad && o->n_fields == 1)
        show_failure(s, &out);
    printf("%s\n", bad ? out.failure : "good");
    return bad;
}

static void run_many(const options *o, sums *t) {
    double begin = seconds(CLOCK_MONOTONIC);
    for (uint64_t seed = o->first; t->failures < 10; seed++) {
        if (o->seconds > 0 ? seconds(CLOCK_MONOTONIC) - begin >= o->seconds
                           : seed >= o->first + o->number)
            return;
        sim_scenario s = sim_draw(seed);
        set_fields(o, &s);
        run_one(&s, t);
    }
}

int main(int argc, char **argv) {
    options o = read_options(argc, argv);
    sim_scenario given = {.seed = 0};
    sums t = {.scenarios = 0};
    set_fields(&o, &given);
    if (given.seed)
        return replay(&o, given);
    test_known();
    double begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
    run_many(&o, &t);
    double took = seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
    printf("test_sim     %llu scenarios in %.1f s of CPU (%.0f a second; %.0f s of theirs): %llu "
           "operations ended, %llu messages received, %llu of %llu packets lost, %llu resent, %llu "
           "restored, %llu given up and %llu of messages, %llu forged, %llu kept out by seals\n",
           (unsigned long long)t.scenarios, took, (double)t.scenarios / took, t.virtual_s,
           (unsigned long long)t.ended, (unsigned long long)t.received, (unsigned long long)t.lost,
           (unsigned long long)t.packets, (unsigned long long)t.resent,
           (unsigned long long)t.recovered, (unsigned long long)t.missing,
           (unsigned long long)t.lacking, (unsigned long long)t.thrown,
           (unsigned long long)t.refused);
    CHECK(t.failures == 0);
    if (!o.n_fields) { /* what makes it worth anything has happened */
        CHECK(t.scenarios > 100 && t.clean > 10 && t.lost > 1000);
        CHECK(t.lingered > 100 && t.notified > 100 && t.shown > 100 && t.failed > 100);
        CHECK(t.sent > 100 && t.received > 1000 && t.lacking > 100 && t.thrown > 1000);
        CHECK(lc_crypto_load(NULL) || (t.refused > 1000 && t.replayed > 100));
        CHECK(t.missing > 100 && t.recovered > 100 && t.resent > 100 && t.second > 1000);
        CHECK(t.kept > 1000);
    }
    return check_result("test_sim");
}
