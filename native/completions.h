/* Finished operations of any groups, until their owners' one thread takes them. */
#ifndef LC_COMPLETIONS_H
#define LC_COMPLETIONS_H

#include "state.h"

/* Of a finished operation with notify, to the end of its group's queue, which there is. The host's
 * lock may be held. */
void lc_completions_put(lc_op *op);
/* Takes a group's out: nobody hears of them. Before they are freed. */
void lc_completions_drop(const lc_group *g);

#endif
