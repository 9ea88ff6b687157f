/* Messages of whole engines, for the sanitizers: threads that post and wait at once, some of them
 * after pauses in which those at the other end fall asleep, and a thread that is named what has
 * finished. */
#define _DEFAULT_SOURCE
#include "net.h"

#include <pthread.h>
#include <unistd.h>

enum { RANKS = 2, THREADS = 3, ROUNDS = 60, SMALL = 600, LARGE = 70000, PAUSE_US = 1500 };

typedef struct {
    net *n;
    uint16_t rank;
    int tag;
    int named; /* asks for its tickets' names rather than for their end */
} part;

static int64_t post(const part *p, uint8_t *data, uint64_t bytes, int receive) {
    lc_message m = {.data = data,
                    .elements = bytes,
                    .tag = (uint64_t)p->tag,
                    .timeout_ns = 60 * SECOND,
                    .element_bytes = 1,
                    .peer = 1 - p->rank,
                    .receive = (uint8_t)receive};
    int64_t ticket = lc_group_post(p->n->group[p->rank], &m);
    CHECK(ticket >= 0);
    return ticket;
}

static void end(const part *p, int64_t ticket) {
    lc_group *g = p->n->group[p->rank];
    lc_report report;
    lc_failure failure;
    if (!ticket)
        return;
    if (p->named) {
        int64_t next = 0;
        uint64_t owner = RANKS;
        lc_group_notify(g, ticket);
        for (int i = 0; i < 600 && !next; i++)
            next = lc_completions_next(p->n->completions[p->rank], SECOND / 10, &owner);
        CHECK(next == ticket);
        CHECK(owner == (uint64_t)p->rank);
    } else {
        CHECK(lc_group_wait(g, ticket, 60 * SECOND) == LC_OK);
    }
    CHECK(lc_group_result(g, ticket, &report, &failure) == LC_OK);
    lc_group_release(g, ticket);
}

static uint8_t value_of(const part *p, int sender, int round) {
    return (uint8_t)(1 + (100 * sender + 7 * p->tag + round) % 250);
}

static void *talk(void *argument) {
    const part *p = argument;
    uint8_t *data = malloc(LARGE), *room = malloc(LARGE);
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t bytes = (i + p->tag) % 3 ? SMALL : LARGE;
        memset(data, value_of(p, p->rank, i), bytes);
        memset(room, 0, bytes);
        int64_t receive = post(p, room, bytes, 1);
        if ((i + p->rank) % 4 == 0)
            usleep(PAUSE_US);
        int64_t send = post(p, data, bytes, 0);
        if (!send)
            memset(data, 0, bytes); /* it may change now */
        end(p, receive);
        end(p, send);
        int good = 1;
        for (uint64_t k = 0; k < bytes; k++)
            good &= room[k] == value_of(p, 1 - p->rank, i);
        CHECK_AT(good, "round %d of tag %d at rank %d", i, p->tag, p->rank);
    }
    free(data);
    free(room);
    return NULL;
}

/* Once all that was posted is in them: figures of what nobody waits for are told now and then. */
static lc_stats figures(lc_group *g) {
    lc_stats stats;
    for (int i = 0; i < 1000; i++) {
        lc_group_stats(g, &stats);
        if (stats.messages_received >= THREADS * ROUNDS && stats.messages_sent >= THREADS * ROUNDS)
            break;
        usleep(10000);
    }
    return stats;
}

static void run(lc_inject inject) {
    net n;
    part parts[RANKS][THREADS];
    pthread_t threads[RANKS][THREADS];
    net_open(&n, RANKS, inject, 20 * SECOND);
    for (uint16_t r = 0; r < RANKS; r++)
        for (int t = 0; t < THREADS; t++) {
            parts[r][t] = (part){&n, r, t, t == 0};
            pthread_create(&threads[r][t], NULL, talk, &parts[r][t]);
        }
    for (int r = 0; r < RANKS; r++)
        for (int t = 0; t < THREADS; t++)
            pthread_join(threads[r][t], NULL);
    for (uint16_t r = 0; r < RANKS; r++) {
        for (int i = 0; i < 1000 && lc_group_unheard(n.group[r]); i++)
            usleep(10000);
        lc_stats stats = figures(n.group[r]);
        CHECK(stats.messages_received == THREADS * ROUNDS);
        CHECK(stats.messages_sent == THREADS * ROUNDS);
        CHECK(stats.operations == 0);
        CHECK(inject.dup == 0 || stats.packets_duplicated > 0);
    }
    net_close(&n);
}

int main(void) {
    run((lc_inject){.loss = 0});
    run((lc_inject){.dup = 0.1, .reorder = 0.1, .seed = 4});
    return check_result("test_post_threads");
}
