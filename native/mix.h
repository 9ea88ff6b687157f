/* The one random function: a bijection on 64-bit words, and keys that are made by it.
 * lossycoll/plan/rng.py is the same. */
#ifndef LC_MIX_H
#define LC_MIX_H

#include <stddef.h>
#include <stdint.h>

/* splitmix64: one step of its counter, then its finalizer. */
static inline uint64_t lc_mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* A key for a name of several numbers. The first word tells apart what keys are for. */
static inline uint64_t lc_key_of(uint64_t first, const uint64_t *words, size_t n) {
    uint64_t key = lc_mix(first);
    for (size_t i = 0; i < n; i++)
        key = lc_mix(key ^ words[i]);
    return key;
}

#endif
