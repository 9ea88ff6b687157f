#include "linger.h"

#include <string.h>

#include "payload.h"

/* In place of what the caller's memory holds. What is encoded has its place already. */
static uint8_t *keep(lc_op_slot *s, uint8_t *to) {
    uint64_t bytes = s->desc.length * s->op->element_bytes;
    if (s->encoded) {
        if (s->n_packets)
            (void)lc_payload(s, s->n_packets - 1);
        return to;
    }
    if (bytes)
        memcpy(to, s->value, bytes);
    s->sent = to;
    return to + lc_copy_bytes(bytes);
}

static int is_owed(const lc_op_slot *s) {
    for (uint32_t i = 0; i < s->desc.n_dests; i++)
        if (s->outs[i].state != LC_OUT_DONE)
            return 1;
    return 0;
}

/* Its caller is to hear that a peer which should take part has gone. */
static int lacks_peer(const lc_op *op) {
    const lc_group *g = op->group;
    for (uint16_t i = 0; i < g->config.size; i++)
        if (op->peers[i].dest && atomic_load(&g->members[i].left))
            return 1;
    return 0;
}

uint32_t lc_lingering(const lc_group *g, uint32_t *oldest) {
    uint64_t lingering = atomic_load(&g->lingering);
    if (oldest)
        *oldest = (uint32_t)lingering;
    return (uint32_t)(lingering >> 32);
}

/* Callers see both at once. */
static void show(lc_group *g, uint32_t n, uint32_t oldest) {
    atomic_store(&g->lingering, (uint64_t)n << 32 | oldest);
}

int lc_may_linger(const lc_op *op) {
    const lc_group *g = op->group;
    return op->copy_bytes && !op->slots_unsettled && lc_lingering(g, NULL) < LC_LINGERING &&
           g->linger_bytes + op->copy_bytes <= LC_LINGERING_BYTES && !lacks_peer(op);
}

void lc_linger(lc_op *op) {
    lc_group *g = op->group;
    uint32_t oldest, n = lc_lingering(g, &oldest);
    uint8_t *to = op->copy;
    for (uint32_t i = 0; i < op->n_slots; i++)
        if (is_owed(&op->slots[i]))
            to = keep(&op->slots[i], to);
    op->lingers = 1;
    g->linger_bytes += op->copy_bytes;
    g->host->lingering++;
    show(g, n + 1, n ? oldest : op->number);
}

int lc_is_lingering(const lc_op *op) {
    return op->lingers && op->finished;
}

/* Of those that are left, in the order of their numbers. */
static uint32_t oldest_but(const lc_op *gone) {
    const lc_group *g = gone->group;
    uint32_t oldest = gone->number, least = UINT32_MAX;
    for (uint32_t i = 0; i < LC_OPS; i++) {
        const lc_op *op = g->table[i];
        if (op && op != gone && op->lingers && op->number - gone->number < least) {
            oldest = op->number;
            least = op->number - gone->number;
        }
    }
    return oldest;
}

void lc_linger_over(lc_op *op) {
    lc_group *g = op->group;
    uint32_t oldest, n = lc_lingering(g, &oldest);
    if (!op->lingers)
        return;
    g->linger_bytes -= op->copy_bytes;
    g->host->lingering--;
    show(g, n - 1, n > 1 && oldest == op->number ? oldest_but(op) : oldest);
}

int lc_linger_sent(const lc_op *op) {
    if (op->runs)
        return 0;
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].state == LC_OUT_OPEN && s->outs[j].cursor < s->n_packets)
                return 0;
    }
    return 1;
}
