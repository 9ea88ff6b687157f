/* A forked child inherits memory, descriptors and keys, and owns none of them: what it sent would
 * repeat numbers that its parent seals with, and what it received its parent would lack. */
#ifndef LC_FORKS_H
#define LC_FORKS_H

#include <stdint.h>

/* How often this process's memory has been copied by forks on the way to it. Noted by what belongs
 * to one process, it tells whether that is this one. */
uint32_t lc_forks(void);

#endif
