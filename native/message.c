#include "message.h"

#include <string.h>

#include "letter.h"
#include "letter_state.h"

static const uint64_t GRANT_NS = 2000000;

/* ---- sends ---- */

/* Messages are told of in their order, and only so far ahead that the receiver keeps them. */
static void go(lc_group *g, uint16_t peer) {
    lc_mail_peer *p = &g->mail->peers[peer];
    lc_host *h = g->host;
    for (; p->started != p->queued && p->started - p->told < LC_MAIL_AHEAD; p->started++) {
        lc_letter *letter = lc_letter_find(p->sent, p->started);
        if (!letter)
            continue;
        lc_op *op = letter->op;
        lc_letter_live(g, letter);
        op->started_ns = h->now;
        op->order = h->started++;
        letter->again_wait_ns = lc_pace_rto(&g->members[peer].path->pace);
        letter->again_ns = h->now + letter->again_wait_ns;
        if (letter->eager) {
            op->peers[peer].ready = op->peers[peer].agreed = 1;
            lc_out_wake(lc_letter_out(letter));
        } else {
            lc_letter_announce(g, letter);
        }
    }
}

static void start_send(lc_group *g, lc_letter *letter) {
    lc_mail_peer *p = lc_letter_peer(g, letter);
    p->queued = letter->number + 1;
    lc_letter_number(p->sent, letter);
    lc_letter_move(letter, &g->mail->waiting);
    if (p->gone) {
        if (letter->eager)
            lc_mail_give_back(g, (uint16_t)letter->peer, lc_letter_charge(letter));
        letter->op->failure = (lc_failure){.code = LC_E_PEER, .peer = letter->peer};
        lc_out_done(lc_letter_out(letter));
        return;
    }
    go(g, (uint16_t)letter->peer);
}

/* ---- a message meets its receive ---- */

static void mismatch(lc_group *g, const lc_letter *receive, const lc_letter *message) {
    lc_failure why = {.code = LC_E_MESSAGE,
                      .peer = message->peer,
                      .op = message->number,
                      .of_message = 1,
                      .mine = {receive->tag, receive->elements, receive->type},
                      .theirs = {message->tag, message->elements, message->type}};
    lc_fail(g, &why);
}

static void expect_stream(lc_group *g, lc_letter *letter) {
    lc_host *h = g->host;
    lc_op *op = letter->op;
    op->number = letter->number;
    op->order = h->started++;
    op->started_ns = h->now;
    lc_letter_in(letter)->peer = (uint16_t)letter->peer;
    op->peers[letter->peer].source = 1;
    op->peers[letter->peer].ready = op->peers[letter->peer].agreed = 1;
    lc_letter_number(lc_letter_peer(g, letter)->came, letter);
    lc_inject_round(lc_letter_in(letter));
    lc_letter_live(g, letter);
}

/* A large message goes straight to where its receive wants it. */
static void grant(lc_group *g, lc_letter *receive, lc_letter *message) {
    receive->number = message->number;
    receive->again_wait_ns = GRANT_NS;
    if (lc_letter_is_small(message)) { /* the sender had no credit */
        int code;
        lc_letter *arrival = lc_letter_make(g, message, NULL, &code);
        if (!arrival) {
            lc_failure why = {.code = code, .peer = -1};
            lc_fail(g, &why);
            return;
        }
        arrival->receive = receive;
        arrival->numbered = 0;
        arrival->list = NULL;
        arrival->again_wait_ns = GRANT_NS;
        expect_stream(g, arrival);
        lc_letter_live(g, receive);
        lc_letter_grant(g, arrival);
    } else {
        lc_letter_cut(g, receive);
        if (receive->lossy && message->lossy)
            lc_letter_loosen(receive, message);
        expect_stream(g, receive);
        lc_letter_grant(g, receive);
    }
    lc_letter_drop(g, message);
}

static void fill(lc_group *g, lc_letter *receive, lc_letter *arrival) {
    lc_mail_peer *p = lc_letter_peer(g, arrival);
    lc_letter_open(arrival, receive->data);
    if (arrival->eager) {
        p->taken += lc_letter_charge(arrival);
        lc_mail_note(g, (uint16_t)arrival->peer);
    }
    lc_letter_drop(g, arrival);
    lc_letter_end(receive, LC_OK);
}

/* Both are in some list. */
static void meet(lc_group *g, lc_letter *receive, lc_letter *message) {
    if (receive->list == lc_mail_bucket(g->mail->posted, receive->tag))
        g->mail->n_posted--;
    receive->peer = message->peer;
    lc_letter_move(receive, &g->mail->waiting);
    if (lc_letter_peer(g, message)->gone && !message->eager) {
        lc_letter_drop(g, message);
        lc_letter_end(receive, LC_E_PEER);
    } else if (receive->type != message->type || receive->elements != message->elements ||
               receive->bytes != message->bytes) {
        mismatch(g, receive, message);
    } else if (message->eager) {
        fill(g, receive, message);
    } else {
        grant(g, receive, message);
    }
}

static int all_gone(const lc_group *g) {
    for (uint16_t i = 0; i < g->config.size; i++)
        if (i != g->config.rank && !g->mail->peers[i].gone)
            return 0;
    return 1;
}

static void start_receive(lc_group *g, lc_letter *receive) {
    lc_mailbox *box = g->mail;
    lc_letter *message = lc_mail_message_for(box, receive->tag, receive->peer);
    receive->op->started_ns = g->host->now;
    if (message) {
        meet(g, receive, message);
        return;
    }
    lc_letter_move(receive, lc_mail_bucket(box->posted, receive->tag));
    box->n_posted++;
    if (receive->peer < 0 ? all_gone(g) : box->peers[receive->peer].gone)
        lc_letter_end(receive, LC_E_PEER);
}

void lc_message_start(lc_op *op) {
    lc_letter *letter = op->letter;
    if (op->submitted_ns > op->group->host->now) /* it came after this turn had looked at it */
        op->submitted_ns = op->group->host->now;
    if (letter->kind == LC_LETTER_SEND)
        start_send(op->group, letter);
    else
        start_receive(op->group, letter);
}

/* Hands on what has come, in the order of the sends: of two messages with one tag the first goes
 * to the first receive, whichever came first. */
static void hear(lc_group *g, uint16_t peer) {
    lc_mail_peer *p = &g->mail->peers[peer];
    const lc_path *path = g->members[peer].path;
    while (!g->failing.code) {
        lc_letter *message = lc_letter_find(p->came, p->heard);
        if (!message || (message->eager && !message->whole) ||
            (!message->eager &&
             !lc_mail_is_fair(p->announced, path->mail_announced, LC_MAIL_ANNOUNCED)))
            return;
        p->heard++;
        lc_mail_note(g, peer);
        lc_letter_forget(p->came, message);
        lc_letter *receive = lc_mail_receive_for(g->mail, message->tag, message->peer);
        lc_letter_count(g, message, 0);
        lc_letter_move(message, lc_mail_bucket(g->mail->held, message->tag));
        if (receive)
            meet(g, receive, message);
    }
}

/* ---- what comes ---- */

/* A message that this rank hasn't heard of. NULL: it isn't one, or there is no room. */
static lc_letter *take_in(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_mail_peer *p = &g->mail->peers[peer];
    lc_letter read;
    if (!lc_letter_read(&read, r)) {
        g->live.malformed++;
        return NULL;
    }
    if (r->op - p->heard >= LC_MAIL_AHEAD || p->gone || !lc_mail_has_room(g, peer, &read))
        return NULL;
    read.peer = peer;
    int code;
    lc_letter *letter = read.eager ? lc_letter_make(g, &read, NULL, &code) : lc_letter_note(&read);
    if (!letter)
        return NULL;
    lc_mail_take_room(g, letter);
    if (read.eager) {
        expect_stream(g, letter);
    } else {
        lc_letter_number(p->came, letter);
        lc_letter_move(letter, &g->mail->waiting);
    }
    return letter;
}

/* What the packet of a small message says that it is. */
static lc_letter *take_in_by(lc_group *g, uint16_t peer, const lc_header *header,
                             const uint8_t *payload) {
    lc_record r;
    int good = header->length >= LC_RECORD_BYTES && lc_record_get(payload, &r) == LC_GOOD &&
               r.op == header->op;
    if (!good) { /* parity is of several packets and says nothing, unless it is of a single one */
        g->live.malformed += header->type == LC_DATA;
        return NULL;
    }
    lc_letter *letter = take_in(g, peer, &r);
    if (letter && !letter->op) { /* announced by its own data: nobody does that */
        g->live.malformed++;
        lc_letter_drop(g, letter);
        return NULL;
    }
    g->live.eager_dropped += !letter;
    return letter;
}

void lc_message_data(lc_group *g, uint16_t peer, const lc_header *header, const uint8_t *payload) {
    lc_mail_peer *p = &g->mail->peers[peer];
    lc_path *path = g->members[peer].path;
    lc_letter *letter = lc_letter_find(p->came, header->op);
    if (header->eager || (letter && !letter->op)) {
        g->live.malformed++;
        return;
    }
    if (!letter && (g->broken.code || (int32_t)(header->op - p->heard) < 0)) {
        lc_note_packet(g->host, path, header);
        lc_note_fertile(&g->members[peer]);
        g->live.stale++;
        return;
    }
    if (!letter)
        letter = take_in_by(g, peer, header, payload);
    if (letter) {
        lc_in_take_into(lc_letter_in(letter), header, payload);
    } else {
        lc_note_packet(g->host, path, header);
        if (header->type == LC_DATA)
            lc_link_lost(path, header->link_seq);
    }
}

void lc_message_announced(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_mail_peer *p = &g->mail->peers[peer];
    if (g->broken.code)
        return;
    if ((int32_t)(r->op - p->heard) >= 0 && !lc_letter_find(p->came, r->op))
        (void)take_in(g, peer, r);
    hear(g, peer);
    if ((int32_t)(r->op - p->heard) < 0)
        lc_mail_tell(g, peer, 0);
}

/* The peer has heard of a message: of a small one that went ahead it has all. */
static void heard_there(lc_group *g, lc_letter *letter) {
    if (letter->eager)
        lc_out_done(lc_letter_out(letter));
    else if (!letter->op->peers[letter->peer].ready)
        lc_letter_wait(g, letter);
}

void lc_message_mail(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_mail_peer *p = &g->mail->peers[peer];
    if (r->a)
        lc_mail_tell(g, peer, 0);
    uint64_t back = r->c - p->returned;
    if ((int32_t)(p->started - r->op) < 0 || back > LC_MAIL_CREDIT) {
        g->live.stale++; /* older than what is known, or of messages that were never told of */
        return;
    }
    while ((int32_t)(r->op - p->told) > 0) {
        lc_letter *letter = lc_letter_find(p->sent, p->told++);
        if (letter)
            heard_there(g, letter);
    }
    if (back) {
        lc_mail_give_back(g, peer, back);
        p->returned = r->c;
    }
    go(g, peer);
}

void lc_message_granted(lc_group *g, uint16_t peer, const lc_record *r) {
    lc_letter *letter = lc_letter_find(g->mail->peers[peer].sent, r->op);
    if (!letter || letter->eager || letter->op->peers[peer].ready)
        return;
    if ((int32_t)(r->op - g->mail->peers[peer].started) >= 0) {
        g->live.malformed++; /* it was never announced */
        return;
    }
    letter->op->peers[peer].ready = letter->op->peers[peer].agreed = 1;
    lc_letter_live(g, letter);
    lc_out_wake(lc_letter_out(letter));
}

lc_op *lc_message_from(const lc_group *g, uint16_t peer, uint32_t number) {
    const lc_letter *letter = lc_letter_find(g->mail->peers[peer].came, number);
    return letter ? letter->op : NULL;
}

lc_op *lc_message_to(const lc_group *g, uint16_t peer, uint32_t number) {
    const lc_letter *letter = lc_letter_find(g->mail->peers[peer].sent, number);
    return letter ? letter->op : NULL;
}

int lc_message_ended(const lc_group *g, uint16_t peer, uint32_t number) {
    const lc_mail_peer *p = &g->mail->peers[peer];
    return (int32_t)(number - p->heard) < 0 && !lc_letter_find(p->came, number);
}

/* ---- ends ---- */

static int send_over(lc_group *g, lc_letter *letter, int in_batch) {
    if (letter->op->outs_open || in_batch)
        return 0;
    if (letter->detached) {
        lc_letter_drop(g, letter);
        return 0;
    }
    lc_letter_take_out(g, letter);
    return 1;
}

static void arrival_over(lc_group *g, lc_letter *letter) {
    if (letter->whole || letter->op->slots_unsettled)
        return;
    letter->whole = 1;
    lc_letter_count(g, letter, 0);
    if (letter->receive)
        fill(g, letter->receive, letter);
    else
        hear(g, (uint16_t)letter->peer);
}

int lc_message_over(lc_op *op, int in_batch) {
    lc_letter *letter = op->letter;
    lc_group *g = op->group;
    if (letter->kind == LC_LETTER_SEND)
        return send_over(g, letter, in_batch);
    if (letter->kind == LC_LETTER_ARRIVAL) {
        arrival_over(g, letter);
        return 0;
    }
    int filled = letter->numbered && !op->slots_unsettled;
    if (!letter->over && !filled)
        return 0;
    if (filled)
        lc_fill_missing(op);
    lc_letter_take_out(g, letter);
    return 1;
}

/* Whether a letter of a member that is gone can't be served any more. silent: it answers nothing
 * either. */
static int is_over(const lc_letter *letter, int lost, int silent) {
    if (letter->kind == LC_LETTER_ARRIVAL) /* what is only announced keeps its place in the order */
        return lost || (letter->op && !letter->whole);
    int granted =
        letter->kind == LC_LETTER_SEND && !letter->eager && letter->op->peers[letter->peer].ready;
    return silent || !granted;
}

static void give_up(lc_group *g, lc_letters *list, uint16_t peer, int lost, int silent) {
    for (lc_letter *letter = list->first, *next; letter; letter = next) {
        next = letter->next;
        if (letter->peer != peer || !is_over(letter, lost, silent))
            continue;
        if (letter->kind == LC_LETTER_ARRIVAL) {
            lc_letter_drop(g, letter);
        } else if (letter->kind == LC_LETTER_RECEIVE) {
            lc_letter_end(letter, LC_E_PEER);
        } else {
            letter->op->failure = (lc_failure){.code = LC_E_PEER, .peer = peer};
            lc_out_done(lc_letter_out(letter));
        }
    }
}

void lc_message_gone(lc_group *g, uint16_t peer, int lost) {
    lc_mailbox *box = g->mail;
    lc_mail_forget_peer(g, peer);
    box->peers[peer].left_ns = lost ? 0 : g->host->now;
    give_up(g, &box->live, peer, lost, lost);
    give_up(g, &box->waiting, peer, lost, lost);
    int none = all_gone(g);
    for (int i = 0; i < LC_MAIL_TAGS; i++) {
        give_up(g, &box->held[i], peer, lost, lost);
        give_up(g, &box->posted[i], peer, lost, lost);
        for (lc_letter *letter = box->posted[i].first; letter && none; letter = letter->next)
            if (letter->peer < 0)
                lc_letter_end(letter, LC_E_PEER);
    }
}

void lc_message_silent(lc_group *g, uint16_t peer) {
    give_up(g, &g->mail->live, peer, 0, 1);
}

static lc_op *next_out(lc_group *g, lc_letters *list) {
    while (list->first) {
        lc_letter *letter = list->first;
        if (letter->kind != LC_LETTER_ARRIVAL && !letter->detached) {
            lc_letter_take_out(g, letter);
            return letter->op;
        }
        lc_letter_drop(g, letter);
    }
    return NULL;
}

/* Nothing is posted any more. */
static void give_all_back(lc_group *g) {
    for (uint16_t i = 0; i < g->config.size; i++)
        if (i != g->config.rank)
            lc_mail_give_back(g, i, UINT64_MAX);
}

lc_op *lc_message_take_out(lc_group *g) {
    lc_mailbox *box = g->mail;
    lc_op *op = next_out(g, &box->live);
    if (!op)
        op = next_out(g, &box->waiting);
    for (int i = 0; i < LC_MAIL_TAGS && !op; i++) {
        op = next_out(g, &box->posted[i]);
        if (!op)
            op = next_out(g, &box->held[i]);
    }
    if (!op)
        give_all_back(g);
    return op;
}
