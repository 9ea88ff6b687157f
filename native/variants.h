/* One source compiled once for each instruction set: names that differ by the set's. Include it
 * before any function that computes: the pragma holds from here to the end of the file. */
#ifndef LC_VARIANTS_H
#define LC_VARIANTS_H

/* Variants must agree bit for bit, so no target may fuse a multiplication with an addition.
 * Clang is told here; gcc does not know this pragma, and does not fuse under -std=c11. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#define JOIN2_(a, b)    a##_##b
#define JOIN2(a, b)     JOIN2_(a, b)
#define JOIN3_(a, b, c) a##_##b##_##c
#define JOIN3(a, b, c)  JOIN3_(a, b, c)

#endif
