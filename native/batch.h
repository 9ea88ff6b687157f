/* The batch: packets on their way from streams to a link. A link takes them over, and may read
 * their memory for some time after that; as long as it does, their operation doesn't end. */
#ifndef LC_BATCH_H
#define LC_BATCH_H

#include "state.h"

/* A run that is put together for an operation, which holds the operation from now on. There is
 * room: via->n_runs < LC_BATCH_RUNS. Returns its index. */
int lc_batch_add(lc_interface *via, lc_op *op);
/* Seals a run, which is number i of those of its link's batch, or of control in its place. From now
 * on its pieces lie one behind the other. Nothing where the link isn't sealed. */
void lc_batch_seal(const lc_host *h, lc_interface *via, lc_run *run, int i);
/* Hands over what is in the batch. Returns whether the batch is empty now. */
int lc_batch_flush(lc_host *h, lc_interface *via);
/* Takes note of what links need no more; touches the operations. */
void lc_batch_completed(lc_host *h);
/* Forgets what is in the batches of a group, which has failed. What links still read stays. */
void lc_batch_drop(lc_host *h, const lc_group *g);
/* The link is unusable for good, and with it every group that has a member there. */
void lc_fail_interface(lc_host *h, lc_interface *via, int sys_errno);

#endif
