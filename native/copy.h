/* Copies of what nobody reads soon. */
#ifndef LC_COPY_H
#define LC_COPY_H

#include <stddef.h>

/* As memcpy, of what nobody reads soon: where the processor can, it is written past the caches, so
 * no line of `to` is read before it is overwritten, and nothing in use is driven out. It is in
 * memory on return, for whoever is told so afterwards. */
void lc_copy_past_caches(void *to, const void *from, size_t bytes);

#endif
