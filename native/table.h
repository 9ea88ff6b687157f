/* Tables that grow: by number, and zero where nothing was written. */
#ifndef LC_TABLE_H
#define LC_TABLE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Room for at least `wanted` entries of so many bytes each. Returns the table, which may have
 * moved, and its room in *n; NULL: there is no memory, and it is as it was. */
static inline void *lc_table_grown(void *table, uint32_t *n, uint32_t wanted, size_t bytes) {
    uint32_t room = *n ? *n : 8;
    while (room < wanted)
        room *= 2;
    uint8_t *grown = realloc(table, room * bytes);
    if (!grown)
        return NULL;
    memset(grown + *n * bytes, 0, (room - *n) * bytes);
    *n = room;
    return grown;
}

#endif
