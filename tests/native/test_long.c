/* A stream of very many packets, in virtual time: it is repaired in one round, however many records
 * that takes. */
#include "check.h"
#include "virtual_net.h"

#include <stdlib.h>
#include <string.h>

enum { PAYLOAD = 64, EACH = PAYLOAD / 4, PACKETS = 400000, TURNS_MOST = 100000 };

static const uint64_t MS = 1000000, DELAY_NS = 5000000;

typedef struct {
    virtual_net v;
    float *data[2];
    int64_t ticket[2];
    lc_report report[2];
    int ended[2];
} pair;

static void open_pair(pair *p, double loss) {
    const virtual_setup how = {.size = 2,
                               .payload = PAYLOAD,
                               .capacity = 3 * PACKETS,
                               .delay_ns = DELAY_NS,
                               .group = {.deadline_min_ns = 1000 * MS,
                                         .deadline_max_ns = 10000 * MS,
                                         .inject = {.loss = loss, .burst = 1, .seed = 3},
                                         .met = 1}};
    virtual_open(&p->v, &how);
    for (int i = 0; i < 2; i++) {
        p->data[i] = calloc((size_t)PACKETS * EACH, sizeof(float));
        if (!p->data[i])
            abort();
    }
}

static void submit(pair *p, int feedback) {
    const lc_edge edge = {1, 0}, source = {0, 0};
    for (uint16_t i = 0; i < 2; i++) {
        lc_slot_desc slot = {.length = (uint64_t)PACKETS * EACH,
                             .own = i == 0 ? LC_OWN_INPUT : LC_OWN_NONE,
                             .target = i == 0 ? LC_TARGET_NONE : LC_TARGET_OUT,
                             .n_dests = i == 0,
                             .n_sources = i == 1};
        lc_call call = {
            .slots = &slot,
            .edges = i == 0 ? &edge : &source,
            .n_slots = 1,
            .n_edges = 1,
            .in = p->data[i],
            .out = p->data[i],
            .in_elements = (uint64_t)PACKETS * EACH,
            .out_elements = (uint64_t)PACKETS * EACH,
            .levels = {{.elements_per_packet = EACH, .repair = 1, .feedback = (uint8_t)feedback}},
            .scale = 1,
            .signature = 5};
        p->ticket[i] = lc_group_submit(p->v.group[i], &call);
        CHECK(p->ticket[i] > 0);
    }
}

static uint64_t take_turns(pair *p, uint16_t i) {
    lc_failure failure;
    for (int turns = 0; lc_host_turn(p->v.host[i]) && turns < TURNS_MOST; turns++) {
    }
    p->ended[i] =
        lc_group_result(p->v.group[i], p->ticket[i], &p->report[i], &failure) != LC_PENDING;
    return virtual_wakes(&p->v, i);
}

/* How long both ranks took, ns of their time. */
static uint64_t run(double loss, int feedback, lc_report *receiver) {
    pair p = {.ended = {0}};
    open_pair(&p, loss);
    submit(&p, feedback);
    uint64_t begin = memory_now(p.v.net);
    while (!(p.ended[0] && p.ended[1]) && memory_now(p.v.net) < begin + 60000 * MS) {
        uint64_t a = take_turns(&p, 0), b = take_turns(&p, 1);
        virtual_set_now(&p.v, a < b ? a : b);
    }
    uint64_t took = memory_now(p.v.net) - begin;
    CHECK(p.ended[0] && p.ended[1]);
    *receiver = p.report[1];
    virtual_close(&p.v);
    for (int i = 0; i < 2; i++)
        free(p.data[i]);
    return took;
}

static void test_one_round(int feedback) {
    lc_report whole, repaired;
    uint64_t without = run(0, feedback, &whole), with = run(0.2, feedback, &repaired);
    CHECK(whole.packets_missing == 0);
    CHECK(repaired.packets_injected > PACKETS / 5); /* it happened */
    /* 4% are lost twice. */
    CHECK(repaired.packets_missing > PACKETS / 30 && repaired.packets_missing < PACKETS / 20);
    /* There and back with what is missing, and once more to tell what is given up. */
    uint64_t rounds = (uint64_t)(1 + feedback);
    CHECK_AT(with < without + rounds * (2 * DELAY_NS + 10 * MS), "%llu ms, and %llu without loss",
             (unsigned long long)(with / MS), (unsigned long long)(without / MS));
}

/* -sample: with feedback alone. */
int main(int argc, char **argv) {
    if (!check_samples(argc, argv))
        test_one_round(0);
    test_one_round(1);
    return check_result("test_long");
}
