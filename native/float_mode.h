/* How a thread treats floats of small magnitude is its own affair: programs have theirs flush
 * denormal numbers to zero (torch.set_flush_denormal), and new threads inherit that. What is sent
 * must not depend on which thread does the engine's work. */
#ifndef LC_FLOAT_MODE_H
#define LC_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
enum { LC_FLUSHES = 1 << 15 | 1 << 6 }; /* results, and operands */
static inline uint64_t lc_float_mode(void) {
    return _mm_getcsr();
}
static inline void lc_set_float_mode(uint64_t mode) {
    _mm_setcsr((uint32_t)mode);
}
#elif defined(__aarch64__)
enum { LC_FLUSHES = 1 << 24 | 1 << 19 }; /* of floats, and of halves */
static inline uint64_t lc_float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void lc_set_float_mode(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
enum { LC_FLUSHES = 0 };
static inline uint64_t lc_float_mode(void) {
    return 0;
}
static inline void lc_set_float_mode(uint64_t mode) {
    (void)mode;
}
#endif

/* Keeps denormal numbers from now on. Returns the mode before, for lc_floats_as_before. */
static inline uint64_t lc_floats_exact(void) {
    uint64_t before = lc_float_mode();
    if (before & LC_FLUSHES)
        lc_set_float_mode(before & ~(uint64_t)LC_FLUSHES);
    return before;
}

static inline void lc_floats_as_before(uint64_t before) {
    if (before & LC_FLUSHES)
        lc_set_float_mode(before);
}

#endif
