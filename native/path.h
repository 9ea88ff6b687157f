/* Ways to other processes, of which some come, leave and come back while the host runs. */
#ifndef LC_PATH_H
#define LC_PATH_H

#include "state.h"

/* What a caller wants of a path, prepared so that the loop allocates nothing; the caller waits. */
struct lc_admission {
    uint16_t process;
    const lc_address *address; /* NULL: it is gone */
    lc_seal *seal;             /* the path's from then on; its former one comes back in its place */
    int code;                  /* LC_PENDING until the loop has seen to it */
    lc_admission *next;
};

/* Gives a path its address, and makes it one of those that its interface serves. */
int lc_path_reach(lc_host *h, lc_path *p, const lc_address *address);
/* What this process lets each path of an interface have in flight, of what the link holds. */
void lc_share_credits(lc_interface *via);
/* Once a turn, by who drives: sees to those that wait. */
void lc_admit_waiting(lc_host *h);

#endif
