/* Writing of the status page: a file that anybody whom its owner lets can read while this process
 * hangs, is stopped, or has died. The layout is in lossycoll.h.
 *
 * All functions are called under the host's lock, which makes them its only writers. Readers take
 * no lock: they look again while `sequence` is odd or has changed. */
#ifndef LC_PAGE_H
#define LC_PAGE_H

#include "state.h"

void lc_page_close(lc_host *h);
/* The group's block, if one is free. */
void lc_page_open_group(lc_group *g, const char *name);
void lc_page_close_group(lc_group *g);
/* It has been submitted. */
void lc_page_begin(lc_op *op, const char *text);
/* Its caller has got its result, or its failure. A second time nothing. */
void lc_page_end(lc_op *op, uint64_t now);
/* The figures of links, and who has not made the call that is waited for. */
void lc_page_publish(lc_host *h);

#endif
