/* The engine's surface for callers: sends and receives. */
#include "letter.h"
#include "loop.h"
#include "page.h"
#include "step.h"

#include <stdlib.h>

static const uint64_t PACKETS_MOST = 0x3FFFFFFF;

static int message_ok(const lc_group *g, const lc_message *m) {
    uint64_t most = PACKETS_MOST * g->host->config.payload_bytes;
    int peer_ok = m->peer >= (m->receive ? -1 : 0) && m->peer < g->config.size;
    return peer_ok && m->peer != g->config.rank && m->element_bytes >= 1 &&
           m->element_bytes <= 64 && m->elements <= most / m->element_bytes &&
           (m->data || !m->elements) && g->config.size > 1 &&
           (m->missing == LC_MISSING_KEEP || m->missing == LC_MISSING_ZERO);
}

/* Under the lock. Sends are numbered here, in the order in which the loop gets them. */
static void put_in_inbox(lc_group *g, lc_letter *letter) {
    lc_host *h = g->host;
    lc_op *op = letter->op;
    if (letter->kind == LC_LETTER_SEND) {
        lc_mail_peer *p = &g->mail->peers[letter->peer];
        lc_path *path = g->members[letter->peer].path;
        uint64_t charge = lc_letter_charge(letter);
        letter->number = p->next++;
        letter->eager = lc_letter_is_small(letter) &&
                        lc_mail_is_fair(p->used + charge, path->mail_used + charge, LC_MAIL_CREDIT);
        letter->detached = letter->eager;
        p->used += letter->eager ? charge : 0;
        path->mail_used += letter->eager ? charge : 0;
        lc_letter_seal(g, letter);
    }
    if (letter->detached) {
        atomic_fetch_add(&g->mail->unheard, 1);
    } else {
        op->older = g->newest;
        if (g->newest)
            g->newest->newer = op;
        g->newest = op;
        lc_page_begin(op, NULL);
    }
    op->next = h->inbox;
    h->inbox = op;
    atomic_fetch_or(&h->attention, LC_LOOK_INBOX);
}

int64_t lc_group_post(lc_group *g, lc_message *m) {
    lc_host *h = g->host;
    int code = LC_E_ARGUMENT;
    m->ticket = LC_E_ARGUMENT;
    if (!message_ok(g, m))
        return code;
    lc_letter like = {.kind = m->receive ? LC_LETTER_RECEIVE : LC_LETTER_SEND,
                      .peer = m->peer,
                      .tag = m->tag,
                      .elements = m->elements,
                      .bytes = m->elements * m->element_bytes,
                      .type = m->type,
                      .element_bytes = m->element_bytes};
    like.lossy = m->lossy && !lc_letter_is_small(&like);
    like.repair = like.lossy ? m->repair : 0;
    like.missing = like.lossy ? m->missing : LC_MISSING_KEEP;
    lc_letter *letter = lc_letter_make(g, &like, m->data, &code);
    if (!letter)
        return m->ticket = code;
    lc_op *op = letter->op;
    op->submitted_ns = lc_clock_now(h->clock);
    op->call.timeout_ns = m->timeout_ns;
    op->undriven = 1;
    pthread_mutex_lock(&h->lock);
    code = atomic_load(&g->closing) ? LC_E_CLOSED : g->failed.code;
    if (code == LC_OK) {
        put_in_inbox(g, letter);
        /* Once it is the loop's, it may be gone. */
        m->ticket = letter->detached ? 0 : (int64_t)(intptr_t)op;
    }
    pthread_mutex_unlock(&h->lock);
    if (code != LC_OK) {
        lc_letter_free(g, letter);
        return m->ticket = code;
    }
    if (!h->threadless)
        lc_kick(h);
    return m->ticket;
}

int lc_group_source(lc_group *g, int64_t ticket) {
    const lc_op *op = (const lc_op *)(intptr_t)ticket;
    pthread_mutex_lock(&g->host->lock);
    int source = op->finished && op->letter ? op->letter->peer : -1;
    pthread_mutex_unlock(&g->host->lock);
    return source;
}

uint32_t lc_group_unheard(lc_group *g) {
    return atomic_load(&g->mail->unheard);
}
