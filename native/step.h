/* A host without a thread, on links and in a time that are given to it: whoever opened it takes
 * its turns. So a whole network of hosts runs in one thread, as fast as it can be computed
 * (sim/sim.h). What callers do is as in lossycoll.h, except that nothing may wait. */
#ifndef LC_STEP_H
#define LC_STEP_H

#include "link.h"

typedef struct lc_setting {
    const lc_clock *clock; /* outlives the host */
    lc_link *const *links; /* they are the host's from then on, if it could be opened */
    uint16_t n_links;
} lc_setting;

/* cdef begin */

typedef struct lc_setting lc_setting;

lc_host *lc_host_open_in(const lc_host_config *config, const lc_setting *setting,
                         lc_failure *failure);
/* Takes a turn. Returns whether anything moved: then the next one is due at once. */
int lc_host_turn(lc_host *host);
/* How long until there is something to do, if nothing arrives and nobody calls until then. */
uint64_t lc_host_idle_ns(lc_host *host);

/* cdef end */

#endif
