/* Freed blocks, kept for the next operation: large blocks cost page faults. Those that none wants
 * for a while go back to the system. */
#ifndef LC_POOL_H
#define LC_POOL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { LC_POOL_BLOCKS = 4 };
typedef struct {
    void *block[LC_POOL_BLOCKS];
    size_t bytes[LC_POOL_BLOCKS];
    uint8_t aged[LC_POOL_BLOCKS]; /* how often lc_pool_age has seen it, at most twice */
} lc_pool;

/* A block of at least `need` bytes, *got of them; NULL: no memory. Frees a block that lc_pool_age
 * has seen twice. Both take the lock. */
void *lc_pool_take(lc_pool *pool, pthread_mutex_t *lock, size_t need, size_t *got);
/* Keeps the block in the place of an empty or the smallest one, which is freed. */
void lc_pool_give(lc_pool *pool, pthread_mutex_t *lock, void *block, size_t bytes);
/* Frees what has been kept since the call before, or leaves that to lc_pool_take. Takes the lock.
 */
void lc_pool_age(lc_pool *pool, pthread_mutex_t *lock, int frees);
void lc_pool_clear(lc_pool *pool);

#endif
