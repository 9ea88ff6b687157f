/* Freed blocks, kept for what is laid out next. */
#include "pool.h"

#include <stdlib.h>

void *lc_pool_take(lc_pool *pool, pthread_mutex_t *lock, size_t need, size_t *got) {
    void *block = NULL, *old = NULL;
    pthread_mutex_lock(lock);
    for (int i = 0; i < LC_POOL_BLOCKS; i++) {
        int fits = pool->bytes[i] >= need && pool->bytes[i] / 4 <= need + 65536;
        if (pool->block[i] && !block && fits) {
            block = pool->block[i];
            *got = pool->bytes[i];
            pool->block[i] = NULL;
        } else if (pool->block[i] && pool->aged[i] > 1 && !old) {
            old = pool->block[i];
            pool->block[i] = NULL;
        }
    }
    pthread_mutex_unlock(lock);
    free(old);
    if (!block) {
        *got = need;
        block = malloc(need);
    }
    return block;
}

void lc_pool_give(lc_pool *pool, pthread_mutex_t *lock, void *block, size_t bytes) {
    pthread_mutex_lock(lock);
    int at = 0;
    for (int i = 0; i < LC_POOL_BLOCKS; i++) {
        if (!pool->block[i]) {
            at = i;
            break;
        }
        if (pool->bytes[i] < pool->bytes[at])
            at = i;
    }
    void *out = pool->block[at];
    pool->block[at] = block;
    pool->bytes[at] = bytes;
    pool->aged[at] = 0;
    pthread_mutex_unlock(lock);
    free(out);
}

void lc_pool_age(lc_pool *pool, pthread_mutex_t *lock, int frees) {
    void *out[LC_POOL_BLOCKS];
    pthread_mutex_lock(lock);
    for (int i = 0; i < LC_POOL_BLOCKS; i++) {
        out[i] = frees && pool->aged[i] ? pool->block[i] : NULL;
        if (out[i])
            pool->block[i] = NULL;
        else
            pool->aged[i] = pool->aged[i] ? 2 : 1;
    }
    pthread_mutex_unlock(lock);
    for (int i = 0; i < LC_POOL_BLOCKS; i++)
        free(out[i]);
}

void lc_pool_clear(lc_pool *pool) {
    for (int i = 0; i < LC_POOL_BLOCKS; i++) {
        free(pool->block[i]);
        pool->block[i] = NULL;
    }
}
