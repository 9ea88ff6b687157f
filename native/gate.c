#include "gate.h"

#include <string.h>

#include "waiter.h"

int lc_gate_is_open(const lc_op *op) {
    const lc_gate *gate = op->call.gate;
    return !gate || __atomic_load_n(&gate->ready, __ATOMIC_ACQUIRE);
}

void lc_gate_done(const lc_op *op) {
    if (op->call.gate)
        __atomic_store_n(&op->call.gate->done, 1, __ATOMIC_RELEASE);
}

void lc_gate_spoil(const lc_op *op) {
    if (op->call.gate && op->call.out)
        memset(op->call.out, 0xFF, op->call.out_elements * op->element_bytes);
}

void lc_gate_open(void *gate) {
    lc_gate *g = gate;
    lc_waiter wakers[2] = {{g->wake[0]}, {g->wake[1]}};
    __atomic_store_n(&g->ready, 1, __ATOMIC_SEQ_CST);
    /* Who drives may be about to sleep: it looks at what waits for it, but not at gates. */
    lc_waiter_wake(&wakers[0]);
    lc_waiter_wake(&wakers[1]);
}
