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
    s->value = to;
    s->own = to;
    return to + lc_copy_bytes(bytes);
}

/* Its caller is to hear that a peer which should take part has gone. */
static int lacks_peer(const lc_op *op) {
    const lc_group *g = op->group;
    for (uint16_t i = 0; i < g->config.size; i++)
        if (op->peers[i].dest && atomic_load(&g->members[i].left))
            return 1;
    return 0;
}

void lc_linger(lc_op *op) {
    lc_group *g = op->group;
    if (!op->copy_bytes || atomic_load(&g->lingering) >= LC_LINGERING ||
        g->linger_bytes + op->copy_bytes > LC_LINGERING_BYTES || lacks_peer(op))
        return;
    uint8_t *to = op->copy;
    for (uint32_t i = 0; i < op->n_slots; i++)
        if (op->slots[i].desc.n_dests)
            to = keep(&op->slots[i], to);
    op->lingers = 1;
    g->linger_bytes += op->copy_bytes;
    g->host->lingering++;
    if (!atomic_fetch_add(&g->lingering, 1))
        atomic_store(&g->linger_oldest, op->number);
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
    if (!op->lingers)
        return;
    if (g->host->lingering > 1 && atomic_load(&g->linger_oldest) == op->number)
        atomic_store(&g->linger_oldest, oldest_but(op));
    g->linger_bytes -= op->copy_bytes;
    g->host->lingering--;
    atomic_fetch_sub(&g->lingering, 1);
}

int lc_linger_sent(const lc_op *op) {
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        for (uint32_t j = 0; j < s->desc.n_dests; j++)
            if (s->outs[j].state == LC_OUT_OPEN && s->outs[j].cursor < s->n_packets)
                return 0;
    }
    return 1;
}
