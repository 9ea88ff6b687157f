/* Data that comes, and eager packets that have to wait. */
#ifndef LC_EAGER_H
#define LC_EAGER_H

#include "stream_in.h"

void lc_data_arrived(lc_group *g, uint16_t peer, const lc_header *header, const uint8_t *payload);
/* Both members are known to mean the same by the operation. */
void lc_agree(lc_group *g, uint32_t number, uint16_t peer);
/* Takes the group's packets whose time has come. */
void lc_take_waiting(lc_group *g, uint16_t peer);
/* Drops the group's packets. */
void lc_drop_waiting(lc_group *g, uint16_t peer);

#endif
