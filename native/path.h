/* Ways to other processes, of which some come, leave and come back while the host runs. */
#ifndef LC_PATH_H
#define LC_PATH_H

#include "state.h"

/* Sets a path up whose memory nobody has touched before, unless it is: most numbers are nobody's,
 * and cost nothing. Its host has not been started, or under the host's lock. */
void lc_path_begin(const lc_host *h, lc_path *p, lc_interface *via, uint64_t now);

/* Memory that a path has while somebody is at its other end. Without it nothing comes by the path,
 * and what is to go there is dropped. */
typedef struct {
    lc_queued *records;
    lc_early *early;
    uint8_t *held;
    uint32_t *units_at; /* NULL where a packet is a unit */
    lc_pieces *pieces;  /* NULL where no packet is too large */
} lc_room;

/* Of a path by `via`. LC_OK or LC_E_MEMORY. */
int lc_room_make(lc_room *room, const lc_interface *via);
void lc_room_free(lc_room *room);
/* The path has this room from then on. Returns the one that it had. */
lc_room lc_path_exchange(lc_path *p, const lc_room *room);

/* What a caller wants of a path, prepared so that the loop allocates nothing; the caller waits. */
struct lc_admission {
    uint16_t process;
    const lc_address *address; /* NULL: it is gone */
    lc_seal *seal; /* the path's from then on; its former one comes back in its place, */
    lc_room room;  /* and so does its room */
    int code;      /* LC_PENDING until the loop has seen to it */
    lc_admission *next;
};

/* Gives a path its address, and makes it one of those that its interface serves. */
int lc_path_reach(lc_host *h, lc_path *p, const lc_address *address);
/* What this process lets each path of an interface have in flight, of what the link holds. */
void lc_share_credits(const lc_host *h, lc_interface *via);
/* Once a turn, by who drives: sees to those that wait. */
void lc_admit_waiting(lc_host *h);

#endif
