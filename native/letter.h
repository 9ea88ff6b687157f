/* Letters' memory: the operations that carry messages, and the form in which small ones travel.
 *
 * A message of more than LC_MAIL_SMALL bytes is a stream of its bytes. A small one is laid out as
 * it travels: each of its packets begins with the record that says what the message is, so that
 * any of them may come first. Docs: docs/messages.md. */
#ifndef LC_LETTER_H
#define LC_LETTER_H

#include "state.h"

/* The record that announces a message. */
lc_record lc_letter_record(const lc_letter *letter);
/* What a record says of a message, as a letter without an operation. Returns whether it makes
 * sense. */
int lc_letter_read(lc_letter *letter, const lc_record *record);

static inline int lc_letter_is_small(const lc_letter *letter) {
    return letter->bytes <= LC_MAIL_SMALL;
}
static inline uint64_t lc_letter_charge(const lc_letter *letter) {
    return letter->bytes + LC_MAIL_CHARGE;
}

/* A copy of `like`, in no list, with an operation to send or receive it. data: the bytes of a send,
 * where a receive puts them; not used for an arrival. *code says why there is none. Takes the lock
 * of the pool. */
lc_letter *lc_letter_make(lc_group *g, const lc_letter *like, void *data, int *code);
/* A send that has its number: small ones carry it in each packet. */
void lc_letter_seal(const lc_group *g, lc_letter *letter);
/* A large receive from any rank has its message: cuts it into the packets that come from there. */
void lc_letter_cut(const lc_group *g, lc_letter *receive);
/* Packets of the message that comes may be missing at the end of the receive: both ends ask for it.
 * Its sender needn't know. It resends what it is asked for, until it hears that this is all. */
void lc_letter_loosen(const lc_letter *receive, const lc_letter *message);
/* A copy without an operation. NULL: no memory. */
lc_letter *lc_letter_note(const lc_letter *like);
/* Takes it out of its list, and frees it with its operation. Not for those with a ticket. */
void lc_letter_free(lc_group *g, lc_letter *letter);
/* A small message into the memory of its receive. */
void lc_letter_open(const lc_letter *arrival, uint8_t *data);

#endif
