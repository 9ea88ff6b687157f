/* Messages under way: announced, granted, heard in order, matched with receives, told to be heard.
 *
 * docs/messages.md has the states. As all of the engine below the loop: by who drives the host,
 * and nothing here ends or frees an operation that a caller has a ticket for. */
#ifndef LC_MESSAGE_H
#define LC_MESSAGE_H

#include "stream_in.h"

/* ---- what callers have posted ---- */

/* The loop takes a send or a receive over. */
void lc_message_start(lc_op *op);

/* ---- what comes ---- */

/* A packet of a message's data. */
void lc_message_data(lc_group *g, uint16_t peer, const lc_header *header, const uint8_t *payload);
/* MESSAGE, MAIL, and READY of a message. */
void lc_message_announced(lc_group *g, uint16_t peer, const lc_record *r);
void lc_message_mail(lc_group *g, uint16_t peer, const lc_record *r);
void lc_message_granted(lc_group *g, uint16_t peer, const lc_record *r);
/* The operation of a message that comes from a peer, or goes to it; NULL: it isn't here. */
lc_op *lc_message_from(const lc_group *g, uint16_t peer, uint32_t number);
lc_op *lc_message_to(const lc_group *g, uint16_t peer, uint32_t number);
/* All of it has come before. */
int lc_message_ended(const lc_group *g, uint16_t peer, uint32_t number);

/* ---- ends ---- */

/* Of an operation that was touched. in_batch: packets of it wait for the link. Returns whether it
 * has ended, for a caller that has a ticket; what nobody has a ticket for is kept or freed. */
int lc_message_over(lc_op *op, int in_batch);
/* Nothing comes from the member any more and nothing goes there. lost: it died; else it left, and
 * what came from it as a whole may still be received. */
void lc_message_gone(lc_group *g, uint16_t peer, int lost);
/* A member that has left answers no more. */
void lc_message_silent(lc_group *g, uint16_t peer);
/* The group has failed: takes the next operation out that a caller has a ticket for, and frees all
 * that nobody has. NULL: none is left. */
lc_op *lc_message_take_out(lc_group *g);

/* ---- timers ---- */

/* What a live letter repeats; its streams have timers of their own. */
void lc_message_tick(lc_group *g, lc_letter *letter);
/* What peers are to be told by now, and timeouts. */
void lc_mail_tick(lc_group *g, uint64_t *next);

#endif
