#include "gate.h"

#include <string.h>

#include "waiter.h"

int lc_gate_is_open(const lc_gate *gate) {
    return !gate || __atomic_load_n(&gate->ready, __ATOMIC_SEQ_CST);
}

void lc_gate_done(const lc_op *op) {
    if (op->call.gate)
        __atomic_store_n(&op->call.gate->done, 1, __ATOMIC_RELEASE);
}

static void spoil(const lc_gate *gate) {
    if (gate->spoiled)
        memset(gate->spoiled, 0xFF, gate->spoiled_bytes);
}

/* Before the gate is opened a device may be writing there: who opens it then sees the failure,
 * since of two stores and two loads that are sequentially consistent one load at least comes last.
 */
void lc_gate_fail(const lc_op *op) {
    lc_gate *gate = op->call.gate;
    if (!gate)
        return;
    __atomic_store_n(&gate->failed, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&gate->ready, __ATOMIC_SEQ_CST))
        spoil(gate);
}

void lc_gate_open(void *gate) {
    lc_gate *g = gate;
    lc_waiter wakers[2] = {{g->wake[0]}, {g->wake[1]}};
    __atomic_store_n(&g->ready, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&g->failed, __ATOMIC_SEQ_CST))
        spoil(g);
    /* Who drives may be about to sleep: it looks at what waits for it, but not at gates. */
    lc_waiter_wake(&wakers[0]);
    lc_waiter_wake(&wakers[1]);
}
