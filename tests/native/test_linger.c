/* Operations that end for their callers before they end in the engine (linger.h), in virtual time:
 * a root that only sends, a rank that has its result, and what becomes of it when its peers are
 * late, die, leave, or mean something else. */
#include <string.h>

#include "check.h"
#include "linger.h"
#include "virtual_net.h"

enum { RANKS = 2, PAYLOAD = 1024, SMALL = 3000, AHEAD = 64, MANY = 300, USED = 0xEE };

static const uint64_t MS = 1000000, SECOND = 1000000000;

typedef virtual_net pair;

static void open_pair(pair *p) {
    const virtual_setup how = {
        .size = RANKS,
        .payload = PAYLOAD,
        .capacity = 4096,
        .eager_bytes = 1 << 16,
        .delay_ns = 10000,
        .group = {.deadline_max_ns = SECOND, .link_ns = 10 * SECOND, .met = 1}};
    virtual_open(p, &how);
}

/* A copy of `bytes` from rank 0 to rank 1. */
typedef struct {
    uint64_t bytes, signature, timeout_ns;
    int lossy, feedback;
    int waits; /* it doesn't linger */
} copy;

static int64_t submit(const pair *p, int rank, copy how, uint8_t *data) {
    const lc_edge edge = {(uint16_t)(1 - rank), 0};
    lc_slot_desc slot = {.length = how.bytes,
                         .own = rank ? LC_OWN_NONE : LC_OWN_INPUT,
                         .target = rank ? LC_TARGET_OUT : LC_TARGET_NONE,
                         .n_dests = !rank,
                         .n_sources = (uint32_t)rank};
    lc_call call = {.slots = &slot,
                    .edges = &edge,
                    .n_slots = 1,
                    .n_edges = 1,
                    .in = data,
                    .out = data,
                    .in_elements = how.bytes,
                    .out_elements = how.bytes,
                    .levels = {{.elements_per_packet = PAYLOAD,
                                .reliable = !how.lossy,
                                .feedback = (uint8_t)how.feedback}},
                    .dtype = LC_BYTES,
                    .lingers = !how.waits,
                    .scale = 1,
                    .signature = 5 + how.signature,
                    .timeout_ns = how.timeout_ns ? how.timeout_ns : 60 * SECOND};
    return lc_group_submit(p->group[rank], &call);
}

static int state_of(const pair *p, int rank, int64_t ticket, lc_report *report) {
    lc_failure failure;
    return lc_group_result(p->group[rank], ticket, report, &failure);
}

static int is_all(const uint8_t *at, size_t n, uint8_t value) {
    for (size_t i = 0; i < n; i++)
        if (at[i] != value)
            return 0;
    return 1;
}

/* The root has its buffer back after a turn, whoever is late, and uses it for something else. Its
 * report is of that moment; what it sends later is counted as well. */
static void test_root_is_done_at_once(int lossy, int release_early) {
    pair p;
    lc_report first, later;
    lc_stats stats;
    uint8_t data[RANKS][SMALL];
    const copy how = {.bytes = SMALL, .lossy = lossy};
    open_pair(&p);
    memory_path_of(p.net, 0, 1)->loss = lossy ? 0 : 0.5;
    memset(data[0], 7, SMALL);
    int64_t root = submit(&p, 0, how, data[0]);
    lc_host_turn(p.host[0]);
    CHECK(state_of(&p, 0, root, &first) == LC_OK);
    CHECK(lc_group_lingering(p.group[0], NULL) == 1);
    memset(data[0], USED, SMALL);
    if (release_early)
        lc_group_release(p.group[0], root);
    virtual_go_on(&p, 50 * MS);
    CHECK(lc_group_lingering(p.group[0], NULL) == 1); /* its peer hasn't posted it */
    int64_t other = submit(&p, 1, how, data[1]);
    virtual_go_on(&p, SECOND);
    CHECK(state_of(&p, 1, other, &later) == LC_OK && later.packets_missing == 0);
    CHECK(is_all(data[1], SMALL, 7) && is_all(data[0], SMALL, USED));
    CHECK(lc_group_lingering(p.group[0], NULL) == 0);
    lc_group_stats(p.group[0], &stats);
    lc_group_last_report(p.group[0], &later);
    CHECK(stats.operations == 1 && stats.packets_sent == later.packets_sent);
    CHECK_AT(later.packets_sent >= 3 && later.packets_resent == later.packets_sent - 3,
             "%llu packets", (unsigned long long)later.packets_sent);
    uint64_t reliably = lossy ? 0 : later.packets_resent;
    CHECK(later.resent_reliable == reliably && stats.resent_reliable == reliably);
    CHECK(stats.bytes_sent == later.bytes_sent && first.elapsed_ns == later.elapsed_ns);
    if (!release_early) {
        lc_report again;
        CHECK(state_of(&p, 0, root, &again) == LC_OK && memcmp(&again, &first, sizeof first) == 0);
        lc_group_release(p.group[0], root);
    }
    virtual_close(&p);
}

enum { FLOATS = PAYLOAD / 4 }; /* one packet: more have to wait for their acknowledgement */

/* The mean of both ranks' floats, formed by rank 0, in place. */
static int64_t submit_mean(const pair *p, int rank, float *data) {
    const lc_edge of_0[] = {{1, 0}, {1, 1}}, of_1[] = {{0, 0}, {0, 0}};
    const lc_slot_desc sums = {.length = FLOATS,
                               .combine = LC_ADD,
                               .finish = LC_FINISH_MEAN,
                               .own = LC_OWN_INPUT,
                               .target = LC_TARGET_OUT,
                               .n_sources = 1,
                               .n_dests = 1};
    const lc_slot_desc copies[] = {
        {.length = FLOATS, .own = LC_OWN_INPUT, .target = LC_TARGET_NONE, .n_dests = 1},
        {.number = 1, .length = FLOATS, .target = LC_TARGET_OUT, .n_sources = 1, .first_edge = 1}};
    lc_call call = {.slots = rank ? copies : &sums,
                    .edges = rank ? of_1 : of_0,
                    .n_slots = rank ? 2 : 1,
                    .n_edges = 2,
                    .in = data,
                    .out = data,
                    .in_elements = FLOATS,
                    .out_elements = FLOATS,
                    .levels = {{.elements_per_packet = PAYLOAD / 4, .reliable = 1}},
                    .dtype = LC_F32,
                    .lingers = 1,
                    .scale = 1,
                    .signature = 9,
                    .timeout_ns = 60 * SECOND};
    return lc_group_submit(p->group[rank], &call);
}

static int are_all(const float *at, float value) {
    for (int i = 0; i < FLOATS; i++)
        if (at[i] < value || at[i] > value)
            return 0;
    return 1;
}

/* A rank that has its result is done, though its peer lacks what it still sends; and that is sent
 * as it was, whatever the rank does with its memory. */
static void test_result_is_enough(double loss) {
    pair p;
    lc_report report;
    float data[RANKS][FLOATS];
    open_pair(&p);
    for (int i = 0; i < FLOATS; i++) {
        data[0][i] = 1;
        data[1][i] = 3;
    }
    memory_path_of(p.net, 0, 1)->cut = 1;
    int64_t other = submit_mean(&p, 1, data[1]);
    int64_t root = submit_mean(&p, 0, data[0]);
    CHECK(state_of(&p, 0, root, &report) == LC_PENDING);
    virtual_go_on(&p, MS);
    CHECK(state_of(&p, 0, root, &report) == LC_OK && are_all(data[0], 2));
    CHECK(lc_group_lingering(p.group[0], NULL) == 1);
    memset(data[0], USED, sizeof data[0]);
    lc_group_release(p.group[0], root);
    virtual_go_on(&p, 5 * MS);
    CHECK(state_of(&p, 1, other, &report) == LC_PENDING);
    memory_path_of(p.net, 0, 1)->cut = 0;
    memory_path_of(p.net, 0, 1)->loss = loss;
    virtual_go_on(&p, loss > 0 ? SECOND : 50 * MS); /* after more, the silent is asked about */
    CHECK(state_of(&p, 1, other, &report) == LC_OK && are_all(data[1], 2));
    CHECK(is_all((uint8_t *)data[0], sizeof data[0], USED));
    CHECK(lc_group_lingering(p.group[0], NULL) == 0);
    virtual_close(&p);
}

/* Who waits for the end of a stream hears of it at once. Who doesn't hears of it with the next
 * packet, or a little later; and without having asked. */
static void test_when_the_end_is_heard(int waits) {
    uint8_t data[RANKS][8] = {{0}};
    pair p;
    lc_report report;
    const copy how = {.bytes = sizeof data[0], .waits = waits};
    open_pair(&p);
    for (int i = 0; i < 2; i++) {
        int64_t root = submit(&p, 0, how, data[0]);
        int64_t other = submit(&p, 1, how, data[1]);
        virtual_go_on(&p, MS / 4);
        CHECK(state_of(&p, 0, root, &report) == LC_OK && state_of(&p, 1, other, &report) == LC_OK);
        CHECK(lc_group_lingering(p.group[0], NULL) == (uint32_t)!waits);
        virtual_go_on(&p, MS / 2);
        CHECK(lc_group_lingering(p.group[0], NULL) == 0);
    }
    CHECK_AT(waits || memory_counts_of(p.net).sent == 6, "%d datagrams",
             (int)memory_counts_of(p.net).sent);
    virtual_close(&p);
}

/* How many of `n` such copies are done at the root though its peer takes part in none. */
static int done_alone(copy how, int n) {
    static uint8_t data[MANY][LC_LINGER_BYTES + 1];
    int64_t tickets[MANY];
    pair p;
    int done = 0;
    open_pair(&p);
    for (int i = 0; i < n; i++)
        tickets[i] = submit(&p, 0, how, data[i]);
    virtual_go_on(&p, 20 * MS);
    for (int i = 0; i < n; i++) {
        lc_report report;
        int code = state_of(&p, 0, tickets[i], &report);
        CHECK(code == LC_OK || code == LC_PENDING);
        CHECK(i == 0 || code == LC_PENDING || done == i); /* the oldest ones */
        done += code == LC_OK;
    }
    CHECK((int)lc_group_lingering(p.group[0], NULL) == done);
    virtual_close(&p);
    return done;
}

/* What is large is not copied, nor what the root is to hear of; and copies are bounded. */
static void test_bounds(void) {
    CHECK(done_alone((copy){.bytes = LC_LINGER_BYTES}, 1) == 1);
    CHECK(done_alone((copy){.bytes = LC_LINGER_BYTES + 1}, 1) == 0);
    CHECK(done_alone((copy){.bytes = SMALL, .lossy = 1}, 1) == 1);
    CHECK(done_alone((copy){.bytes = SMALL, .lossy = 1, .feedback = 1}, 1) == 0);
    CHECK(done_alone((copy){.bytes = 8}, MANY) == LC_LINGERING);
    CHECK(done_alone((copy){.bytes = LC_LINGER_BYTES}, 40) == LC_LINGERING_BYTES / LC_LINGER_BYTES);
}

/* Room that was used is used again. */
static void test_room_comes_back(void) {
    pair p;
    uint8_t data[RANKS] = {1, 0};
    const copy how = {.bytes = 1};
    open_pair(&p);
    for (int i = 0; i < MANY; i++) {
        lc_report report;
        int64_t root = submit(&p, 0, how, &data[0]);
        int64_t other = submit(&p, 1, how, &data[1]);
        lc_host_turn(p.host[0]);
        CHECK(state_of(&p, 0, root, &report) == LC_OK);
        virtual_go_on(&p, MS);
        CHECK(state_of(&p, 1, other, &report) == LC_OK);
        CHECK(lc_group_lingering(p.group[0], NULL) == 0);
        lc_group_release(p.group[0], root);
        lc_group_release(p.group[1], other);
    }
    virtual_close(&p);
}

/* Who asks hears which is the oldest. */
static void test_oldest(void) {
    pair p;
    uint32_t oldest;
    uint8_t data[2][4] = {{0}};
    open_pair(&p);
    for (int i = 0; i < 4; i++) {
        (void)submit(&p, 0, (copy){.bytes = 1}, &data[0][i]);
        lc_host_turn(p.host[0]);
        CHECK(lc_group_lingering(p.group[0], &oldest) == (uint32_t)i + 1 && oldest == 0);
    }
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t n = lc_group_lingering(p.group[0], &oldest);
        CHECK_AT(n == 4 - i && oldest == i, "%u from %u on", n, oldest);
        (void)submit(&p, 1, (copy){.bytes = 1}, &data[1][i]);
        virtual_go_on(&p, 10 * MS);
    }
    CHECK(lc_group_lingering(p.group[0], NULL) == 0);
    virtual_close(&p);
}

/* What goes wrong after the root has its buffer back: how the group ends, or doesn't. */
enum fate { MISMATCH, LATE, DEAD_LINK, DIES, LEAVES, ABORTED };

static void bring_about(pair *p, enum fate fate, uint8_t *data) {
    const copy other = {.bytes = SMALL, .signature = 1};
    if (fate == MISMATCH)
        CHECK(submit(p, 1, other, data) > 0);
    if (fate == DEAD_LINK)
        memory_path_of(p->net, 0, 1)->cut = memory_path_of(p->net, 1, 0)->cut = 1;
    if (fate == DIES)
        lc_group_peer_dead(p->group[0], 1);
    if (fate == LEAVES)
        lc_group_peer_left(p->group[0], 1);
    if (fate == ABORTED)
        lc_group_abort(p->group[0], LC_E_ABORTED, 1);
}

/* A rank that is late reads what its peer sent before it reads that the peer has gone; also where
 * its own call waits in the inbox, and what goes ahead of such calls has come. */
static void test_what_came_before_counts(enum fate fate, int started) {
    const copy how = {.bytes = started ? SMALL : AHEAD, .lossy = 1};
    pair p;
    lc_report report;
    uint8_t data[RANKS][SMALL] = {{0}};
    open_pair(&p);
    memset(data[0], 7, SMALL);
    int64_t other = started ? submit(&p, 1, how, data[1]) : 0;
    virtual_go_on(&p, 5 * MS);
    CHECK(submit(&p, 0, how, data[0]) > 0);
    lc_host_turn(p.host[0]);
    virtual_set_now(&p, memory_now(p.net) + MS); /* all is there, and unread */
    if (!started)
        other = submit(&p, 1, how, data[1]);
    if (fate == DIES)
        lc_group_peer_dead(p.group[1], 0);
    else
        lc_group_peer_left(p.group[1], 0);
    lc_host_turn(p.host[1]);
    CHECK(state_of(&p, 1, other, &report) == LC_OK && report.packets_missing == 0);
    CHECK(is_all(data[1], how.bytes, 7));
    virtual_close(&p);
}

static void test_fate(enum fate fate, int code) {
    pair p;
    lc_failure failure;
    lc_report report;
    uint8_t data[RANKS][SMALL] = {{3}};
    const copy how = {.bytes = SMALL, .timeout_ns = fate == LATE ? SECOND : 0};
    open_pair(&p);
    int64_t root = submit(&p, 0, how, data[0]);
    virtual_go_on(&p, 5 * MS);
    CHECK(state_of(&p, 0, root, &report) == LC_OK && lc_group_lingering(p.group[0], NULL) == 1);
    bring_about(&p, fate, data[1]);
    virtual_go_on(&p, fate == DEAD_LINK ? 11 * SECOND : 2 * SECOND);
    CHECK_AT(lc_group_failure(p.group[0], &failure) == code, "fate %d: %d", fate, failure.code);
    CHECK(failure.op == 0 && (fate == ABORTED || !code || failure.peer == 1));
    CHECK_AT(lc_group_lingering(p.group[0], NULL) == 0, "fate %d", fate);
    CHECK(state_of(&p, 0, root, &report) == LC_OK); /* its own result is what it was */
    int64_t next = submit(&p, 0, how, data[0]);
    CHECK_AT(code ? next == code : next > 0, "fate %d: %d", fate, (int)next);
    lc_host_turn(p.host[0]);
    if (fate == LEAVES) /* its caller is to hear that nobody takes part */
        CHECK(state_of(&p, 0, next, &report) == LC_PENDING);
    if (fate == DIES)
        CHECK(state_of(&p, 0, next, &report) == LC_OK);
    lc_group_release(p.group[0], root);
    virtual_close(&p);
}

/* A group that closes drops what lingers, released or not. */
static void test_close(int release) {
    pair p;
    lc_report report;
    uint8_t data[SMALL] = {3};
    open_pair(&p);
    int64_t root = submit(&p, 0, (copy){.bytes = SMALL}, data);
    lc_host_turn(p.host[0]);
    CHECK(state_of(&p, 0, root, &report) == LC_OK);
    if (release)
        lc_group_release(p.group[0], root);
    CHECK(lc_group_lingering(p.group[0], NULL) == 1);
    virtual_close(&p);
}

int main(void) {
    for (int how = 0; how < 4; how++)
        test_root_is_done_at_once(how & 1, how & 2);
    test_result_is_enough(0);
    test_result_is_enough(0.5);
    test_when_the_end_is_heard(0);
    test_when_the_end_is_heard(1);
    test_bounds();
    test_room_comes_back();
    test_oldest();
    test_fate(MISMATCH, LC_E_MISMATCH);
    test_fate(LATE, LC_E_TIMEOUT);
    test_fate(DEAD_LINK, LC_E_LINK);
    test_fate(DIES, LC_OK);
    test_fate(LEAVES, LC_OK);
    test_fate(ABORTED, LC_E_ABORTED);
    for (int started = 0; started < 2; started++) {
        test_what_came_before_counts(DIES, started);
        test_what_came_before_counts(LEAVES, started);
    }
    test_close(0);
    test_close(1);
    return check_result("test_linger");
}
