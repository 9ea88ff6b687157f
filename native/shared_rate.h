/* How fast the paths of one interface deliver together. What each alone has seen may be the whole
 * of what they share. */
#ifndef LC_SHARED_RATE_H
#define LC_SHARED_RATE_H

#include <stdint.h>

typedef struct {
    uint64_t began_ns;   /* the present stretch of time, */
    uint32_t taken;      /* and packets that were acknowledged in it */
    uint64_t epoch_ns;   /* when the present epoch began */
    double most, before; /* packets/s: the most of a stretch of this epoch, and of the last */
} lc_shared_rate;

/* So many packets of any path have come. */
void lc_shared_rate_add(lc_shared_rate *shared, uint64_t now, uint32_t packets);
/* Packets/s: the most of the last 10 to 20 seconds in which anything was sent; 0: not known. */
double lc_shared_rate_now(const lc_shared_rate *shared);
/* The share of their rates that paths may begin with whose rates are `sum` together and at most
 * `most` each. */
double lc_shared_rate_share(const lc_shared_rate *shared, double sum, double most);

#endif
