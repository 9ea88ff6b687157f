/* Data that comes, and eager packets that have to wait. */
#ifndef LC_EAGER_H
#define LC_EAGER_H

#include "stream_in.h"

void lc_data_arrived(lc_engine *e, const lc_header *h, const uint8_t *payload);
/* Both ranks are known to mean the same by the operation. */
void lc_agree(lc_engine *e, uint32_t number, uint16_t peer);
/* Takes the packets whose time has come. */
void lc_take_waiting(lc_engine *e, uint16_t peer);
void lc_drop_waiting(lc_engine *e, uint16_t peer);

#endif
