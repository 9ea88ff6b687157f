/* Means against loss for what is sent: chosen when a stream begins, by what its path is known to
 * be.
 */
#ifndef LC_RECOVERY_CHOICE_H
#define LC_RECOVERY_CHOICE_H

#include "state.h"

/* Fixes the code and the rounds of a stream whose first packet is about to go; with the first
 * stream of a slot, the code of the slot's parity. */
void lc_choose_recovery(lc_out *out);

#endif
