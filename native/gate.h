/* Operations whose input a device has yet to write (lc_gate). */
#ifndef LC_GATE_H
#define LC_GATE_H

#include "op.h"

/* Whether the input is there of an operation with such a gate, or none. */
int lc_gate_is_open(const lc_gate *gate);
/* Has whoever waits for the gate read the output. */
void lc_gate_done(const lc_op *op);
/* Before lc_gate_done, of an operation that has failed: nobody takes half a result for a whole one.
 */
void lc_gate_fail(const lc_op *op);

#endif
