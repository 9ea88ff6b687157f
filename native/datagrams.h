/* Datagrams in. */
#ifndef LC_DATAGRAMS_H
#define LC_DATAGRAMS_H

#include "control_in.h"

/* Takes what has come, up to a bound. Returns whether anything had. Stops at a failure. */
int lc_receive(lc_engine *e);
void lc_release_held(lc_engine *e, lc_peer *peer);

#endif
