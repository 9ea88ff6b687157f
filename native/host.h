/* A host's beginning and end. */
#ifndef LC_HOST_H
#define LC_HOST_H

#include "state.h"
#include "step.h"

/* Stops the thread, closes the links and frees everything. The host's groups are closed before. */
void lc_host_free(lc_host *h);

#endif
