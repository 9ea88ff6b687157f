/* Links that are dead in one direction or both while all ranks live, in virtual time: calls end in
 * bounded time, the right link is named, and what was lost comes back. */
#include "check.h"
#include "net.h"
#include "virtual_net.h"

enum { RANKS = 4, PAYLOAD = 256, CALLS = 8, SMALL = 64, LARGE = 64000, MOST = RANKS * LARGE };

static const uint64_t DELAY_NS = 2000000, DEADLINE_NS = 5000000000u, ANSWER_NS = 300000000;

/* Ranks that call all-reduces one after the other, each as soon as its own call has ended. */
typedef struct {
    virtual_net v;
    int ring, reliable, repair;
    uint32_t segment;
    uint32_t done[RANKS];
    int64_t ticket[RANKS];    /* 0: no call is under way */
    uint64_t ended_ns[CALLS]; /* everywhere */
    lc_report report[RANKS][CALLS];
    lc_failure failure[RANKS]; /* the first */
    float *data[RANKS];
} job;

static void set_cut(job *j, uint16_t from, uint16_t to, int cut) {
    memory_path_of(j->v.net, from, to)->cut = cut;
}

static void begin_kept(job *j, int ring, uint32_t segment, int reliable, int repair, int paced,
                       uint64_t keepalive_ns) {
    *j = (job){.ring = ring, .segment = segment, .reliable = reliable, .repair = repair};
    const virtual_setup how = {.size = RANKS,
                               .payload = PAYLOAD,
                               .capacity = 4096,
                               .eager_bytes = 1 << 16,
                               .delay_ns = DELAY_NS,
                               .keepalive_ns = keepalive_ns,
                               .paced = (uint8_t)paced,
                               .group = {.deadline_min_ns = SECOND,
                                         .deadline_max_ns = DEADLINE_NS,
                                         .link_ns = 2 * DEADLINE_NS,
                                         .met = 1}};
    virtual_open(&j->v, &how);
    for (uint16_t r = 0; r < RANKS; r++)
        j->data[r] = malloc(MOST * sizeof(float));
}

static void begin(job *j, int ring, uint32_t segment, int reliable, int repair, int paced) {
    begin_kept(j, ring, segment, reliable, repair, paced, 0);
}

static void end(job *j) {
    virtual_close(&j->v);
    for (uint16_t r = 0; r < RANKS; r++)
        free(j->data[r]);
}

static void look(job *j, uint16_t r, uint32_t calls) {
    const net n = {.size = RANKS, .payload = PAYLOAD, .timeout_ns = 1000 * SECOND};
    lc_failure why;
    uint32_t k = j->done[r];
    if (j->ticket[r]) {
        int code = lc_group_result(j->v.group[r], j->ticket[r], &j->report[r][k], &why);
        if (code == LC_PENDING)
            return;
        if (code < 0 && !j->failure[r].code)
            j->failure[r] = why;
        j->ended_ns[k] = memory_now(j->v.net);
        lc_group_release(j->v.group[r], j->ticket[r]);
        j->ticket[r] = 0;
        k = ++j->done[r];
    }
    if (k == calls || j->failure[r].code)
        return;
    fill(j->data[r], (size_t)RANKS * j->segment, r);
    j->ticket[r] = net_submit_to(j->v.group[r], &n, r, j->ring, j->segment, j->data[r], j->reliable,
                                 j->repair, 0);
    CHECK(j->ticket[r] > 0);
}

/* Until all have done so many calls, or failed. Returns whether they did in that time. */
static int run(job *j, uint32_t calls, uint64_t most_ns) {
    uint64_t until = memory_now(j->v.net) + most_ns;
    while (memory_now(j->v.net) < until) {
        int left = 0;
        for (uint16_t r = 0; r < RANKS; r++) {
            look(j, r, calls);
            left += j->ticket[r] != 0;
        }
        if (!left)
            return 1;
        virtual_go_on(&j->v, SECOND / 1000);
    }
    return 0;
}

static lc_peer_stats figures(const job *j, uint16_t rank, uint16_t peer) {
    lc_peer_stats s;
    lc_group_peer_stats(j->v.group[rank], peer, &s);
    return s;
}

/* From the end of the call before, or of something else that is later, to its own. */
static uint64_t took(const job *j, uint32_t call, uint64_t since) {
    uint64_t before = call ? j->ended_ns[call - 1] : 0;
    return j->ended_ns[call] - (before > since ? before : since);
}

static uint64_t missing(const job *j, uint32_t call) {
    uint64_t sum = 0;
    for (uint16_t r = 0; r < RANKS; r++)
        sum += j->report[r][call].packets_missing;
    return sum;
}

enum {
    FROM_1_TO_2 = 1,
    BOTH_OF_1_AND_2 = 2,
    ALL_OF_2 = 3,
    ALL_TO_2 = 4,
    ALL_FROM_2 = 5,
    KINDS = 6
};

static void set_dead(job *j, int kind, int cut) {
    if (kind == FROM_1_TO_2 || kind == BOTH_OF_1_AND_2)
        set_cut(j, 1, 2, cut);
    if (kind == BOTH_OF_1_AND_2)
        set_cut(j, 2, 1, cut);
    for (uint16_t r = 0; r < RANKS && kind >= ALL_OF_2; r++) {
        if (kind != ALL_FROM_2)
            set_cut(j, r, 2, cut);
        if (kind != ALL_TO_2)
            set_cut(j, 2, r, cut);
    }
}

/* Ranks 1 and 2 know which direction is dead, and of no other. */
static void check_known(const job *j, int kind) {
    for (uint16_t r = 0; r < RANKS; r++)
        for (uint16_t p = 0; p < RANKS; p++) {
            lc_peer_stats s = figures(j, r, p);
            CHECK_AT(!s.silence || memory_path_of(j->v.net, r, p)->cut ||
                         memory_path_of(j->v.net, p, r)->cut,
                     "kind %d: rank %d blames %d", kind, r, p);
            if (s.silence == LC_SILENT_FROM)
                CHECK_AT(memory_path_of(j->v.net, p, r)->cut, "kind %d: %d from %d", kind, r, p);
            if (s.silence == LC_SILENT_TO)
                CHECK_AT(memory_path_of(j->v.net, r, p)->cut, "kind %d: %d to %d", kind, r, p);
            CHECK_AT(!s.silence ||
                         (s.link_loss == 1 && s.silences <= 2 && s.silent_ns > DEADLINE_NS),
                     "kind %d: %d and %d: %g, %u times, %g s", kind, r, p, s.link_loss, s.silences,
                     1e-9 * (double)s.silent_ns);
        }
}

/* The first call that suffers may take as long as a silence may last, others as long as an answer
 * takes. */
static void test_lossy(int kind, int ring, uint32_t segment, int repair, int midway,
                       uint64_t after_ns) {
    job *j = malloc(sizeof *j);
    begin(j, ring, segment, 0, repair, 1);
    uint32_t first = midway ? 2 : 0;
    CHECK(run(j, first, 60 * SECOND) && !missing(j, 0));
    if (after_ns) {
        run(j, first + 1, after_ns);
        CHECK(j->ticket[1] && j->ticket[2]);
    }
    set_dead(j, kind, 1);
    uint64_t cut_ns = memory_now(j->v.net);
    int done = run(j, first + 4, 60 * SECOND);
    CHECK_AT(done, "kind %d, ring %d, %u elements, repair %d: stuck", kind, ring, segment, repair);
    for (uint32_t k = first; k < first + 4 && done; k++) {
        uint64_t most = k == first ? DEADLINE_NS + SECOND : 2 * ANSWER_NS;
        CHECK_AT(took(j, k, cut_ns) < most && missing(j, k) > 0,
                 "kind %d, ring %d, %u elements, repair %d: call %u took %.3f s, %llu missing",
                 kind, ring, segment, repair, k, 1e-9 * (double)took(j, k, cut_ns),
                 (unsigned long long)missing(j, k));
    }
    virtual_go_on(&j->v, SECOND); /* figures are told */
    if (done)
        check_known(j, kind);
    set_dead(j, kind, 0);
    CHECK(run(j, first + 6, 60 * SECOND));
    CHECK_AT(missing(j, first + 5) == 0, "kind %d, ring %d, %u elements: %llu missing at the end",
             kind, ring, segment, (unsigned long long)missing(j, first + 5));
    virtual_go_on(&j->v, SECOND);
    for (uint16_t r = 0; r < RANKS; r++) {
        CHECK(j->failure[r].code == 0);
        for (uint16_t p = 0; p < RANKS; p++)
            CHECK_AT(figures(j, r, p).silence == LC_HEARD && figures(j, r, p).link_loss < 1,
                     "kind %d, ring %d, %u elements: %d of %d: silence %d, loss %g", kind, ring,
                     segment, r, p, figures(j, r, p).silence, figures(j, r, p).link_loss);
    }
    end(j);
    free(j);
}

/* Each reliable call that needs the dead link fails by it within link_ns; the error of some rank at
 * its end is the first, and says which direction is dead. */
static void test_reliable(int kind, int ring, uint32_t segment, int midway) {
    job *j = malloc(sizeof *j);
    int named = 0;
    begin(j, ring, segment, 1, 0, 1);
    CHECK(run(j, midway ? 2 : 0, 60 * SECOND));
    set_dead(j, kind, 1);
    uint64_t began = memory_now(j->v.net);
    while (!named && memory_now(j->v.net) < began + 60 * SECOND) {
        run(j, 4, SECOND);
        for (uint16_t r = 0; r < RANKS; r++) {
            const lc_failure *why = &j->failure[r];
            if (!why->code)
                continue;
            uint16_t peer = (uint16_t)why->peer;
            int to = why->theirs[0] > 0;
            CHECK_AT(why->code == LC_E_LINK, "rank %d: code %d", r, why->code);
            CHECK_AT(memory_path_of(j->v.net, to ? r : peer, to ? peer : r)->cut,
                     "kind %d, ring %d: rank %d says that the link %s %d is dead", kind, ring, r,
                     to ? "to" : "from", peer);
            CHECK(why->mine[2] >= 2 * DEADLINE_NS);
            named++;
        }
    }
    CHECK_AT(named, "kind %d, ring %d, %u elements: no error", kind, ring, segment);
    CHECK(memory_now(j->v.net) - began < 2 * DEADLINE_NS + 2 * SECOND);
    end(j);
    free(j);
}

/* Rank 0 reaches all others, and they don't reach one another. */
static void test_star(uint32_t segment) {
    job *j = malloc(sizeof *j);
    begin(j, 0, segment, 0, 0, 1);
    for (uint16_t r = 1; r < RANKS; r++)
        for (uint16_t p = 1; p < RANKS; p++)
            set_cut(j, r, p, 1);
    uint64_t began_ns = memory_now(j->v.net);
    CHECK(run(j, 3, 60 * SECOND));
    for (uint32_t k = 0; k < 3; k++)
        CHECK_AT(took(j, k, began_ns) < (k ? 2 * ANSWER_NS : DEADLINE_NS + SECOND),
                 "call %u: %.3f s", k, 1e-9 * (double)took(j, k, began_ns));
    virtual_go_on(&j->v, SECOND);
    for (uint16_t r = 0; r < RANKS; r++)
        for (uint16_t p = 0; p < RANKS; p++)
            CHECK(figures(j, r, p).silence == (r && p && r != p ? LC_SILENT_FROM : LC_HEARD));
    end(j);
    free(j);
}

/* Control comes through, and no data: calls are short, and the figures say what is missing. */
static void drop_data(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    job *j = context;
    const uint8_t *header = iov[0].iov_base;
    set_cut(j, from, to, from == 1 && to == 2 && header[3] != LC_CONTROL);
}

static void test_no_data(void) {
    job *j = malloc(sizeof *j);
    begin(j, 0, LARGE, 0, 0, 1);
    memory_set_tap(j->v.net, drop_data, j);
    CHECK(run(j, 2, 60 * SECOND));
    virtual_go_on(&j->v, SECOND);
    lc_peer_stats s = figures(j, 2, 1);
    CHECK(s.silence == LC_NO_DATA && s.silent_packets >= 64 && s.packets_received == 0);
    CHECK(figures(j, 1, 2).silence == LC_HEARD && figures(j, 1, 2).link_loss > 0.9);
    memory_set_tap(j->v.net, NULL, NULL);
    set_cut(j, 1, 2, 0);
    CHECK(run(j, 4, 60 * SECOND) && missing(j, 3) == 0);
    virtual_go_on(&j->v, SECOND);
    CHECK(figures(j, 2, 1).silence == LC_HEARD);
    end(j);
    free(j);
}

/* ---- filters that forget ---- */

enum { PAUSES = 6 };

/* A firewall before each rank lets in what answers, for so long after something was let out. */
typedef struct {
    job *j;
    uint64_t forgets_ns, passed_ns[RANKS][RANKS];
    uint32_t sent, dropped;
} filter;

static void pass(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    filter *f = context;
    uint64_t now = memory_now(f->j->v.net);
    (void)iov;
    f->passed_ns[from][to] = now;
    int closed = now - f->passed_ns[to][from] > f->forgets_ns;
    set_cut(f->j, from, to, closed);
    if (!closed)
        f->passed_ns[to][from] = now;
    f->sent++;
    f->dropped += (uint32_t)closed;
}

/* Ranks compute for longer than the filter remembers, and come to the call one after the other. */
static uint64_t missing_behind(uint64_t forgets_ns, uint64_t keepalive_ns, uint64_t pause_ns,
                               filter *f) {
    job *j = malloc(sizeof *j);
    uint64_t lost = 0;
    begin_kept(j, 0, 2048, 0, 0, 1, keepalive_ns);
    *f = (filter){.j = j, .forgets_ns = UINT64_MAX};
    memory_set_tap(j->v.net, pass, f);
    CHECK(run(j, 2, 60 * SECOND));
    f->forgets_ns = forgets_ns;
    for (uint32_t k = 2; k < PAUSES; k++) {
        virtual_go_on(&j->v, pause_ns);
        for (uint16_t r = 0; r < RANKS; r++) {
            look(j, r, k + 1);
            virtual_go_on(&j->v, SECOND / 50);
        }
        CHECK(run(j, k + 1, 60 * SECOND));
        lost += missing(j, k);
    }
    end(j);
    free(j);
    return lost;
}

static void test_filters_that_forget(void) {
    filter f;
    /* Without datagrams in between, what goes ahead of the others' word is dropped. */
    CHECK(missing_behind(3 * SECOND, 0, 5 * SECOND, &f) > 0 && f.dropped > 0);
    CHECK(missing_behind(3 * SECOND, SECOND, 5 * SECOND, &f) == 0 && f.dropped == 0);
    /* Linux forgets after 30 s. */
    CHECK(missing_behind(30 * SECOND, 0, 40 * SECOND, &f) > 0 && f.dropped > 0);
    CHECK(missing_behind(30 * SECOND, 10 * SECOND, 40 * SECOND, &f) == 0 && f.dropped == 0);
    /* A filter that forgets sooner is opened anew by both ends, and nothing goes before. */
    CHECK(missing_behind(3 * SECOND, 10 * SECOND, 5 * SECOND, &f) == 0 && f.dropped > 0);
}

/* What keeping paths alive costs: a datagram for each path and period. */
static void test_idle_paths(void) {
    job *j = malloc(sizeof *j);
    for (int keep = 0; keep < 2; keep++) {
        begin_kept(j, 0, SMALL, 0, 0, 1, keep ? 10 * SECOND : 0);
        CHECK(run(j, 2, 60 * SECOND));
        virtual_go_on(&j->v, SECOND);
        uint64_t before = memory_counts_of(j->v.net).sent;
        virtual_go_on(&j->v, 100 * SECOND);
        uint64_t sent = memory_counts_of(j->v.net).sent - before, paths = RANKS * (RANKS - 1);
        CHECK_AT(keep ? sent >= 9 * paths && sent <= 10 * paths : sent == 0, "%d: %llu", keep,
                 (unsigned long long)sent);
        end(j);
    }
    free(j);
}

/* -sample: some of it. */
int main(int argc, char **argv) {
    int sample = check_samples(argc, argv);
    for (int kind = 1; kind < KINDS; kind++)
        for (int ring = 0; ring < 2; ring++)
            for (int many = 0; many < 2; many++) {
                if (sample && (kind + ring + many) % 2) /* of each two, of either way and size */
                    continue;
                for (int midway = sample ? !many : 0; midway < (sample ? 1 + !many : 2); midway++) {
                    test_lossy(kind, ring, many ? LARGE : SMALL, many, midway, 0);
                    if (!sample || kind <= BOTH_OF_1_AND_2)
                        test_reliable(kind, ring, many ? LARGE : SMALL, midway);
                }
            }
    for (int kind = 1; kind < KINDS; kind++) /* in the middle of a call */
        for (int ms = sample ? 3 + kind % 2 * 4 : 3; ms < 12; ms += sample ? 12 : 4)
            test_lossy(kind, ms > 3, LARGE, 0, 1, (uint64_t)ms * SECOND / 1000);
    test_star(SMALL);
    test_star(LARGE);
    test_no_data();
    test_filters_that_forget();
    test_idle_paths();
    return check_result("test_silence");
}
