/* Messages of a scenario: sends and receives that are posted at any time and in any order. */
#include "sim_run.h"

#include <stdlib.h>
#include <string.h>

#include "mailbox.h"
#include "wire.h"

enum { TAGS = 4, ANY_TAG = 5, ANY_BYTES = 300, GUARD = 32, GUARD_BYTE = 0x5A, POISON = 0xEE };

/* ---- what is drawn ---- */

static uint64_t draw_bytes(const sim_scenario *s, uint64_t *x) {
    uint64_t room = s->payload - LC_RECORD_BYTES;
    const uint64_t special[] = {0,        1,          room,          room + 1,
                                3 * room, s->payload, LC_MAIL_SMALL, LC_MAIL_SMALL + 1};
    uint64_t bytes = special[sim_below(x, sizeof special / sizeof *special)];
    if (!sim_happens(x, 300) || bytes > s->message_bytes)
        bytes = sim_below(x, s->message_bytes + 1);
    return bytes;
}

static int is_alike(const sim_message *a, const sim_message *b) {
    return a->group == b->group && a->from == b->from && a->to == b->to && a->tag == b->tag;
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static void draw_terms(const sim_scenario *s, sim_message *m, uint64_t *x) {
    m->lossy_send = sim_happens(x, s->lossy);
    m->lossy_receive = sim_happens(x, s->lossy);
    m->repair_send = (uint8_t)(sim_happens(x, 300) ? sim_below(x, 3) : 0);
    m->repair_receive = (uint8_t)(sim_happens(x, 300) ? sim_below(x, 3) : 0);
    m->missing = sim_happens(x, 500) ? LC_MISSING_ZERO : LC_MISSING_KEEP;
}

/* Sends and receives of a pair and tag are posted in one order, so sizes agree. */
static void draw_message(run *r, uint64_t i, uint64_t span, uint64_t *x) {
    sim_message *m = &r->messages[i];
    m->group = (uint32_t)sim_below(x, r->s->groups);
    const group_state *g = &r->groups[m->group];
    uint16_t from = (uint16_t)sim_below(x, g->size);
    m->from = g->members[from];
    m->to = g->members[(from + 1 + sim_below(x, g->size - 1u)) % g->size];
    m->any = r->s->any && sim_happens(x, 300);
    m->tag = m->any ? ANY_TAG : sim_below(x, TAGS);
    m->bytes = m->any ? ANY_BYTES : draw_bytes(r->s, x); /* whichever comes has to fit */
    m->send_ns = r->begin_ns + sim_below(x, span);
    m->receive_ns = r->begin_ns + sim_below(x, span);
    for (uint64_t k = 0; k < i; k++) {
        const sim_message *o = &r->messages[k];
        if (!is_alike(o, m))
            continue;
        m->number++;
        m->send_ns = later(m->send_ns, o->send_ns);
        m->receive_ns = later(m->receive_ns, o->receive_ns);
    }
}

/* What the bytes are says who sent them, and as which of the messages with that tag. */
static uint8_t byte_of(const sim_message *m, uint64_t k) {
    if (m->any && k < 2)
        return (uint8_t)(k ? m->number : m->from);
    uint64_t name = (uint64_t)m->group << 40 | (uint64_t)m->from << 32 | (uint64_t)m->to << 24 |
                    m->tag << 16 | m->number;
    return (uint8_t)(sim_mix(sim_mix(name) + k / 8) >> k % 8 * 8);
}

void sim_draw_messages(run *r) {
    uint64_t random = sim_mix(r->s->seed + 5);
    uint64_t span = (r->s->skew + r->s->delay) * US * r->s->ops + 20 * MS;
    uint64_t terms = sim_mix(r->s->seed + 8);
    for (uint64_t i = 0; i < r->s->messages; i++) {
        sim_message *m = &r->messages[i];
        draw_message(r, i, span, &random);
        draw_terms(r->s, m, &terms);
        m->data = malloc(m->bytes + 1);
        m->room = malloc(m->bytes + 2 * GUARD);
        if (!m->data || !m->room)
            abort();
        for (uint64_t k = 0; k < m->bytes; k++)
            m->data[k] = byte_of(m, k);
        memset(m->room, GUARD_BYTE, m->bytes + 2 * GUARD);
    }
}

void sim_free_messages(run *r) {
    for (uint64_t i = 0; i < r->s->messages; i++) {
        free(r->messages[i].data);
        free(r->messages[i].room);
    }
}

/* ---- posting ---- */

static int64_t post(run *r, const sim_message *m, uint16_t process, int receive) {
    const group_state *g = &r->groups[m->group];
    int32_t peer = g->rank_of[receive ? m->from : m->to];
    lc_message message = {.data = receive ? m->room + GUARD : m->data,
                          .elements = m->bytes,
                          .tag = m->tag,
                          .timeout_ns = patience_ns(r->s),
                          .type = 3,
                          .element_bytes = 1,
                          .peer = receive && m->any ? -1 : peer,
                          .receive = (uint8_t)receive,
                          .lossy = (uint8_t)(receive ? m->lossy_receive : m->lossy_send),
                          .repair = receive ? m->repair_receive : m->repair_send,
                          .missing = receive ? m->missing : LC_MISSING_KEEP};
    int64_t ticket = lc_group_post(g->at[process], &message);
    if (ticket > 0 && sim_mix(r->s->seed ^ m->number) % 1000 < r->s->waits)
        lc_group_wait(g->at[process], ticket, 0); /* as long as nothing may pass: a turn */
    r->processes[process].poked = 1;
    r->last_submit_ns = time_of(r);
    return ticket;
}

static void end(run *r, sim_message *m, uint16_t process, int receive, int code) {
    *(receive ? &m->received : &m->sent) = 1;
    *(receive ? &m->code_received : &m->code_sent) = code;
    uint16_t other = receive ? m->from : m->to;
    if (code == LC_E_PEER && r->processes[other].dies_ns != NEVER)
        return; /* the message alone */
    if (code != LC_OK)
        sim_note_failure(r, m->group, process, code, receive ? "receive" : "send",
                         (uint32_t)(m - r->messages));
}

static void post_one(run *r, sim_message *m, uint16_t process, int receive) {
    *(receive ? &m->receive_posted : &m->send_posted) = 1;
    if (!r->groups[m->group].at[process])
        sim_open_group(r, m->group, process);
    if (sim_failed(r))
        return;
    int64_t ticket = post(r, m, process, receive);
    *(receive ? &m->receive : &m->send) = ticket;
    if (ticket < 0)
        end(r, m, process, receive, (int)ticket);
    if (ticket == 0) {
        end(r, m, process, receive, LC_OK);
        memset(m->data, POISON, m->bytes); /* it may change now */
    }
}

static int is_due(const run *r, const sim_message *m, uint16_t process, int receive) {
    return (receive ? m->to : m->from) == process &&
           !(receive ? m->receive_posted : m->send_posted) &&
           time_of(r) >= (receive ? m->receive_ns : m->send_ns);
}

void sim_post_due(run *r, uint16_t process) {
    for (uint64_t i = 0; i < r->s->messages && !sim_failed(r); i++)
        for (int receive = 0; receive < 2; receive++)
            if (is_due(r, &r->messages[i], process, receive))
                post_one(r, &r->messages[i], process, receive);
}

uint64_t sim_next_post(const run *r, uint16_t process) {
    uint64_t next = NEVER;
    for (uint64_t i = 0; i < r->s->messages; i++) {
        const sim_message *m = &r->messages[i];
        if (m->from == process && !m->send_posted && m->send_ns < next)
            next = m->send_ns;
        if (m->to == process && !m->receive_posted && m->receive_ns < next)
            next = m->receive_ns;
    }
    return next;
}

/* ---- what came ---- */

/* The message that a receive has got: which one from any rank, the bytes say. */
static sim_message *find_taken(run *r, sim_message *m, uint16_t from) {
    for (uint64_t i = 0; m->any && i < r->s->messages; i++) {
        sim_message *o = &r->messages[i];
        if (o->any && o->group == m->group && o->to == m->to && o->from == from &&
            o->number == m->room[GUARD + 1])
            return o;
    }
    return m->any ? NULL : m;
}

/* Both ends ask for it, and small ones are sent before that is known. */
static int may_lack(const sim_message *m) {
    return m->lossy_send && m->lossy_receive && m->bytes > LC_MAIL_SMALL;
}

static int is_all(const uint8_t *at, uint64_t n, uint8_t value) {
    for (uint64_t i = 0; i < n; i++)
        if (at[i] != value)
            return 0;
    return 1;
}

static int is_sent(const sim_message *sent, const uint8_t *room, uint64_t begin, uint64_t end) {
    for (uint64_t k = begin; k < end; k++)
        if (room[k] != byte_of(sent, k))
            return 0;
    return 1;
}

/* Each packet is what was sent, or what it leaves where it is missing. Returns how many are, or -1:
 * something is neither. */
static int64_t count_lacking(const run *r, const sim_message *m, const sim_message *sent) {
    const uint8_t *room = m->room + GUARD;
    uint8_t left = m->missing == LC_MISSING_ZERO ? 0 : GUARD_BYTE;
    int64_t lacking = 0;
    for (uint64_t begin = 0; begin < m->bytes; begin += r->s->payload) {
        uint64_t end = begin + r->s->payload < m->bytes ? begin + r->s->payload : m->bytes;
        if (is_sent(sent, room, begin, end))
            continue;
        if (!is_all(room + begin, end - begin, left))
            return -1;
        lacking++;
    }
    return lacking;
}

static void check_lacking(run *r, sim_message *m, int64_t lacking, const lc_report *report) {
    uint32_t number = (uint32_t)(m - r->messages);
    uint64_t told = m->missing == LC_MISSING_ZERO ? report->zero_filled : report->kept;
    if (report->packets_missing != (uint64_t)lacking || told != (uint64_t)lacking)
        sim_fail(r, "message %u: lacks %ld packets, and %lu were given up", number, (long)lacking,
                 (unsigned long)report->packets_missing);
    if (lacking && !may_lack(m))
        sim_fail(r, "message %u: reliable, and lacks %ld packets", number, (long)lacking);
    m->lacking = lacking;
    r->out->lacking += (uint64_t)lacking;
}

static void check_bytes(run *r, sim_message *m, const lc_report *report) {
    const group_state *g = &r->groups[m->group];
    uint32_t number = (uint32_t)(m - r->messages);
    int source = lc_group_source(g->at[m->to], m->receive);
    if (source < 0 || source >= g->size || (!m->any && g->members[source] != m->from)) {
        sim_fail(r, "message %u: is of rank %d", number, source);
        return;
    }
    uint16_t from = g->members[source];
    if (!sim_spares_messages(r, m->group, from, m->to))
        return;
    sim_message *sent = find_taken(r, m, from);
    int64_t lacking = sent && !sent->taken ? count_lacking(r, m, sent) : -1;
    if (lacking < 0) {
        sim_fail(r, "message %u: isn't what process %u sent to %u", number, from, m->to);
        return;
    }
    sent->taken = 1;
    check_lacking(r, m, lacking, report);
}

/* It has sent no packet more often than both ends allow. */
static void check_resent(run *r, const sim_message *m, const lc_report *report) {
    uint64_t packets = (m->bytes + r->s->payload - 1) / r->s->payload;
    uint8_t rounds = m->repair_send > m->repair_receive ? m->repair_send : m->repair_receive;
    if (may_lack(m) && sim_spares_messages(r, m->group, m->from, m->to) &&
        report->packets_resent > packets * rounds)
        sim_fail(r, "message %u: %lu packets were resent in %d rounds", (unsigned)(m - r->messages),
                 (unsigned long)report->packets_resent, rounds);
}

static void take(run *r, sim_message *m, uint16_t process, int receive) {
    lc_group *group = r->groups[m->group].at[process];
    int64_t ticket = receive ? m->receive : m->send;
    lc_report report;
    lc_failure failure;
    if (lc_group_result(group, ticket, &report, &failure) == LC_PENDING)
        return;
    end(r, m, process, receive, failure.code);
    if (receive && failure.code == LC_OK)
        check_bytes(r, m, &report);
    if (!receive)
        check_resent(r, m, &report);
    if (receive)
        memset(m->room + GUARD, POISON, m->bytes);
    else
        memset(m->data, POISON, m->bytes);
    r->out->received += (uint64_t)receive;
    r->out->sent += (uint64_t)!receive;
    if (m->number % 2 == 0) /* others are freed with their group */
        lc_group_release(group, ticket);
}

void sim_take_messages(run *r, uint16_t process) {
    for (uint64_t i = 0; i < r->s->messages && !sim_failed(r); i++) {
        sim_message *m = &r->messages[i];
        if (m->from == process && m->send_posted && !m->sent)
            take(r, m, process, 0);
        if (m->to == process && m->receive_posted && !m->received)
            take(r, m, process, 1);
    }
}

/* ---- in the end ---- */

static int waits(const run *r, const sim_message *m) {
    return (!m->sent && !r->processes[m->from].dead) || (!m->received && !r->processes[m->to].dead);
}

int sim_group_talks(const run *r, uint32_t group) {
    const group_state *g = &r->groups[group];
    for (uint64_t i = 0; i < r->s->messages; i++)
        if (r->messages[i].group == group && waits(r, &r->messages[i]))
            return 1;
    /* What was sent ahead has no timeout of its own: a forged word may keep it for good. */
    for (uint16_t i = 0; i < g->size && !sim_is_open(r->s); i++)
        if (!r->processes[g->members[i]].dead && g->at[g->members[i]] &&
            lc_group_unheard(g->at[g->members[i]]))
            return 1;
    return 0;
}

void sim_say_who_talks(run *r) {
    for (uint64_t i = 0; i < r->s->messages; i++)
        if (waits(r, &r->messages[i]))
            sim_fail(r, "message %u, from %u to %u: hasn't ended (sent: %d, received: %d)",
                     (unsigned)i, r->messages[i].from, r->messages[i].to, r->messages[i].sent,
                     r->messages[i].received);
    for (uint32_t n = 0; n < r->s->groups; n++)
        if (sim_group_talks(r, n))
            sim_fail(r, "group %u: what it has sent is never heard", n);
}

void sim_check_messages(run *r) {
    for (uint64_t i = 0; i < r->s->messages; i++) {
        const sim_message *m = &r->messages[i];
        if (!is_all(m->room, GUARD, GUARD_BYTE) ||
            !is_all(m->room + GUARD + m->bytes, GUARD, GUARD_BYTE))
            sim_fail(r, "message %u: written beside its receive", (unsigned)i);
        if (m->received && m->receive > 0 && !is_all(m->room + GUARD, m->bytes, POISON))
            sim_fail(r, "message %u: written after the end of its receive", (unsigned)i);
        if (m->lacking && sim_is_clean(r->s) && !r->out->overflow)
            sim_fail(r, "message %u: lacks %ld packets of a network that loses none", (unsigned)i,
                     (long)m->lacking);
    }
}
