/* What brings back the lost packets of a stream in the least time: nothing, parity, resending, or
 * both. Numbers alone; docs/parity.md has the model, lossycoll/simulate/recovery.py the same in
 * Python. */
#ifndef LC_MEANS_H
#define LC_MEANS_H

#include "sets.h"

enum { LC_MEANS_ROUNDS = 3 }; /* the most that are chosen */

/* lossycoll.h declares lc_means, lc_means_ask, lc_means_choose and lc_means_left, for tests. */

/* Choices of one path, kept until what was measured changes. */
enum { LC_MEANS_KEPT = 16 };
typedef struct {
    lc_means_ask asks[LC_MEANS_KEPT];
    lc_means means[LC_MEANS_KEPT];
} lc_means_memo;

/* As lc_means_choose, but takes a choice that was made for such a stream while loss has changed by
 * less than a tenth and the mean run by less than a quarter, and times and rates have neither
 * doubled nor halved. */
lc_means lc_means_recall(lc_means_memo *memo, const lc_means_ask *ask);

#endif
