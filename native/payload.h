/* The bytes of a slot's packets, as they travel.
 *
 * Elements that need no encoding are sent from where they lie. Others are encoded once, into memory
 * that is laid out with the operation, and every sending, resending and parity reads those bytes.
 * Only the driving thread calls these. Bytes stay where they are until the operation's block is
 * freed.
 */
#ifndef LC_PAYLOAD_H
#define LC_PAYLOAD_H

#include "op.h"

/* Bytes of packet k that is sent, */
uint32_t lc_payload_bytes(const lc_op_slot *s, uint32_t k);
/* and of one that comes. */
uint32_t lc_payload_in_bytes(const lc_op_slot *s, uint32_t k);
/* Where they are, once packet k is ready. A slot without sources encodes here what is asked for. */
const uint8_t *lc_payload(lc_op_slot *s, uint32_t k);
/* Packet k has come, and its slot stores it: decoded here, sent on as it is. */
void lc_payload_store(lc_op_slot *s, uint32_t k, const uint8_t *payload);
/* Packet k of a sum is finished. What the rank keeps of it becomes what the others get. */
void lc_payload_finish(lc_op_slot *s, uint32_t k);

#endif
