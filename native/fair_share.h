/* What each path may send beside the others of its interface. Each has found its rate while others
 * had nothing to send; together they may be several times what their port carries. */
#ifndef LC_FAIR_SHARE_H
#define LC_FAIR_SHARE_H

#include "state.h"

/* The share of its rate at which a path begins after a pause, beside those that send by now. */
double lc_fair_share_to_begin(const lc_interface *via, const lc_path *p);
/* The share of its rate that it may go on with; above 1: what the port carries leaves it more. */
double lc_fair_share(lc_interface *via, const lc_path *p, uint64_t now);

#endif
