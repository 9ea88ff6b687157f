/* What small operations cost in datagrams, in virtual time: each rank makes one call after the
 * other. */
#include <string.h>

#include "check.h"
#include "net.h"
#include "state.h"
#include "virtual_net.h"

enum { RANKS = 4, CALLS = 50, SEGMENT = 64, ELEMENTS = RANKS * SEGMENT, PAYLOAD = 8 * ELEMENTS };

static const uint64_t NEVER = UINT64_MAX;

enum what { COPIES, SEGMENTS, ROOT }; /* a broadcast; an all-reduce by all, or by rank 0 alone */

typedef struct {
    uint16_t ranks;
    enum what what;
    int lossy;
    double loss;
} kind;

typedef struct {
    kind how;
    virtual_net v;
    int64_t ticket[RANKS];
    int ended[RANKS]; /* calls */
    uint64_t missing;
    float data[RANKS][ELEMENTS];
} job;

static void open_job_far(job *j, uint64_t delay_ns) {
    const virtual_setup how = {.size = j->how.ranks,
                               .payload = PAYLOAD,
                               .capacity = 4096,
                               .eager_bytes = 1 << 20,
                               .delay_ns = delay_ns,
                               .loss = j->how.loss,
                               .group = {.deadline_max_ns = 10 * SECOND, .met = 1}};
    virtual_open(&j->v, &how);
}

static void open_job(job *j) {
    open_job_far(j, 20000);
}

static void plan_broadcast(table *t, uint16_t size, uint16_t rank) {
    *t = (table){.n_slots = 0};
    lc_slot_desc *s = add_slot(t, 0, 0, (uint64_t)size * SEGMENT);
    s->missing = LC_MISSING_KEEP;
    if (rank)
        add_source(t, s, 0);
    else
        own_at(s, 0, LC_TARGET_NONE);
    for (uint16_t i = 1; i < size && !rank; i++)
        add_dest(t, s, i, 0);
}

static void plan_root(table *t, uint16_t size, uint16_t rank) {
    *t = (table){.n_slots = 0};
    lc_slot_desc *s = add_slot(t, 0, 0, (uint64_t)size * SEGMENT);
    own_at(s, 0, rank ? LC_TARGET_NONE : LC_TARGET_OUT);
    if (rank) {
        add_dest(t, s, 0, 0);
        add_source(t, add_slot(t, 1, 0, (uint64_t)size * SEGMENT), 0);
        return;
    }
    s->combine = LC_ADD;
    s->finish = LC_FINISH_MEAN;
    for (uint16_t i = 1; i < size; i++)
        add_source(t, s, i);
    for (uint16_t i = 1; i < size; i++)
        add_dest(t, s, i, 1);
}

static void submit(job *j, uint16_t rank) {
    table t;
    uint16_t size = j->how.ranks;
    if (j->how.what == SEGMENTS)
        plan_transpose(&t, size, rank, SEGMENT);
    else if (j->how.what == ROOT)
        plan_root(&t, size, rank);
    else
        plan_broadcast(&t, size, rank);
    fill(j->data[rank], (size_t)size * SEGMENT, rank);
    lc_call call = {.slots = t.slots,
                    .edges = t.edges,
                    .n_slots = t.n_slots,
                    .n_edges = t.n_edges,
                    .in = j->data[rank],
                    .out = j->data[rank],
                    .in_elements = (uint64_t)size * SEGMENT,
                    .out_elements = (uint64_t)size * SEGMENT,
                    .levels = {{.elements_per_packet = PAYLOAD / 4, .reliable = !j->how.lossy}},
                    .dtype = LC_F32,
                    .lingers = 1,
                    .scale = 1,
                    .signature = 1};
    j->ticket[rank] = lc_group_submit(j->v.group[rank], &call);
    CHECK(j->ticket[rank] > 0);
}

static void check_value(job *j, uint16_t rank, const lc_report *report) {
    float want = j->how.what != COPIES ? mean_of_all(j->how.ranks) : 1;
    j->missing += report->packets_missing;
    if (j->how.lossy && j->how.loss > 0)
        return;
    CHECK(report->packets_missing == 0);
    int good = 1;
    for (int i = 0; i < j->how.ranks * SEGMENT && (rank || j->how.what != COPIES); i++)
        good &= j->data[rank][i] - want < NET_NEAR && want - j->data[rank][i] < NET_NEAR;
    CHECK_AT(good, "rank %d", rank);
}

/* A rank's turns at one moment; it makes its next call as soon as the one before has ended. */
static uint64_t take_turns(job *j, uint16_t rank) {
    lc_report report;
    lc_failure failure;
    for (int again = 1; again;) {
        again = lc_host_turn(j->v.host[rank]);
        if (j->ended[rank] == CALLS ||
            (j->ticket[rank] &&
             lc_group_result(j->v.group[rank], j->ticket[rank], &report, &failure) == LC_PENDING))
            continue;
        if (j->ticket[rank]) {
            CHECK(failure.code == LC_OK);
            check_value(j, rank, &report);
            lc_group_release(j->v.group[rank], j->ticket[rank]);
            j->ended[rank]++;
        }
        if (j->ended[rank] < CALLS)
            submit(j, rank);
        again = 1;
    }
    return virtual_wakes(&j->v, rank);
}

static void open_two(job of[2]) {
    const kind how = {.ranks = 2, .what = COPIES};
    lc_failure failure;
    memset(of, 0, 2 * sizeof *of);
    of[0].how = of[1].how = how;
    open_job(&of[0]);
    of[1].v = of[0].v;
    for (uint16_t rank = 0; rank < how.ranks; rank++) {
        const lc_group_config second = {
            .number = 2, .rank = rank, .size = how.ranks, .deadline_max_ns = 10 * SECOND, .met = 1};
        of[1].v.group[rank] = lc_group_open(of[0].v.host[rank], &second, &failure);
    }
    for (int i = 0; i < 4; i++) /* after one call, ranks know how much may go ahead */
        submit(&of[i & 1], i < 2);
    virtual_go_on(&of[0].v, MS);
}

static void close_two(job of[2]) {
    for (uint16_t rank = 0; rank < 2; rank++)
        lc_group_close(of[1].v.group[rank]);
    virtual_close(&of[0].v);
}

/* Two groups of the same processes send calls that bear the same numbers, ahead of their
 * receiver's: what waits there is told apart by its group. */
static void test_ahead_of_two_groups(void) {
    static job of[2];
    lc_failure failure;
    lc_report report;
    open_two(of);
    for (int i = 0; i < 2; i++)
        submit(&of[i], 0);
    virtual_go_on(&of[0].v, MS);
    for (int i = 0; i < 2; i++) {
        const lc_stats *stats = &of[i].v.group[1]->live;
        CHECK_AT(stats->eager_kept == 1 && !stats->repeated, "group %d keeps %d", i,
                 (int)stats->eager_kept);
        submit(&of[i], 1);
    }
    virtual_go_on(&of[0].v, MS);
    for (int i = 0; i < 2; i++) {
        CHECK(lc_group_result(of[i].v.group[1], of[i].ticket[1], &report, &failure) == LC_OK);
        check_value(&of[i], 1, &report);
    }
    close_two(of);
}

/* A group that has failed, and isn't closed yet, keeps nothing that others have room for. */
static void test_failed_group(void) {
    static job of[2];
    open_two(of);
    const lc_path *path = of[0].v.group[1]->members[0].path;
    submit(&of[0], 0);
    virtual_go_on(&of[0].v, MS);
    CHECK(path->waiting.n == 1);
    lc_group_abort(of[0].v.group[1], LC_E_ABORTED, -1);
    virtual_go_on(&of[0].v, MS);
    CHECK(path->waiting.n == 0);
    submit(&of[0], 0); /* the sender doesn't know of it */
    virtual_go_on(&of[0].v, MS);
    CHECK(path->waiting.n == 0);
    close_two(of);
}

static int all_ended(const job *j) {
    for (int i = 0; i < j->how.ranks; i++)
        if (j->ended[i] < CALLS)
            return 0;
    return 1;
}

/* All ranks from `first` on take the turns that they have; then it is `latest`, or when one of them
 * next has something to do. */
static void go_on(job *j, uint16_t first, uint64_t latest) {
    for (uint16_t i = first; i < j->how.ranks; i++) {
        uint64_t mine = take_turns(j, i);
        latest = mine < latest ? mine : latest;
    }
    virtual_set_now(&j->v, latest);
}

/* Datagrams for each call. */
static double run(kind how) {
    static job j;
    memset(&j, 0, sizeof j);
    j.how = how;
    open_job(&j);
    uint64_t begin = memory_now(j.v.net), end = NEVER;
    while (memory_now(j.v.net) < end && memory_now(j.v.net) < begin + 100 * SECOND) {
        uint64_t now = memory_now(j.v.net);
        go_on(&j, 0, NEVER);
        if (end == NEVER && all_ended(&j))
            end = now + 20 * MS; /* what is still said counts as well */
    }
    CHECK(all_ended(&j));
    CHECK((j.missing > 0) == (how.lossy && how.loss > 0));
    double each = (double)memory_counts_of(j.v.net).sent / CALLS;
    virtual_close(&j.v);
    return each;
}

/* The most datagrams that a call takes where nothing is lost, between each pair of ranks that have
 * something for each other: one for each packet, in which control rides. A lossy stream's end is
 * said by itself, and so is what the receivers of a broadcast say, who send no data: READY and
 * DONE. */
static double most_of(kind how) {
    double lossless[] = {[COPIES] = 3.25, [SEGMENTS] = 4.1, [ROOT] = 2.1};
    double lossy[] = {[COPIES] = 3.25, [SEGMENTS] = 8.1, [ROOT] = 4.1};
    return how.lossy ? lossy[how.what] : lossless[how.what];
}

static void test_cost(kind how) {
    double each = run(how);
    int pairs = how.what == SEGMENTS ? how.ranks * (how.ranks - 1) / 2 : how.ranks - 1;
    CHECK_AT(how.loss > 0 || each <= most_of(how) * pairs,
             "%d ranks, what %d, lossy %d: %.2f datagrams", how.ranks, (int)how.what, how.lossy,
             each);
}

/* ---- a peer that takes no turns ---- */

typedef struct {
    int counts;           /* whether the next datagrams are counted */
    uint32_t told[RANKS]; /* datagrams to rank 0 */
} pile;

static void pile_up(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    pile *p = context;
    (void)iov;
    p->told[from] += p->counts && to == 0;
}

/* The others' turns while rank 0 takes none, for so long. */
static void go_on_without(job *j, uint64_t ns) {
    uint64_t end = memory_now(j->v.net) + ns;
    while (memory_now(j->v.net) < end)
        go_on(j, 1, end);
}

/* What is told to a process that is stopped has room beside data in its socket buffer
 * (CONTROL_CHARGE of link_udp.c): so much for a quarter of a second, and then ten in a second. */
static void test_stopped_peer(int lossy) {
    static job j;
    pile told = {.counts = 0};
    memset(&j, 0, sizeof j);
    j.how = (kind){RANKS, SEGMENTS, lossy, 0};
    open_job(&j);
    memory_set_tap(j.v.net, pile_up, &told);
    while (j.ended[0] < CALLS / 2)
        go_on(&j, 0, NEVER);
    told.counts = 1;
    go_on_without(&j, 250 * MS);
    for (int i = 1; i < RANKS; i++)
        CHECK_AT(told.told[i] > 1 && told.told[i] <= 9, "rank %d told it %u times", i,
                 told.told[i]);
    go_on_without(&j, SECOND);
    for (int i = 1; i < RANKS; i++)
        CHECK_AT(told.told[i] <= 9 + 10, "rank %d told it %u times", i, told.told[i]);
    virtual_close(&j.v);
}

/* ---- records that change on their way ---- */

typedef struct {
    memory_net *net;
    uint64_t seed, thrown;
} flips;

/* Each control packet comes once more just before, with one bit of its records changed. */
static void flip(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    flips *f = context;
    uint8_t bytes[LC_HEADER_BYTES + 2 * PAYLOAD];
    size_t n = iov[0].iov_len + iov[1].iov_len;
    if (n > sizeof bytes)
        return;
    memcpy(bytes, iov[0].iov_base, iov[0].iov_len);
    memcpy(bytes + iov[0].iov_len, iov[1].iov_base, iov[1].iov_len);
    if (bytes[3] != LC_CONTROL)
        return;
    n = lc_wire_first(bytes, n);
    f->seed = f->seed * 6364136223846793005u + 1442695040888963407u;
    size_t bit = (f->seed >> 33) % (8 * (n - LC_HEADER_BYTES));
    bytes[LC_HEADER_BYTES + bit / 8] ^= (uint8_t)(1 << bit % 8);
    memory_throw(f->net, from, to, bytes, n, 10000);
    f->thrown++;
}

static void test_flipped_bits(kind how) {
    static job j;
    memset(&j, 0, sizeof j);
    j.how = how;
    open_job(&j);
    flips f = {j.v.net, 5, 0};
    memory_set_tap(j.v.net, flip, &f);
    uint64_t end = memory_now(j.v.net) + 100 * SECOND, refused = 0;
    while (!all_ended(&j) && memory_now(j.v.net) < end)
        go_on(&j, 0, NEVER);
    CHECK(all_ended(&j));
    memory_set_tap(j.v.net, NULL, NULL);
    for (end = memory_now(j.v.net) + MS; memory_now(j.v.net) < end;)
        go_on(&j, 0, end); /* what was thrown last comes */
    for (int i = 0; i < how.ranks; i++)
        refused += j.v.host[i]->live.malformed;
    CHECK_AT(f.thrown > CALLS && refused == f.thrown, "%d of %d refused", (int)refused,
             (int)f.thrown);
    virtual_close(&j.v);
}

/* ---- memory of operations that have ended ---- */

static int kept_blocks(const job *j) {
    int n = 0;
    for (int i = 0; i < j->how.ranks; i++)
        for (int k = 0; k < LC_POOL_BLOCKS; k++)
            n += j->v.host[i]->pool.block[k] != NULL;
    return n;
}

/* It is kept for the next ones, and given back when there have been none for a while. */
static void test_memory(void) {
    static job j;
    memset(&j, 0, sizeof j);
    j.how = (kind){RANKS, SEGMENTS, 0, 0};
    open_job(&j);
    while (!all_ended(&j))
        go_on(&j, 0, NEVER);
    CHECK(kept_blocks(&j) >= RANKS);
    for (uint64_t end = memory_now(j.v.net) + 5 * SECOND; memory_now(j.v.net) < end;)
        go_on(&j, 0, end);
    CHECK(kept_blocks(&j) == 0);
    virtual_close(&j.v);
}

/* What a large operation has left is given back though small ones follow without end: packets come
 * all the time, or an operation waits for long. */
static void test_memory_of_the_busy(uint64_t delay_ns) {
    enum { BYTES = 1 << 20, SMALL = 1 << 17 };
    static job j;
    memset(&j, 0, sizeof j);
    j.how = (kind){RANKS, SEGMENTS, 0, 0};
    open_job_far(&j, delay_ns);
    for (int i = 0; i < RANKS; i++) /* the small one fits, and is found first */
        for (int bytes = SMALL; bytes <= BYTES; bytes += BYTES - SMALL)
            lc_pool_give(&j.v.host[i]->pool, &j.v.host[i]->pool_lock, malloc(bytes), bytes);
    for (uint64_t end = memory_now(j.v.net) + 5 * SECOND; memory_now(j.v.net) < end;) {
        go_on(&j, 0, end);
        memset(j.ended, 0, sizeof j.ended); /* no call is the last */
    }
    for (int i = 0; i < RANKS; i++)
        for (int k = 0; k < LC_POOL_BLOCKS; k++)
            CHECK(!j.v.host[i]->pool.block[k] || j.v.host[i]->pool.bytes[k] < BYTES);
    virtual_close(&j.v);
}

int main(void) {
    test_memory();
    test_memory_of_the_busy(5 * MS);
    test_memory_of_the_busy(100 * MS);
    test_ahead_of_two_groups();
    test_failed_group();
    for (enum what what = COPIES; what <= ROOT; what++)
        test_flipped_bits((kind){RANKS, what, what == SEGMENTS, 0});
    test_stopped_peer(0);
    test_stopped_peer(1);
    for (uint16_t ranks = 2; ranks <= RANKS; ranks += 2)
        for (enum what what = COPIES; what <= ROOT; what++)
            for (int how = 0; how < 4; how++)
                test_cost((kind){ranks, what, how & 1, how >> 1 ? 0.02 : 0});
    return check_result("test_small");
}
