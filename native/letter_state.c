#include "letter_state.h"

#include "letter.h"

static const uint64_t TELL_NS = 1000000; /* how long what was heard may go unreported */

void lc_letter_count(lc_group *g, lc_letter *letter, int counted) {
    if (counted != letter->counted)
        g->host->active += counted ? 1u : -1u;
    letter->counted = (uint8_t)counted;
}

void lc_letter_live(lc_group *g, lc_letter *letter) {
    lc_letter_move(letter, &g->mail->live);
    lc_letter_count(g, letter, 1);
    g->host->tick_ns = g->host->now;
}

void lc_letter_wait(lc_group *g, lc_letter *letter) {
    lc_letter_move(letter, &g->mail->waiting);
    lc_letter_count(g, letter, 0);
}

/* Of a letter that is about to end, well or not. */
static void count_figures(lc_group *g, const lc_letter *letter) {
    const lc_op *op = letter->op;
    if (!op)
        return;
    lc_count_packets(&g->live, &op->report);
    g->live.packets_missing += op->report.packets_missing;
    g->live.deadline_hits += op->report.deadline_hits;
    if (op->failure.code)
        return;
    if (letter->kind == LC_LETTER_SEND)
        g->live.messages_sent += !op->outs_open;
    else if (letter->kind == LC_LETTER_RECEIVE)
        g->live.messages_received += letter->over || (letter->numbered && !op->slots_unsettled);
}

void lc_letter_take_out(lc_group *g, lc_letter *letter) {
    count_figures(g, letter);
    if (letter->numbered) {
        lc_mail_peer *p = lc_letter_peer(g, letter);
        lc_letter_forget(letter->kind == LC_LETTER_SEND ? p->sent : p->came, letter);
    }
    if (letter->list && letter->kind == LC_LETTER_RECEIVE &&
        letter->list == lc_mail_bucket(g->mail->posted, letter->tag))
        g->mail->n_posted--;
    lc_letter_count(g, letter, 0);
    lc_letter_move(letter, NULL);
}

static void leave_room(lc_group *g, const lc_letter *letter) {
    lc_mail_peer *p = lc_letter_peer(g, letter);
    lc_path *path = g->members[letter->peer].path;
    if (letter->eager) {
        p->kept -= lc_letter_charge(letter);
        path->mail_kept -= p->gone ? 0 : lc_letter_charge(letter);
    } else if (!letter->op) {
        p->announced--;
        path->mail_announced--;
    }
}

void lc_letter_drop(lc_group *g, lc_letter *letter) {
    lc_letter_take_out(g, letter);
    if (letter->kind == LC_LETTER_SEND)
        lc_out_drop(lc_letter_out(letter));
    if (letter->kind == LC_LETTER_ARRIVAL)
        leave_room(g, letter);
    if (letter->detached)
        atomic_fetch_sub(&g->mail->unheard, 1);
    lc_letter_free(g, letter);
}

void lc_letter_end(lc_letter *letter, int code) {
    if (letter->over)
        return;
    letter->over = 1;
    if (code != LC_OK)
        letter->op->failure = (lc_failure){.code = code, .peer = letter->peer};
    lc_touch(letter->op);
}

/* Two processes have so much for all of their groups, and senders keep to it. Only a group that has
 * been left there takes room here that its sender doesn't count any more. */
int lc_mail_has_room(const lc_group *g, uint16_t peer, const lc_letter *read) {
    const lc_mail_peer *p = &g->mail->peers[peer];
    const lc_path *path = g->members[peer].path;
    uint64_t charge = lc_letter_charge(read);
    if (read->eager)
        return p->kept + charge <= LC_MAIL_CREDIT &&
               path->mail_kept + charge <= LC_MAIL_SHARES * LC_MAIL_CREDIT;
    return read->number == p->heard || /* else none behind it would ever be heard */
           lc_mail_is_fair(p->announced + 1u, path->mail_announced + 1, LC_MAIL_ANNOUNCED);
}

void lc_mail_take_room(lc_group *g, const lc_letter *letter) {
    lc_mail_peer *p = lc_letter_peer(g, letter);
    lc_path *path = g->members[letter->peer].path;
    if (letter->eager) {
        p->kept += lc_letter_charge(letter);
        path->mail_kept += lc_letter_charge(letter);
    } else {
        p->announced++;
        path->mail_announced++;
    }
}

void lc_mail_give_back(lc_group *g, uint16_t peer, uint64_t bytes) {
    lc_mail_peer *p = &g->mail->peers[peer];
    pthread_mutex_lock(&g->host->lock);
    uint64_t back = bytes < p->used ? bytes : p->used;
    p->used -= back;
    g->members[peer].path->mail_used -= back;
    pthread_mutex_unlock(&g->host->lock);
}

void lc_mail_forget_peer(lc_group *g, uint16_t peer) {
    lc_mail_peer *p = &g->mail->peers[peer];
    if (!p->gone)
        g->members[peer].path->mail_kept -= p->kept;
    p->gone = 1;
    lc_mail_give_back(g, peer, UINT64_MAX);
}

void lc_mail_tell(lc_group *g, uint16_t peer, int ask) {
    lc_mail_peer *p = &g->mail->peers[peer];
    lc_record r = {.kind = LC_R_MAIL,
                   .op = p->heard,
                   .slot = LC_SLOT_MESSAGE,
                   .a = (uint32_t)ask,
                   .c = p->taken};
    lc_tell(g, peer, &r);
    p->taken_told = p->taken;
    g->mail->n_due -= p->due_ns != 0;
    p->due_ns = 0;
}

void lc_mail_note(lc_group *g, uint16_t peer) {
    lc_mail_peer *p = &g->mail->peers[peer];
    lc_host *h = g->host;
    if (p->taken - p->taken_told >= LC_MAIL_CREDIT / 4) {
        lc_mail_tell(g, peer, 0);
    } else if (!p->due_ns) {
        p->due_ns = h->now + TELL_NS;
        g->mail->n_due++;
        if (p->due_ns < h->tick_ns)
            h->tick_ns = p->due_ns;
    }
}

void lc_letter_announce(lc_group *g, lc_letter *letter) {
    lc_record r = lc_letter_record(letter);
    lc_tell(g, (uint16_t)letter->peer, &r);
}

void lc_letter_again(lc_letter *letter) {
    uint64_t wait = 2 * letter->again_wait_ns;
    letter->again_wait_ns = wait < LC_AGAIN_MAX_NS ? wait : LC_AGAIN_MAX_NS;
}

void lc_letter_grant(lc_group *g, lc_letter *letter) {
    lc_record r = {.kind = LC_R_READY, .op = letter->number, .slot = LC_SLOT_MESSAGE};
    lc_tell(g, (uint16_t)letter->peer, &r);
    letter->again_ns = g->host->now + letter->again_wait_ns;
    lc_letter_again(letter);
}
