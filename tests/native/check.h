/* CHECK(condition): prints where it failed and goes on, so that one run shows every failure. With
 * CHECK_FIRST in the environment the first one ends the program, for who looks whether there is
 * any. A test's main ends with `return check_result("name");`. */
#ifndef LC_CHECK_H
#define LC_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECK_SHOWN = 20 };

static unsigned long check_total, check_failed;

static inline int check_that(int ok, const char *file, int line, const char *condition) {
    __atomic_fetch_add(&check_total, 1, __ATOMIC_RELAXED); /* tests have threads */
    if (!ok && __atomic_fetch_add(&check_failed, 1, __ATOMIC_RELAXED) < CHECK_SHOWN)
        fprintf(stderr, "%s:%d: not true: %s\n", file, line, condition);
    if (!ok && getenv("CHECK_FIRST"))
        _Exit(1);
    return ok;
}

#define CHECK(condition) check_that(!!(condition), __FILE__, __LINE__, #condition)

/* For loops: says at which values it failed. */
#define CHECK_AT(condition, ...)                                                                   \
    do {                                                                                           \
        if (!CHECK(condition) &&                                                                   \
            __atomic_load_n(&check_failed, __ATOMIC_RELAXED) <= CHECK_SHOWN) {                     \
            fprintf(stderr, "    at " __VA_ARGS__);                                                \
            fprintf(stderr, "\n");                                                                 \
        }                                                                                          \
    } while (0)

/* -sample: the caller is content with some of the test. */
static inline int check_samples(int argc, char **argv) {
    return argc > 1 && !strcmp(argv[1], "-sample");
}

static inline int check_result(const char *name) {
    printf("%-12s %lu checks, %lu failed\n", name, check_total, check_failed);
    return check_failed != 0;
}

#endif
