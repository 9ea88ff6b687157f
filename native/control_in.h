/* Control records in. */
#ifndef LC_CONTROL_IN_H
#define LC_CONTROL_IN_H

#include "eager.h"

void lc_control_arrived(lc_engine *e, const lc_header *h, const uint8_t *payload);
/* Looks which peers have posted the operation before this rank did. */
void lc_check_early(lc_engine *e, lc_op *op);

#endif
