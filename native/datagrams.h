/* Datagrams in. */
#ifndef LC_DATAGRAMS_H
#define LC_DATAGRAMS_H

#include "records_in.h"

/* Takes what has come, up to a bound. Returns whether anything had. */
int lc_receive(lc_host *h);
/* Takes all that has come by any link, as far as links hold it. */
void lc_receive_all(lc_host *h);
/* Delivers the datagram that injection has held back. */
void lc_release_held(lc_host *h, lc_path *p);

#endif
