/* Folding: of hosts that all do alike, the first ones are simulated, and stand for the others too.
 *
 * Rank r stands for r + n * real, for every n. What it sends to a rank that isn't simulated goes to
 * the one that stands for it, and reads there as if all its names were n * real smaller: sender,
 * receiver, and the numbers of slots. So each simulated rank has all its peers, with a path, a rate
 * and timers for each, and every packet that it hears was sent by a whole engine. */
#ifndef LC_FOLD_H
#define LC_FOLD_H

#include <stddef.h>
#include <stdint.h>

enum { LC_FOLD_OPS = 256 };

typedef struct {
    uint16_t ranks; /* in all, */
    uint16_t real;  /* and those that are simulated: the first ones; they divide all */
    uint16_t fixed; /* slots whose numbers are everywhere the same; the others are blocks */
    uint16_t block; /* of so many, in which numbers go around */
    uint64_t session;
    uint16_t steps[LC_FOLD_OPS]; /* by operation, the last ones: by how much numbers are larger real
                                    ranks later */
} lc_fold;

/* Renames a datagram of n bytes, of which `kept` stand at `data`, that goes to rank `to`: all of
 * its headers are among these. */
void lc_fold_rename(const lc_fold *fold, uint16_t to, uint8_t *data, size_t kept, size_t n);

#endif
