/* A forked child inherits memory, descriptors and keys, and owns none of them: what it sent would
 * repeat numbers that its parent seals with, and what it received its parent would lack. */
#ifndef LC_FORKS_H
#define LC_FORKS_H

#include <stdint.h>

/* A descriptor that forked children close. While a child lived that had it, the port would stay
 * taken after its parent's end. All 0 before lc_owned_open. */
typedef struct lc_owned {
    struct lc_owned *next;
    struct lc_owned *before;
    int fd;
} lc_owned;

/* How often this process's memory has been copied by forks on the way to it. Noted by what belongs
 * to one process, it tells whether that is this one. */
uint32_t lc_forks(void);

/* Takes a descriptor, which may be -1. */
void lc_owned_open(lc_owned *owned, int fd);

/* Closes the descriptor, if this process has it. */
void lc_owned_close(lc_owned *owned);

#endif
