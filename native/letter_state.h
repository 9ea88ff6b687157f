/* What a letter waits for, and what its peer is told of it. For message.c and message_timers.c.
 *
 * By who drives the host. */
#ifndef LC_LETTER_STATE_H
#define LC_LETTER_STATE_H

#include "stream_in.h"

static inline lc_mail_peer *lc_letter_peer(const lc_group *g, const lc_letter *letter) {
    return &g->mail->peers[letter->peer];
}

/* The one stream of a letter that has an operation. */
static inline lc_in *lc_letter_in(const lc_letter *letter) {
    return &letter->op->slots[0].ins[0];
}
static inline lc_out *lc_letter_out(const lc_letter *letter) {
    return &letter->op->slots[0].outs[0];
}

/* ---- what it waits for ---- */

/* Letters with timers keep the loop awake: such a one has them, or has none any more. */
void lc_letter_count(lc_group *g, lc_letter *letter, int counted);
/* Its timers are looked at from now on. */
void lc_letter_live(lc_group *g, lc_letter *letter);
/* Its peer knows of it, and has to act next. */
void lc_letter_wait(lc_group *g, lc_letter *letter);
/* Out of all lists and tables. */
void lc_letter_take_out(lc_group *g, lc_letter *letter);
/* The same, and frees it. */
void lc_letter_drop(lc_group *g, lc_letter *letter);
/* A receive is filled or has failed; the loop ends it. */
void lc_letter_end(lc_letter *letter, int code);

/* ---- what it takes up, of what all groups share ---- */

/* Whether there is room for a message that comes ahead, or for its announcement. */
int lc_mail_has_room(const lc_group *g, uint16_t peer, const lc_letter *read);
/* An arrival takes room, until it is dropped. */
void lc_mail_take_room(lc_group *g, const lc_letter *letter);
/* The peer has given back so many bytes of credit, or all. Takes the lock. */
void lc_mail_give_back(lc_group *g, uint16_t peer, uint64_t bytes);
/* The member is gone, and will say of nothing any more that it has been taken. Takes the lock. */
void lc_mail_forget_peer(lc_group *g, uint16_t peer);

/* ---- what the peer is told ---- */

/* Which messages were heard here, and the credit that was freed. ask: it is to say the same. */
void lc_mail_tell(lc_group *g, uint16_t peer, int ask);
/* Something was heard or taken: told at once where the sender may be short of credit, else together
 * with what follows within a millisecond. */
void lc_mail_note(lc_group *g, uint16_t peer);
/* That the message is there. */
void lc_letter_announce(lc_group *g, lc_letter *letter);
/* That it may come; repeated ever more slowly. */
void lc_letter_grant(lc_group *g, lc_letter *letter);
/* The next repetition waits twice as long, up to a bound. */
void lc_letter_again(lc_letter *letter);

#endif
