#include "silence.h"

static const uint64_t AGE_NS = 1000000; /* unit of the age in an ACK */
enum { AGE_NEVER = 0xFFFF };            /* never, or longer than the field can say */
/* So many datagrams in a row, of those that are repeated until they are answered: at 50% loss each
 * way, one in 65,000 paths loses them by chance. */
enum { UNREACHED = 16 };
/* At 90% loss of single packets, so many are lost in a row once in a thousand times. */
enum { EMPTY_PACKETS = 64, EMPTY_ROUNDS = 2 };
/* No filter of firewalls or NATs is known that forgets UDP sooner. */
static const uint64_t FORGOTTEN_NS = 1000000000;

void lc_note_sent(lc_host *h, lc_path *p) {
    p->sent_ns = h->now;
    if (!p->unreached++)
        p->unreached_ns = h->now;
}

uint16_t lc_heard_age(const lc_host *h, const lc_path *p) {
    uint64_t age = (h->now - p->heard_ns) / AGE_NS;
    return p->heard_ns && age < AGE_NEVER ? (uint16_t)age : AGE_NEVER;
}

void lc_note_reached(lc_host *h, lc_path *p, uint16_t age) {
    uint64_t ago = age * AGE_NS;
    if (age != AGE_NEVER && ago < h->now)
        p->reached_ns = lc_later(p->reached_ns, h->now - ago);
    if (p->reached_ns >= p->unreached_ns)
        p->unreached = 0;
    p->unreached_told_ns = h->now;
}

uint64_t lc_unheard_ns(const lc_member *m, uint64_t begin) {
    const lc_path *p = m->path;
    uint64_t from = lc_later(p->unreached_ns, begin);
    return p->unreached >= UNREACHED && p->unreached_told_ns > from ? p->unreached_told_ns - from
                                                                    : 0;
}

enum lc_silence lc_silence_of(const lc_group *g, const lc_member *m) {
    if (m->silence == LC_SILENT_FROM && m->heard_ns <= m->silence_ns)
        return LC_SILENT_FROM;
    /* What is heard again may say that nothing arrives there. */
    uint64_t unheard = lc_unheard_ns(m, 0);
    int again = m->silence == LC_SILENT_TO || unheard > lc_answer_ns(m->path);
    if (unheard > g->config.deadline_max_ns ||
        (m->silence && m->path->reached_ns <= m->silence_ns && again))
        return LC_SILENT_TO;
    int no_data = m->empty.packets >= EMPTY_PACKETS && m->empty.times >= EMPTY_ROUNDS;
    return no_data ? LC_NO_DATA : LC_HEARD;
}

uint64_t lc_patience(const lc_op *op, uint16_t peer) {
    const lc_member *m = &op->group->members[peer];
    uint64_t most = op->group->config.deadline_max_ns, answer = lc_answer_ns(m->path);
    enum lc_silence known = lc_silence_of(op->group, m);
    return (known == LC_SILENT_FROM || known == LC_SILENT_TO) && answer < most ? answer : most;
}

static void note(lc_op *op, lc_member *m, enum lc_silence silence, uint64_t from) {
    if (lc_silence_of(op->group, m) != silence) {
        m->silences++;
        m->silent_from_ns = from;
    }
    m->silence = (uint8_t)silence;
    m->silence_ns = op->group->host->now;
}

enum lc_silence lc_find_silence(lc_op *op, uint16_t peer, uint64_t patience) {
    lc_member *m = &op->group->members[peer];
    const lc_host *h = op->group->host;
    uint64_t begin = lc_later(op->started_ns, h->awake_ns);
    enum lc_silence found = LC_HEARD;
    uint64_t from = lc_later(m->heard_ns, begin);
    if (h->now - from > patience)
        found = LC_SILENT_FROM;
    /* Who isn't asked has nothing to say: so its last word counts. */
    if (lc_unheard_ns(m, begin) > patience ||
        (found && lc_unheard_ns(m, 0) > lc_answer_ns(m->path)))
        found = LC_SILENT_TO;
    if (found == LC_SILENT_TO)
        from = lc_later(m->path->unreached_ns, begin);
    if (found && !op->finished)
        note(op, m, found, from);
    return found;
}

int lc_may_be_forgotten(const lc_host *h, const lc_path *p) {
    return h->config.keepalive_ns && !p->interface->link->local && p->heard_ns &&
           h->now - p->heard_ns > FORGOTTEN_NS;
}

void lc_keep_alive(const lc_host *h, lc_path *p) {
    uint64_t after = h->config.keepalive_ns;
    if (after && !p->interface->link->local && h->now - p->sent_ns >= after)
        p->ack_due = 1;
}
