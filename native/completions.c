#define _GNU_SOURCE
#include "completions.h"

#include <errno.h>
#include <stdlib.h>

struct lc_completions {
    pthread_mutex_t lock; /* for all below; taken under a host's, and nothing is taken under it */
    pthread_cond_t changed;
    lc_op *first, *last; /* by lc_op.next */
    int stopped;
};

lc_completions *lc_completions_open(void) {
    lc_completions *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    return c;
}

void lc_completions_close(lc_completions *c) {
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    free(c);
}

int64_t lc_completions_next(lc_completions *c, uint64_t timeout_ns, uint64_t *owner) {
    struct timespec until = lc_time_after(timeout_ns);
    int error = 0;
    int64_t ticket = 0;
    pthread_mutex_lock(&c->lock);
    while (!c->first && !c->stopped && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&c->changed, &c->lock, &until);
    lc_op *op = c->first;
    if (op) {
        c->first = op->next;
        if (!c->first)
            c->last = NULL;
        ticket = (int64_t)(intptr_t)op;
        *owner = op->group->config.owner;
    } else if (c->stopped) {
        ticket = LC_E_CLOSED;
    }
    pthread_mutex_unlock(&c->lock);
    return ticket;
}

void lc_completions_stop(lc_completions *c, int stopped) {
    pthread_mutex_lock(&c->lock);
    c->stopped = stopped;
    pthread_mutex_unlock(&c->lock);
    pthread_cond_broadcast(&c->changed);
}

void lc_completions_put(lc_op *op) {
    lc_completions *c = op->group->config.completions;
    pthread_mutex_lock(&c->lock);
    op->next = NULL;
    *(c->last ? &c->last->next : &c->first) = op;
    c->last = op;
    pthread_mutex_unlock(&c->lock);
    pthread_cond_signal(&c->changed);
}

void lc_completions_drop(const lc_group *g) {
    lc_completions *c = g->config.completions;
    if (!c)
        return;
    pthread_mutex_lock(&c->lock);
    lc_op **at = &c->first;
    c->last = NULL;
    while (*at) {
        if ((*at)->group == g) {
            *at = (*at)->next;
        } else {
            c->last = *at;
            at = &(*at)->next;
        }
    }
    pthread_mutex_unlock(&c->lock);
}
