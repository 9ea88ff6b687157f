/* Control records in. */
#ifndef LC_RECORDS_IN_H
#define LC_RECORDS_IN_H

#include "eager.h"

/* g: the group that the records are about; NULL if it is not here, or they are about the path. */
void lc_control_arrived(lc_host *h, lc_path *p, lc_group *g, const lc_header *header,
                        const uint8_t *payload);
/* Looks which members have posted the operation before this one did. */
void lc_check_early(lc_op *op);

#endif
