/* Intel's isa-l, where it is installed: another's code of the same field, to compare with. */
#ifndef LC_ISAL_H
#define LC_ISAL_H

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    void *library; /* NULL: not there */
    unsigned char (*times)(unsigned char a, unsigned char b);
    unsigned char (*inverse)(unsigned char a);
    void (*tables)(int columns, int rows, unsigned char *factors, unsigned char *tables);
    /* Adds column at of that many columns to all rows. */
    void (*add)(int bytes, int columns, int rows, int at, unsigned char *tables,
                unsigned char *from, unsigned char **into);
} isal;

enum { ISAL_TABLE = 32 }; /* bytes for each factor */

static inline isal isal_open(void) {
    static const char *const names[] = {"gf_mul", "gf_inv", "ec_init_tables",
                                        "ec_encode_data_update"};
    isal i = {.library = dlopen("libisal.so.2", RTLD_NOW)};
    void *found[4] = {0};
    for (int n = 0; i.library && n < 4; n++) {
        found[n] = dlsym(i.library, names[n]);
        if (!found[n])
            i.library = NULL;
    }
    if (!i.library) {
        printf("isa-l isn't compared with: libisal.so.2 isn't here\n");
        return i;
    }
    /* C has no cast from an object's pointer to a function's. */
    memcpy(&i.times, &found[0], sizeof found[0]);
    memcpy(&i.inverse, &found[1], sizeof found[1]);
    memcpy(&i.tables, &found[2], sizeof found[2]);
    memcpy(&i.add, &found[3], sizeof found[3]);
    return i;
}

#endif
