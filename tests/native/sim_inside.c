/* What the engine counts as it goes, counted anew from what is there. */
#include "sim_run.h"

#include "letter.h"
#include "linger.h"
#include "mailbox.h"
#include "state.h"

typedef struct {
    uint32_t operations, counted, lingering, listed; /* of a host */
} totals;

typedef struct {
    uint64_t kept, announced, used; /* of the messages of a path */
} mail;

/* ---- letters ---- */

typedef struct {
    uint32_t counted, detached, announced[SIM_RANKS];
    uint64_t kept[SIM_RANKS];
} letters;

static uint32_t count_list(const lc_letters *list, letters *t) {
    uint32_t n = 0;
    for (const lc_letter *l = list->first; l; l = l->next, n++) {
        t->counted += l->counted;
        t->detached += l->detached;
        if (l->kind != LC_LETTER_ARRIVAL)
            continue;
        t->announced[l->peer] += !l->op;
        t->kept[l->peer] += l->eager ? lc_letter_charge(l) : 0;
    }
    return n;
}

static const char *check_mail(const lc_group *g, totals *of_host) {
    const lc_mailbox *box = g->mail;
    letters t = {.counted = 0};
    uint32_t posted = 0, due = 0;
    (void)count_list(&box->live, &t);
    (void)count_list(&box->waiting, &t);
    for (int i = 0; i < LC_MAIL_TAGS; i++) {
        posted += count_list(&box->posted[i], &t);
        (void)count_list(&box->held[i], &t);
    }
    of_host->counted += t.counted;
    for (uint16_t i = 0; i < box->size; i++) {
        const lc_mail_peer *p = &box->peers[i];
        due += p->due_ns != 0;
        if (t.announced[i] != p->announced)
            return "announced messages";
        if (t.kept[i] != p->kept)
            return "credit of messages that are kept";
        if (p->used > LC_MAIL_CREDIT)
            return "credit that is used";
        if (p->kept > LC_MAIL_CREDIT)
            return "credit that a peer has used";
    }
    if (posted != box->n_posted)
        return "receives without a message";
    if (due != box->n_due)
        return "peers that are to be told what was heard";
    if (t.detached != atomic_load(&box->unheard))
        return "messages that were not heard";
    return NULL;
}

/* ---- streams ---- */

static uint32_t count_bits(const uint64_t *bits, uint32_t n) {
    uint32_t found = 0;
    for (uint32_t k = 0; k < n && bits; k++)
        found += (uint32_t)lc_bit(bits, k);
    return found;
}

static int keeps_open(const lc_out *out) {
    int asks = out->state == LC_OUT_SENT && lc_resends(out->slot->level, out->rounds);
    return !out->suspended && (out->state == LC_OUT_OPEN || asks);
}

static const char *check_operation(const lc_op *op) {
    uint32_t open = 0, unsettled = 0;
    for (uint32_t i = 0; i < op->n_slots; i++) {
        const lc_op_slot *s = &op->slots[i];
        unsettled += !s->at_once && s->n_ready + s->n_void < s->n_packets;
        for (uint32_t j = 0; j < s->desc.n_dests; j++) {
            const lc_out *out = &s->outs[j];
            open += (uint32_t)keeps_open(out);
            if (out->again_left != (out->given_up ? 0 : count_bits(out->again, s->n_packets)))
                return "packets to be resent";
            if (out->n_told != count_bits(out->told, s->n_packets))
                return "packets that NACKs have spoken of";
        }
    }
    if (open != op->outs_open)
        return "streams that keep an operation open";
    return unsettled != op->slots_unsettled ? "slots that wait for sources" : NULL;
}

/* ---- operations ---- */

static const char *check_group(const lc_group *g, totals *t) {
    uint32_t active = 0, lingering = 0;
    uint64_t bytes = 0;
    const char *wrong = NULL;
    for (uint32_t i = 0; i < LC_OPS; i++) {
        const lc_op *op = g->table[i];
        active += op != NULL;
        if (op && !wrong)
            wrong = check_operation(op);
        if (!op || !op->lingers)
            continue;
        lingering++;
        bytes += op->copy_bytes;
    }
    if (wrong)
        return wrong;
    t->operations += active;
    t->lingering += lingering;
    if (active != g->active)
        return "operations";
    if (lingering != lc_lingering(g, NULL) || bytes != g->linger_bytes)
        return "lingering operations";
    return check_mail(g, t);
}

static const char *check_mail_of(const lc_path *p, const mail *m) {
    if (m->kept != p->mail_kept || m->announced != p->mail_announced || m->used != p->mail_used)
        return "what all groups keep of messages";
    uint64_t most = LC_MAIL_SHARES * LC_MAIL_CREDIT;
    return m->kept > most || m->used > most ? "what all groups may keep of messages" : NULL;
}

static const char *check_path(const lc_host *h, const lc_path *p, totals *t) {
    uint32_t eager = 0;
    mail m = {.kept = 0};
    for (const lc_out *o = p->outs; o; o = o->next)
        t->listed++;
    for (const lc_group *g = h->groups; g; g = g->next) {
        uint16_t peer = g->rank_of_process[p->number];
        for (uint32_t i = 0; i < LC_OPS && peer != 0xFFFF; i++)
            eager += g->table[i] ? g->table[i]->peers[peer].eager : 0;
        if (peer == 0xFFFF)
            continue;
        const lc_mail_peer *to = &g->mail->peers[peer];
        m.kept += to->gone ? 0 : to->kept;
        m.announced += to->announced;
        m.used += to->used;
    }
    return eager != p->tx_eager ? "packets that were sent ahead" : check_mail_of(p, &m);
}

static const char *check_host(const lc_host *h) {
    totals t = {.operations = 0};
    const char *wrong = NULL;
    for (const lc_group *g = h->groups; g && !wrong; g = g->next)
        wrong = check_group(g, &t);
    for (uint16_t i = 0; i < h->config.processes && !wrong; i++)
        if (i != h->config.process)
            wrong = check_path(h, &h->paths[i], &t);
    if (wrong)
        return wrong;
    if (t.operations != h->collectives || t.operations + t.counted != h->active)
        return "what keeps it awake";
    if (t.lingering != h->lingering)
        return "lingering operations of all groups";
    return t.listed != h->listed ? "streams with something to send" : NULL;
}

void sim_check_inside(run *r, uint16_t process) {
    const char *wrong = check_host(r->processes[process].host);
    if (wrong)
        sim_fail(r, "process %u: miscounts %s", process, wrong);
}
