#include "mailbox.h"

#include <stdlib.h>

lc_mailbox *lc_mailbox_new(uint16_t size) {
    lc_mailbox *box = calloc(1, sizeof *box + size * sizeof *box->peers);
    if (box)
        box->size = size;
    return box;
}

/* Letters whose operations callers have tickets for are freed with those. */
static void drop_all(lc_letters *list, lc_pool *pool, pthread_mutex_t *pool_lock) {
    while (list->first) {
        lc_letter *letter = list->first;
        lc_letter_move(letter, NULL);
        if (!letter->op)
            free(letter);
        else if (letter->kind == LC_LETTER_ARRIVAL || letter->detached)
            lc_op_free(letter->op, pool, pool_lock);
    }
}

void lc_mailbox_free(lc_mailbox *box, lc_pool *pool, pthread_mutex_t *pool_lock) {
    if (!box)
        return;
    drop_all(&box->live, pool, pool_lock);
    drop_all(&box->waiting, pool, pool_lock);
    for (int i = 0; i < LC_MAIL_TAGS; i++) {
        drop_all(&box->posted[i], pool, pool_lock);
        drop_all(&box->held[i], pool, pool_lock);
    }
    free(box);
}

void lc_letter_move(lc_letter *letter, lc_letters *list) {
    lc_letters *from = letter->list;
    if (from) {
        *(letter->prev ? &letter->prev->next : &from->first) = letter->next;
        *(letter->next ? &letter->next->prev : &from->last) = letter->prev;
    }
    letter->list = list;
    letter->next = NULL;
    letter->prev = list ? list->last : NULL;
    if (!list)
        return;
    *(list->last ? &list->last->next : &list->first) = letter;
    list->last = letter;
}

void lc_letter_number(lc_letter **table, lc_letter *letter) {
    lc_letter **bucket = &table[letter->number % LC_MAIL_NUMBERS];
    letter->next_numbered = *bucket;
    letter->numbered = 1;
    *bucket = letter;
}

void lc_letter_forget(lc_letter **table, lc_letter *letter) {
    if (!letter->numbered)
        return;
    lc_letter **at = &table[letter->number % LC_MAIL_NUMBERS];
    while (*at != letter)
        at = &(*at)->next_numbered;
    *at = letter->next_numbered;
    letter->numbered = 0;
}

lc_letter *lc_letter_find(lc_letter *const *table, uint32_t number) {
    lc_letter *letter = table[number % LC_MAIL_NUMBERS];
    while (letter && letter->number != number)
        letter = letter->next_numbered;
    return letter;
}

static int is_from(int32_t wanted, int32_t peer) {
    return wanted < 0 || wanted == peer;
}

lc_letter *lc_mail_receive_for(lc_mailbox *box, uint64_t tag, int32_t peer) {
    lc_letter *receive = lc_mail_bucket(box->posted, tag)->first;
    while (receive && !(receive->tag == tag && is_from(receive->peer, peer)))
        receive = receive->next;
    return receive;
}

lc_letter *lc_mail_message_for(lc_mailbox *box, uint64_t tag, int32_t peer) {
    lc_letter *message = lc_mail_bucket(box->held, tag)->first;
    while (message && !(message->tag == tag && is_from(peer, message->peer)))
        message = message->next;
    return message;
}
