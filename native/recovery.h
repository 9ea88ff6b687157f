/* What brings back the lost packets of a stream in the least time: nothing, parity, resending, or
 * both. Numbers alone; docs/parity.md has the model, lossycoll/simulate/recovery.py the same in
 * Python. */
#ifndef LC_RECOVERY_H
#define LC_RECOVERY_H

#include "sets.h"

enum { LC_RECOVERY_ROUNDS = 3 }; /* the most that are chosen */

/* lossycoll.h declares lc_recovery, lc_recovery_ask, lc_recovery_choose and lc_recovery_left, for
 * tests. */

/* Choices of one path, kept until what was measured changes. */
enum { LC_RECOVERY_KEPT = 16 };
typedef struct {
    lc_recovery_ask asks[LC_RECOVERY_KEPT];
    lc_recovery recoveries[LC_RECOVERY_KEPT];
} lc_recovery_memo;

/* As lc_recovery_choose, but takes a choice that was made for such a stream while loss has changed
 * by less than a tenth and the mean run by less than a quarter, and times and rates have neither
 * doubled nor halved. */
lc_recovery lc_recovery_recall(lc_recovery_memo *memo, const lc_recovery_ask *ask);

#endif
