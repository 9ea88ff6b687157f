/* What both ends of a path know of its loss: runs at the receiver, whatever the order of packets,
 * and at the sender the share that is lost and the mean run. */
#include "check.h"
#include "loss.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EVERY = 16, MOST = 1 << 17 }; /* packets of an acknowledgement, and of a path */

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

/* A path: packets in the order in which they come, and the two ends. */
typedef struct {
    lc_runs runs;
    lc_loss loss;
    uint32_t next, taken;                    /* at the receiver */
    uint32_t acked, acked_taken, acked_runs; /* at the sender */
    uint32_t sent;
    int bad;
} path;

static void acknowledge(path *p) {
    lc_loss_told(&p->loss, p->next - p->acked, p->taken - p->acked_taken,
                 p->runs.count - p->acked_runs);
    p->acked = p->next;
    p->acked_taken = p->taken;
    p->acked_runs = p->runs.count;
}

/* As the engine notes a packet of data. */
static void come(path *p, uint32_t number) {
    if ((int32_t)(number - p->next) >= 0) {
        if (number != p->next)
            lc_runs_missed(&p->runs, p->next, number);
        p->next = number + 1;
    } else {
        lc_runs_came(&p->runs, number);
    }
    if (++p->taken % EVERY == 0)
        acknowledge(p);
}

static int by_place(const void *a, const void *b) {
    const double *x = a, *y = b;
    return (x[0] > y[0]) - (x[0] < y[0]);
}

/* n packets, of which some are lost and others come up to `late` places later. */
static void pass(path *p, uint32_t n, double loss, double burst, double late) {
    static double order[MOST][2];
    uint32_t come_n = 0;
    for (uint32_t i = 0; i < n; i++) {
        double begin = burst > 1 ? loss / burst / (1 - loss) : loss;
        p->bad = p->bad && burst > 1 ? uniform() >= 1 / burst : uniform() < begin;
        if (p->bad)
            continue;
        order[come_n][0] = i + late * uniform();
        order[come_n++][1] = i;
    }
    qsort(order, come_n, sizeof order[0], by_place);
    for (uint32_t i = 0; i < come_n; i++)
        come(p, p->sent + (uint32_t)order[i][1]);
    p->sent += n;
}

static path begin_at(uint32_t number) {
    return (path){.next = number, .acked = number, .sent = number};
}

static void test_what_is_measured(void) {
    static const double losses[] = {0.01, 0.05, 0.2, 0.4}, bursts[] = {1, 4, 8};
    for (int l = 0; l < 4; l++) {
        for (int b = 0; b < 3; b++) {
            path p = begin_at(UINT32_MAX - 5000);
            pass(&p, MOST, losses[l], bursts[b], 0);
            double loss = lc_loss_share(&p.loss), burst = lc_loss_burst(&p.loss);
            /* Single losses meet by chance. */
            double mean = bursts[b] > 1 ? bursts[b] : 1 / (1 - losses[l]);
            double runs = 8192 * losses[l] / mean; /* in the window */
            double chance = 4 * sqrt(2 / runs);
            CHECK_AT(fabs(loss / losses[l] - 1) < chance, "loss %g in %g: %g", losses[l], bursts[b],
                     loss);
            CHECK_AT(fabs(burst / mean - 1) < chance, "loss %g in %g: burst %g", losses[l],
                     bursts[b], burst);
        }
    }
}

/* Packets that come late, as far as so many runs are remembered, are none that were lost. */
static void test_order_is_no_loss(void) {
    path p = begin_at(7);
    pass(&p, 20000, 0, 1, 3);
    pass(&p, 100, 0, 1, 0);
    CHECK_AT(p.runs.count == 0, "%u runs", p.runs.count);
    acknowledge(&p);
    CHECK_AT(lc_loss_share(&p.loss) < 1e-6, "loss %g", lc_loss_share(&p.loss));
    CHECK(lc_loss_burst(&p.loss) < 1.5);
    pass(&p, MOST / 2, 0.1, 4, 3);
    CHECK_AT(fabs(lc_loss_share(&p.loss) - 0.1) < 0.03, "loss %g", lc_loss_share(&p.loss));
    CHECK_AT(fabs(lc_loss_burst(&p.loss) - 4) < 1.5, "burst %g", lc_loss_burst(&p.loss));
}

static void test_runs(void) {
    lc_runs r = {.count = 0};
    lc_runs_missed(&r, 10, 12);
    lc_runs_missed(&r, 12, 13); /* nothing between them came */
    CHECK(r.count == 1);
    lc_runs_missed(&r, 14, 15);
    CHECK(r.count == 2);
    lc_runs_came(&r, 10);
    lc_runs_came(&r, 12);
    lc_runs_came(&r, 12); /* twice */
    lc_runs_came(&r, 13); /* never missed */
    CHECK(r.count == 2);
    lc_runs_came(&r, 11);
    CHECK(r.count == 1);
    lc_runs_missed(&r, 20, 20 + LC_GAP_BITS + 1);
    for (uint32_t k = 20; k < 20 + LC_GAP_BITS; k++)
        lc_runs_came(&r, k);
    CHECK(r.count == 2); /* too long a run for order */
    for (uint32_t k = 0; k < LC_GAPS; k++)
        lc_runs_missed(&r, 200 + 2 * k, 201 + 2 * k);
    lc_runs_came(&r, 14); /* forgotten */
    CHECK(r.count == 2 + LC_GAPS);
}

/* Loss that begins, or was there from the first packet on, is soon believed; one lost packet isn't.
 */
static void test_begins_and_ends(void) {
    path p = begin_at(0);
    pass(&p, 120, 0.2, 1, 0);
    CHECK_AT(lc_loss_share(&p.loss) > 0.08, "after 120: %g", lc_loss_share(&p.loss));
    p = begin_at(0);
    pass(&p, 100000, 0, 1, 0);
    CHECK(lc_loss_share(&p.loss) <= 0);
    pass(&p, 1000, 0.1, 1, 0);
    CHECK_AT(lc_loss_share(&p.loss) > 0.02, "after 1000: %g", lc_loss_share(&p.loss));
    pass(&p, MOST, 0, 1, 0);
    CHECK_AT(lc_loss_share(&p.loss) < 1e-4, "%g is left", lc_loss_share(&p.loss));
    lc_loss few = {.sent = 0};
    lc_loss_told(&few, 4, 3, 1);
    CHECK_AT(lc_loss_share(&few) < 0.005, "one of four: %g", lc_loss_share(&few));
}

/* 100 packets come before their operation is posted; 10 of them are dropped when it is. */
static void test_taken_first_and_lost_later(void) {
    lc_loss loss = {.sent = 0};
    for (int i = 0; i < 200; i++) {
        lc_loss_told(&loss, 100, 100, 0);
        lc_loss_told(&loss, 2, 2u - 10u, 9);
    }
    CHECK_AT(fabs(lc_loss_share(&loss) - 10 / 102.0) < 0.005, "%g", lc_loss_share(&loss));
    CHECK_AT(fabs(lc_loss_burst(&loss) - 10 / 9.0) < 0.01, "%g", lc_loss_burst(&loss));
}

static void test_nonsense(void) {
    lc_loss loss = {.sent = 0};
    lc_loss_told(&loss, 0xFFFFFFFF, 0, 0);
    lc_loss_told(&loss, 0x7FFFFFFF, 0x80000000, 1);
    lc_loss_told(&loss, 0, 0x80000001, 0);
    lc_loss_told(&loss, 3, 3, 0x7FFFFFFF);
    CHECK(loss.sent <= 0 && loss.lost <= 0 && loss.runs <= 0);
    lc_loss_told(&loss, 100, 0, 0);
    CHECK(lc_loss_share(&loss) <= 1 && lc_loss_burst(&loss) >= 1);
    lc_loss_told(&loss, 100, 100, 0xFFFFFFFF); /* a run that wasn't one */
    CHECK(isfinite(lc_loss_share(&loss)) && lc_loss_burst(&loss) >= 1);
    for (int i = 0; i < 200; i++)
        lc_loss_told(&loss, 100, 0, i == 0);
    CHECK(lc_loss_share(&loss) > 0.9 && lc_loss_burst(&loss) <= LC_BURST_MOST);
}

int main(void) {
    test_what_is_measured();
    test_order_is_no_loss();
    test_runs();
    test_begins_and_ends();
    test_taken_first_and_lost_later();
    test_nonsense();
    return check_result("test_loss");
}
