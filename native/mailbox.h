/* The messages of one group at this rank, as far as they are under way: data alone, no protocol.
 *
 * A letter is a message from the view of one rank: a send, a receive, or what arrives. Messages
 * from one rank to another are numbered in the order of their sends. A letter is in one list at a
 * time, which says what it waits for; letters that packets or records may name are in a table by
 * peer and number as well.
 *
 * All of it belongs to who drives the host, but for the fields of lc_mail_peer that say
 * otherwise. */
#ifndef LC_MAILBOX_H
#define LC_MAILBOX_H

#include <stdatomic.h>

#include "op.h"

enum {
    LC_MAIL_SMALL = 1 << 16,     /* bytes of the largest message that is sent before it is wanted */
    LC_MAIL_PARITY = 16,         /* at most so many packets of parity for 64 */
    LC_MAIL_CREDIT = 1 << 20,    /* bytes that a peer may keep here before they are wanted, in one
                                    group; */
    LC_MAIL_SHARES = 4,          /* in all of its groups, so many times as many (lc_mail_is_fair) */
    LC_MAIL_CHARGE = 256,        /* what a message counts against that besides its bytes */
    LC_MAIL_AHEAD = 4096,        /* messages that may be told of before the first one is heard */
    LC_MAIL_ANNOUNCED = 1 << 16, /* messages that a peer may have announced, likewise */
    LC_MAIL_TAGS = 256,          /* buckets */
    LC_MAIL_NUMBERS = 32         /* buckets of a peer */
};

enum lc_letter_kind {
    LC_LETTER_SEND = 0,
    LC_LETTER_RECEIVE, /* what a caller has posted */
    LC_LETTER_ARRIVAL  /* a message that was announced, or that comes ahead of its receive */
};

typedef struct lc_letters lc_letters;

typedef struct lc_letter {
    struct lc_letter *next, *prev; /* in its list */
    lc_letters *list;              /* NULL: in none */
    struct lc_letter *next_numbered;
    struct lc_letter *receive; /* of a small arrival that was granted: the receive it is for */
    lc_op *op;                 /* NULL: of an arrival that is only announced */
    uint8_t *data;             /* of a receive: where the message goes */
    uint64_t tag, elements, bytes;
    uint64_t again_ns; /* when the announcement or the grant is repeated */
    uint64_t again_wait_ns;
    uint32_t number; /* among those from sender to receiver */
    uint32_t type;   /* of the elements: callers' codes, compared alone */
    int32_t peer;    /* -1: a receive from any rank that has no message yet */
    uint16_t element_bytes;
    uint8_t kind;
    uint8_t eager;    /* small, and sent ahead within the credit */
    uint8_t detached; /* a send that its caller takes for done */
    uint8_t numbered; /* in the table of its peer */
    uint8_t counted;  /* in lc_host.active */
    uint8_t whole;    /* of an arrival: all of it is here */
    uint8_t over;     /* of a receive: it is filled, or has failed */
    uint8_t lossy;    /* large, and this end of it asks that packets may be missing, */
    uint8_t repair;   /* after so many rounds of resending; */
    uint8_t missing;  /* lc_missing of a receive: what these leave */
} lc_letter;

struct lc_letters {
    lc_letter *first, *last;
};

typedef struct {
    /* what goes there */
    lc_letter *sent[LC_MAIL_NUMBERS]; /* by number */
    uint32_t started;                 /* messages before this one have been told of */
    uint32_t queued;                  /* messages before this one are in the loop's hands */
    uint32_t told;                    /* messages before this one have been heard there */
    uint64_t returned;                /* bytes of credit that it says it has given back, ever */
    /* what comes from there */
    lc_letter *came[LC_MAIL_NUMBERS]; /* by number */
    uint32_t heard;                   /* messages before this one have been heard here, in order */
    uint32_t announced;               /* letters that are only announced */
    uint64_t kept;                    /* bytes of credit that letters take up */
    uint64_t taken;                   /* bytes of credit that receives have freed, ever */
    uint64_t taken_told;
    uint64_t due_ns;  /* when the peer is told of heard and taken at the latest; 0: it knows */
    uint64_t ask_ns;  /* when it is asked whether it is there */
    uint64_t left_ns; /* when it left, as long as it may still answer */
    uint8_t gone;     /* it died or left: no message comes from it, and none begins to go to it */
    /* under the host's lock */
    uint32_t next; /* number of the next send */
    uint64_t used; /* bytes of credit */
} lc_mail_peer;

typedef struct lc_mailbox {
    lc_letters live;                 /* timers are looked at */
    lc_letters waiting;              /* sends that the peer has heard of and not granted */
    lc_letters posted[LC_MAIL_TAGS]; /* receives without a message, in their order */
    lc_letters held[LC_MAIL_TAGS];   /* heard and not wanted yet, in the order of their arrival */
    uint64_t look_ns;                /* when timeouts are looked at */
    uint32_t n_posted;
    uint32_t n_due; /* peers with due_ns */
    uint16_t size;
    atomic_uint unheard; /* detached sends that their receiver may lack; any thread reads it */
    lc_mail_peer peers[];
} lc_mailbox;

/* NULL: no memory. */
lc_mailbox *lc_mailbox_new(uint16_t size);
/* Frees all letters that no caller has a ticket for, and the mailbox. */
void lc_mailbox_free(lc_mailbox *box, lc_pool *pool, pthread_mutex_t *pool_lock);

/* Moves a letter to the end of a list; NULL: to none. */
void lc_letter_move(lc_letter *letter, lc_letters *list);
/* Tables by number. A letter is taken out of the table that it is in. */
void lc_letter_number(lc_letter **table, lc_letter *letter);
void lc_letter_forget(lc_letter **table, lc_letter *letter);
lc_letter *lc_letter_find(lc_letter *const *table, uint32_t number);

/* Whether a group may have `own` of something that two processes share for all of their groups,
 * which then have `all`: no more than a third of what is left. So a group by itself has `alone`,
 * and however much some of them keep, there is something for the next one. */
static inline int lc_mail_is_fair(uint64_t own, uint64_t all, uint64_t alone) {
    return (LC_MAIL_SHARES - 1) * own + all <= LC_MAIL_SHARES * alone;
}

static inline lc_letters *lc_mail_bucket(lc_letters *buckets, uint64_t tag) {
    return &buckets[(tag * 0x9E3779B97F4A7C15u >> 32) % LC_MAIL_TAGS];
}
/* The first receive that takes a message of this tag from this peer, or NULL. It stays in place. */
lc_letter *lc_mail_receive_for(lc_mailbox *box, uint64_t tag, int32_t peer);
/* The first message of this tag from this peer (-1: from any), or NULL. It stays in place. */
lc_letter *lc_mail_message_for(lc_mailbox *box, uint64_t tag, int32_t peer);

#endif
