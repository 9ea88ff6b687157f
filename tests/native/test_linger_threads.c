/* Lingering operations of whole engines, for the sanitizers: a root that broadcasts without waiting
 * for anybody, whose buffer is used again at once, and who releases its tickets while the engine
 * still sends. */
#define _DEFAULT_SOURCE
#include "linger.h"
#include "net.h"

#include <pthread.h>
#include <unistd.h>

enum { BYTES = 700, ROUNDS = 300 };

typedef struct {
    net *n;
    uint16_t rank;
    int reliable, waits, keeps;
} part;

static int64_t broadcast(const part *p, uint8_t *data) {
    table t = {.n_slots = 0};
    lc_slot_desc *s = add_slot(&t, 0, 0, BYTES);
    s->missing = LC_MISSING_KEEP;
    if (p->rank == 0) {
        own_at(s, 0, LC_TARGET_NONE);
        for (uint16_t i = 1; i < p->n->size; i++)
            add_dest(&t, s, i, 0);
    } else {
        add_source(&t, s, 0);
    }
    lc_call call = {
        .slots = t.slots,
        .edges = t.edges,
        .n_slots = t.n_slots,
        .n_edges = t.n_edges,
        .in = data,
        .out = data,
        .in_elements = BYTES,
        .out_elements = BYTES,
        .levels = {{.elements_per_packet = NET_PAYLOAD, .reliable = (uint8_t)p->reliable}},
        .dtype = LC_BYTES,
        .waits = (uint8_t)p->waits,
        .lingers = 1,
        .scale = 1,
        .signature = 1,
        .timeout_ns = 30 * SECOND};
    return lc_group_submit(p->n->group[p->rank], &call);
}

/* Bytes of a round; what a packet that was given up leaves is not looked at. */
static uint8_t value_of(int round) {
    return (uint8_t)(1 + round % 250);
}

static void *take_part(void *argument) {
    const part *p = argument;
    lc_group *g = p->n->group[p->rank];
    uint8_t data[BYTES];
    int64_t kept[ROUNDS] = {0};
    for (int i = 0; i < ROUNDS; i++) {
        lc_report report;
        lc_failure failure;
        memset(data, p->rank ? 0 : value_of(i), BYTES);
        int64_t ticket = broadcast(p, data);
        CHECK(ticket > 0 && lc_group_wait(g, ticket, 30 * SECOND) == LC_OK);
        CHECK(lc_group_result(g, ticket, &report, &failure) == LC_OK);
        for (int k = 0; k < BYTES && !report.packets_missing; k++)
            if (!CHECK(data[k] == value_of(i)))
                break;
        if (p->keeps)
            kept[i] = ticket;
        else
            lc_group_release(g, ticket);
    }
    for (int i = 0; i < ROUNDS; i++)
        if (kept[i])
            lc_group_release(g, kept[i]);
    return NULL;
}

static void run(lc_inject inject, part how) {
    net n;
    part parts[3];
    pthread_t threads[3];
    net_open(&n, 3, inject, 20 * SECOND);
    for (uint16_t r = 0; r < n.size; r++) {
        parts[r] = how;
        parts[r].n = &n;
        parts[r].rank = r;
        pthread_create(&threads[r], NULL, take_part, &parts[r]);
    }
    for (uint16_t r = 0; r < n.size; r++)
        pthread_join(threads[r], NULL);
    for (int i = 0; i < 1000 && lc_group_lingering(n.group[0], NULL); i++)
        usleep(10000);
    for (uint16_t r = 0; r < n.size; r++) {
        lc_stats stats;
        CHECK(lc_group_lingering(n.group[r], NULL) == 0);
        lc_group_stats(n.group[r], &stats);
        CHECK(stats.operations == ROUNDS);
        CHECK(r || stats.packets_sent >= 2 * 3 * ROUNDS);
    }
    net_close(&n);
}

/* Rank 1 takes part in what lingers at rank 0, whose loop can't publish figures meanwhile, since
 * their reader has the lock. Returns whether rank 1 was done so: the loop may stand before the lock
 * with something to send. */
static int ends_unpublished(const part parts[2], uint64_t operations) {
    lc_group *g = parts[0].n->group[0], *other = parts[1].n->group[1];
    uint8_t data[2][BYTES] = {{1}};
    lc_stats stats;
    int64_t ticket = broadcast(&parts[0], data[0]);
    CHECK(lc_group_wait(g, ticket, 30 * SECOND) == LC_OK);
    CHECK(lc_lingering(g, NULL) == 1);
    pthread_mutex_lock(&g->host->lock);
    int64_t taken = broadcast(&parts[1], data[1]);
    int done = lc_group_wait(other, taken, 200 * MS) == LC_OK;
    if (done)
        usleep(50000);
    CHECK(lc_lingering(g, NULL) == 1);
    pthread_mutex_unlock(&g->host->lock);
    CHECK(lc_group_wait(other, taken, 30 * SECOND) == LC_OK);
    for (int i = 0; i < 1000 && lc_group_lingering(g, NULL); i++)
        usleep(10000);
    lc_group_stats(g, &stats);
    CHECK(stats.operations == operations && stats.packets_sent >= 3 * operations);
    lc_group_release(g, ticket);
    lc_group_release(other, taken);
    return done;
}

/* Who sees that nothing lingers reads figures of all that did. */
static void test_figures(void) {
    net n;
    part parts[2];
    int seen = 0;
    net_open(&n, 2, (lc_inject){.loss = 0}, 60 * SECOND);
    for (uint16_t r = 0; r < 2; r++)
        parts[r] = (part){.n = &n, .rank = r, .reliable = 1};
    for (uint64_t i = 1; i <= 30 && !seen; i++)
        seen = ends_unpublished(parts, i);
    CHECK(seen);
    net_close(&n);
}

/* Closed while the others haven't even posted what lingers. */
static void test_close(void) {
    net n;
    net_open(&n, 3, (lc_inject){.loss = 0}, 20 * SECOND);
    part root = {.n = &n, .reliable = 1};
    uint8_t data[BYTES] = {1};
    for (int i = 0; i < 20; i++) {
        root.waits = i % 2;
        int64_t ticket = broadcast(&root, data);
        CHECK(lc_group_wait(n.group[0], ticket, 30 * SECOND) == LC_OK);
        if (i % 3)
            lc_group_release(n.group[0], ticket);
    }
    CHECK(lc_group_lingering(n.group[0], NULL) == 20);
    net_close(&n);
}

int main(void) {
    const lc_inject bad = {.loss = 0.1, .dup = 0.1, .reorder = 0.1, .seed = 4};
    for (int how = 0; how < 8; how++)
        run(how & 4 ? bad : (lc_inject){.loss = 0},
            (part){.reliable = how & 1, .waits = how >> 1 & 1, .keeps = how & 1});
    test_figures();
    test_close();
    return check_result("test_linger_threads");
}
