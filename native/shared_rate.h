/* How fast the paths of one interface deliver together. What each alone has seen may be the whole
 * of what they share. */
#ifndef LC_SHARED_RATE_H
#define LC_SHARED_RATE_H

#include <stdint.h>

typedef struct {
    uint64_t began_ns, heard_ns; /* the present stretch of time, and when packets last came in it */
    uint32_t taken;              /* packets that were acknowledged in it */
    int held;                    /* sending was held back in it */
    uint64_t epoch_ns;           /* when the present epoch began */
    double most, before; /* packets/s: the most of a stretch of this epoch, and of the last */
    uint32_t flat;       /* stretches since one brought more than all before */
    uint32_t untold;     /* times of sending in a row that were too short to tell a rate */
} lc_shared_rate;

/* So many packets of any path have come, of one with such a round trip. `held`: it had more to
 * send. */
void lc_shared_rate_add(lc_shared_rate *shared, uint64_t now, uint32_t packets, uint64_t rtt_ns,
                        int held);
/* Packets/s: the most of the last 10 to 20 seconds in which sending was held back; 0: not known. */
double lc_shared_rate_now(const lc_shared_rate *shared);
/* Packets/s of paths that begin together, of which none has had more than `most`. */
double lc_shared_rate_begin(const lc_shared_rate *shared, double most);
/* Packets/s that such paths may send together as they go on; infinite where that isn't known. */
double lc_shared_rate_bound(const lc_shared_rate *shared, double most);

#endif
