#include "letter_state.h"
#include "message.h"

static const uint64_t ASK_NS = 100000000; /* how often a silent peer is asked */
static const uint64_t LOOK_NS = 100000000;
static const uint64_t LINGER_NS = 2000000000;

void lc_message_tick(lc_group *g, lc_letter *letter) {
    uint64_t now = g->host->now;
    if (letter->kind == LC_LETTER_SEND) {
        lc_out *out = lc_letter_out(letter);
        int unheard = (int32_t)(letter->number - lc_letter_peer(g, letter)->told) >= 0;
        if (letter->eager && unheard && out->state == LC_OUT_SENT && now >= out->fin_ns) {
            lc_letter_announce(
                g, letter); /* all of its packets may be lost: FIN alone says too little */
        } else if (!letter->eager && unheard && now >= letter->again_ns) {
            lc_letter_announce(g, letter);
            lc_letter_again(letter);
            letter->again_ns = now + letter->again_wait_ns;
        }
        return;
    }
    if (!letter->numbered || letter->eager || !letter->op || !letter->op->n_slots)
        return;
    const lc_in *in = lc_letter_in(letter);
    if (!in->started_ns && !in->fin_ns && now >= letter->again_ns)
        lc_letter_grant(g, letter);
}

/* A timeout, or a link from which nothing comes though the peer was asked all the time. Returns
 * whether the group fails of it. */
static int look_at(lc_group *g, const lc_letter *letter) {
    const lc_host *h = g->host;
    const lc_op *op = letter->op;
    if (!op || letter->kind == LC_LETTER_ARRIVAL || letter->over)
        return 0;
    lc_failure why = {.code = LC_E_MESSAGE_LATE,
                      .peer = letter->peer,
                      .op = letter->number,
                      .of_message = 1,
                      .mine = {letter->tag, letter->elements, letter->type},
                      .theirs = {op->call.timeout_ns, letter->kind == LC_LETTER_SEND}};
    if (!letter->detached && op->call.timeout_ns &&
        h->now - op->submitted_ns > op->call.timeout_ns) {
        lc_fail(g, &why);
        return 1;
    }
    if (letter->peer < 0)
        return 0;
    uint16_t peer = (uint16_t)letter->peer;
    lc_mail_peer *p = &g->mail->peers[peer];
    uint64_t heard = lc_later(g->members[peer].heard_ns, lc_later(op->submitted_ns, h->awake_ns));
    if (p->gone || h->now - heard < ASK_NS)
        return 0;
    if (g->config.link_ns && h->now - heard > g->config.link_ns) {
        why = (lc_failure){.code = LC_E_LINK, .peer = peer, .op = letter->number, .of_message = 1};
        why.mine[2] = h->now - heard;
        lc_fail(g, &why);
        return 1;
    }
    if (h->now >= p->ask_ns) {
        p->ask_ns = h->now + ASK_NS / 2;
        lc_mail_tell(g, peer, 1);
    }
    return 0;
}

static int look_at_all(lc_group *g, const lc_letters *list) {
    int failed = 0;
    for (const lc_letter *letter = list->first; letter && !failed; letter = letter->next)
        failed = look_at(g, letter);
    return failed;
}

/* Who has left stays a moment, so as to say that it has what it has received. */
static void end_linger(lc_group *g, uint16_t peer) {
    lc_mail_peer *p = &g->mail->peers[peer];
    if (!p->left_ns || g->host->now - p->left_ns < LINGER_NS)
        return;
    p->left_ns = 0;
    lc_message_silent(g, peer);
}

static void look(lc_group *g) {
    lc_mailbox *box = g->mail;
    for (uint16_t i = 0; i < box->size; i++)
        end_linger(g, i);
    if (look_at_all(g, &box->live) || look_at_all(g, &box->waiting))
        return;
    for (int i = 0; i < LC_MAIL_TAGS && box->n_posted; i++)
        if (look_at_all(g, &box->posted[i]))
            return;
}

void lc_mail_tick(lc_group *g, uint64_t *next) {
    lc_mailbox *box = g->mail;
    uint64_t now = g->host->now;
    for (uint16_t i = 0; i < box->size && box->n_due; i++) {
        uint64_t due = box->peers[i].due_ns;
        if (due && now >= due)
            lc_mail_tell(g, i, 0);
        else if (due && due < *next)
            *next = due;
    }
    if (now < box->look_ns)
        return;
    box->look_ns = now + LOOK_NS;
    look(g);
}
