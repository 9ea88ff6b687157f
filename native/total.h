/* How fast the paths of one interface deliver together. What each alone has seen may be the whole
 * of what they share. */
#ifndef LC_TOTAL_H
#define LC_TOTAL_H

#include <stdint.h>

typedef struct {
    uint64_t began_ns;   /* the present stretch of time, */
    uint32_t taken;      /* and packets that were acknowledged in it */
    uint64_t epoch_ns;   /* when the present epoch began */
    double most, before; /* packets/s: the most of a stretch of this epoch, and of the last */
} lc_total;

/* So many packets of any path have come. */
void lc_total_add(lc_total *total, uint64_t now, uint32_t packets);
/* Packets/s: the most of the last 10 to 20 seconds in which anything was sent; 0: not known. */
double lc_total_rate(const lc_total *total);
/* The share of their rates that paths may begin with whose rates are `sum` together and at most
 * `most` each. */
double lc_total_share(const lc_total *total, double sum, double most);

#endif
