/* Sends and receives in virtual time: hosts in one thread, on links of memory that lose, double,
 * delay and reorder packets, with sends and receives at random times and in any order, ranks that
 * die and ranks that leave. A scenario depends on its seed alone.
 *   test_messages [-scenarios=N] [-first=SEED] */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "letter.h"
#include "link_memory.h"
#include "mailbox.h"
#include "step.h"
#include "wire.h"

static uint64_t recovered; /* packets that came back by parity */

enum { RANKS = 4, MESSAGES = 60, TAGS = 4, ANY_TAG = 77, GUARD = 32, BUSY = 0x5A };

static const uint64_t US = 1000, MS = 1000000, SECOND = 1000000000;
static const uint64_t LINGER_NS = 1000000000; /* who leaves in order answers for so long */
static const uint64_t PATIENCE_NS = 1500000000000u;
/* Of 7,000 seeds SLOW takes longest, 167 s: packets of 64 bytes, a round trip of 70 ms, and 19% of
 * all packets lost. It came to a halt when its rate could fall to a packet per second. */
static const uint64_t LONGEST_NS = 400000000000u, SLOW = 104235;

static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t below(uint64_t *state, uint64_t limit) {
    return limit ? (mix((*state)++) >> 16) % limit : 0;
}

/* A message, and the receive that is meant for it. */
typedef struct {
    uint16_t from, to;
    uint64_t tag, bytes;
    uint64_t send_ns, receive_ns;
    uint8_t *data, *room;
    int64_t send, receive; /* tickets; -1: not posted yet, 0: done */
    int any, sent, received, code_sent, code_received;
} item;

typedef struct {
    uint64_t random;
    uint16_t ranks;
    memory_net *net;
    lc_host *host[RANKS];
    lc_group *group[RANKS];
    uint64_t wake_ns[RANKS];
    item items[MESSAGES];
    int n;
    uint64_t gone_ns; /* when rank 1 goes; 0: it stays */
    uint64_t cut_ns;  /* when it went, and from when on nothing comes from it any more */
    int dies, gone, told;
    uint64_t seed;
} run;

/* ---- setting up ---- */

static uint64_t draw_bytes(uint64_t *random, uint32_t payload) {
    uint32_t room = payload - LC_RECORD_BYTES;
    const uint64_t special[] = {0,
                                1,
                                room,
                                room + 1,
                                payload,
                                room * 3u,
                                LC_MAIL_SMALL,
                                LC_MAIL_SMALL + 1,
                                LC_MAIL_SMALL * 2};
    uint64_t kind = below(random, 4);
    if (kind == 0)
        return special[below(random, sizeof special / sizeof *special)];
    return kind == 1 ? below(random, 200000) : below(random, 5000);
}

static void draw_items(run *r, uint32_t payload, uint64_t window_ns) {
    uint64_t *x = &r->random;
    r->n = 1 + (int)below(x, MESSAGES);
    for (int i = 0; i < r->n; i++) {
        item *m = &r->items[i];
        m->from = (uint16_t)below(x, r->ranks);
        m->to = (uint16_t)((m->from + 1 + below(x, r->ranks - 1u)) % r->ranks);
        m->any = below(x, 5) == 0;
        m->tag = m->any ? ANY_TAG : below(x, TAGS);
        m->bytes = draw_bytes(x, payload);
        if (m->any)
            m->bytes = 3000; /* whichever comes has to fit */
        m->send_ns = below(x, window_ns);
        m->receive_ns = below(x, window_ns);
        m->send = m->receive = -1;
        m->data = malloc(m->bytes + 1);
        m->room = malloc(m->bytes + GUARD);
        memset(m->room, BUSY, m->bytes + GUARD);
    }
}

static void open_all(run *r, uint16_t payload) {
    lc_address nowhere[RANKS] = {{.port = 0}};
    lc_failure failure;
    for (uint16_t i = 0; i < r->ranks; i++) {
        lc_host_config c = {.address = "memory",
                            .process = i,
                            .processes = r->ranks,
                            .payload_bytes = payload,
                            .eager_bytes = below(&r->random, 2) ? 65536 : 0};
        lc_link *link = memory_link_open(r->net, i);
        lc_setting setting = {memory_clock(r->net), &link, 1};
        r->host[i] = lc_host_open_in(&c, &setting, &failure);
        if (!r->host[i])
            abort();
    }
    for (uint16_t i = 0; i < r->ranks; i++) {
        lc_group_config c = {.number = 5,
                             .rank = i,
                             .size = r->ranks,
                             .deadline_max_ns = 5 * SECOND,
                             .link_ns = 60 * SECOND,
                             .met = 1};
        CHECK(lc_host_start(r->host[i], 1, nowhere) == LC_OK);
        r->group[i] = lc_group_open(r->host[i], &c, &failure);
        if (!r->group[i])
            abort();
    }
}

static uint16_t setup(run *r) {
    uint64_t *x = &r->random;
    const uint16_t payloads[] = {64, 256, 1400, 8952};
    uint16_t payload = payloads[below(x, 4)];
    uint64_t delay = below(x, 3) * below(x, 20000) * US;
    uint32_t capacity = 16 + (uint32_t)below(x, 400);
    r->ranks = (uint16_t)(2 + below(x, RANKS - 1));
    r->net = memory_net_new(r->ranks, 48u + payload, capacity, mix(r->seed));
    memory_set_now(r->net, SECOND);
    int bad = below(x, 3) != 0;
    memory_path path = {.delay_ns = delay,
                        .jitter_ns = bad ? below(x, 3000) * US : 0,
                        .loss = bad ? (double)below(x, 200) / 1000 : 0,
                        .burst = (double)below(x, 4),
                        .twice = bad ? (double)below(x, 100) / 1000 : 0,
                        .late = bad ? (double)below(x, 50) / 1000 : 0,
                        .late_ns = 5 * MS,
                        .bytes_per_s = below(x, 2) ? 1.25e6 * (double)(1 + below(x, 1000)) : 0};
    for (uint16_t i = 0; i < r->ranks; i++)
        for (uint16_t j = 0; j < r->ranks; j++)
            *memory_path_of(r->net, i, j) = path;
    memory_set_full(r->net, below(x, 4) ? 0 : 0.1, 200 * US);
    memory_set_same_host(r->net, delay == 0);
    draw_items(r, payload, 1 + below(x, 200) * MS);
    if (r->ranks > 2 && below(x, 4) == 0)
        r->gone_ns = SECOND + 1 + below(x, 300) * MS;
    r->dies = (int)below(x, 2);
    open_all(r, payload);
    return payload;
}

/* ---- what must come ---- */

/* The bytes say who sent them, and as which of the messages with that tag. */
static void write_bytes(const run *r, item *m) {
    uint64_t before = 0;
    for (int i = 0; i < r->n; i++) {
        const item *o = &r->items[i];
        before += o->from == m->from && o->to == m->to && o->tag == m->tag && o->send >= 0;
    }
    uint64_t x = mix(m->from * 1000 + m->to * 100 + m->tag) + before;
    m->data[0] = (uint8_t)before;
    for (uint64_t k = 0; k < m->bytes; k++)
        m->data[k] = (uint8_t)(mix(x + k / 8) >> k % 8 * 8);
    if (m->any && m->bytes > 1) {
        m->data[0] = (uint8_t)m->from;
        m->data[1] = (uint8_t)before;
    }
}

/* Sends and receives of a pair and tag are posted in one order, so sizes agree: the next of them
 * is the one with the lowest index. */
static int is_next(const run *r, int index, int receive) {
    const item *m = &r->items[index];
    for (int i = 0; i < index; i++) {
        const item *o = &r->items[i];
        if (o->from == m->from && o->to == m->to && o->tag == m->tag &&
            (receive ? o->receive : o->send) < 0)
            return 0;
    }
    return 1;
}

static void post(run *r, int index, int receive) {
    item *m = &r->items[index];
    uint16_t at = receive ? m->to : m->from;
    lc_message message = {.data = receive ? m->room : m->data,
                          .elements = m->bytes,
                          .tag = m->tag,
                          .timeout_ns = PATIENCE_NS,
                          .type = 3,
                          .element_bytes = 1,
                          .peer = receive ? (m->any ? -1 : m->from) : m->to,
                          .receive = (uint8_t)receive};
    if (!receive)
        write_bytes(r, m);
    int64_t ticket = lc_group_post(r->group[at], &message);
    CHECK_AT(ticket >= 0, "seed %lu: posting gave %ld", (unsigned long)r->seed, (long)ticket);
    if (receive) {
        m->receive = ticket;
        return;
    }
    m->send = ticket;
    if (ticket == 0) {
        m->sent = 1;
        memset(m->data, 0xEE, m->bytes); /* it may change now */
    }
}

static void finish(run *r, uint16_t at, int64_t ticket, int *done, int *code) {
    lc_report report;
    lc_failure failure;
    int found = lc_group_result(r->group[at], ticket, &report, &failure);
    if (found == LC_PENDING)
        return;
    *done = 1;
    *code = found;
}

static void look(run *r) {
    uint64_t now = memory_now(r->net) - SECOND;
    for (int i = 0; i < r->n; i++) {
        item *m = &r->items[i];
        int here[2] = {!(r->gone && m->from == 1), !(r->gone && m->to == 1)};
        if (m->send < 0 && here[0] && now >= m->send_ns && is_next(r, i, 0))
            post(r, i, 0);
        if (m->receive < 0 && here[1] && now >= m->receive_ns && is_next(r, i, 1))
            post(r, i, 1);
        if (m->send > 0 && !m->sent && here[0])
            finish(r, m->from, m->send, &m->sent, &m->code_sent);
        if (m->receive > 0 && !m->received && here[1]) {
            finish(r, m->to, m->receive, &m->received, &m->code_received);
            if (m->received && m->code_received == LC_OK) {
                int source = lc_group_source(r->group[m->to], m->receive);
                CHECK(source >= 0 && (m->any || source == m->from));
            }
        }
    }
}

static int all_done(const run *r) {
    for (int i = 0; i < r->n; i++) {
        const item *m = &r->items[i];
        if (!m->sent && !(r->gone && m->from == 1))
            return 0;
        if (!m->received && !(r->gone && m->to == 1))
            return 0;
    }
    for (uint16_t i = 0; i < r->ranks; i++)
        if (!(r->gone && i == 1) && lc_group_unheard(r->group[i]))
            return 0;
    return 1;
}

/* ---- running ---- */

static void go_away(run *r) {
    uint64_t now = memory_now(r->net);
    if (r->gone_ns && !r->gone && now >= r->gone_ns) {
        if (!r->dies && lc_group_unheard(r->group[1]))
            return; /* who leaves in order sees to what it has sent */
        r->gone = 1;
        r->cut_ns = r->dies ? now : now + LINGER_NS;
    }
    for (uint16_t i = 0; i < r->ranks && r->gone && now >= r->cut_ns; i++)
        memory_path_of(r->net, 1, i)->cut = memory_path_of(r->net, i, 1)->cut = 1;
    if (r->gone && !r->told && now >= r->gone_ns + 20 * MS) {
        r->told = 1;
        for (uint16_t i = 0; i < r->ranks; i++) {
            if (i == 1)
                continue;
            if (r->dies)
                lc_group_peer_dead(r->group[i], 1);
            else
                lc_group_peer_left(r->group[i], 1);
            r->wake_ns[i] = 0;
        }
    }
}

static void turns(run *r) {
    uint64_t now = memory_now(r->net);
    for (uint16_t i = 0; i < r->ranks; i++) {
        if (memory_next(r->net, i) > now && r->wake_ns[i] > now)
            continue;
        for (int k = 0; k < 20000 && lc_host_turn(r->host[i]); k++)
            continue;
        r->wake_ns[i] = now + lc_host_idle_ns(r->host[i]);
    }
}

static void step(run *r) {
    uint64_t now = memory_now(r->net), next = now + 5 * MS;
    for (uint16_t i = 0; i < r->ranks; i++) {
        uint64_t at = memory_next(r->net, i);
        next = at < next ? at : next;
        next = r->wake_ns[i] < next ? r->wake_ns[i] : next;
    }
    memory_set_now(r->net, next > now ? next : now + US);
}

/* What is in the room of a receive, by what was sent. */
static void check_item(const run *r, const item *m) {
    int within = 1;
    for (int k = 0; k < GUARD; k++)
        within &= m->room[m->bytes + (uint64_t)k] == BUSY;
    CHECK_AT(within, "seed %lu: written beyond a receive", (unsigned long)r->seed);
    if (m->code_received != LC_OK || !m->received)
        return;
    uint64_t before = 0;
    for (const item *o = r->items; o < m; o++)
        before += o->from == m->from && o->to == m->to && o->tag == m->tag;
    uint64_t from = m->from;
    if (m->any) {
        from = m->room[0];
        before = m->room[1];
    }
    uint64_t x = mix(from * 1000 + m->to * 100 + m->tag) + before;
    int good = 1;
    for (uint64_t k = m->any ? 2 : 0; k < m->bytes; k++)
        good &= m->room[k] == (uint8_t)(mix(x + k / 8) >> k % 8 * 8);
    CHECK_AT(good, "seed %lu: wrong bytes from %d to %d, tag %d, %lu bytes", (unsigned long)r->seed,
             m->from, m->to, (int)m->tag, (unsigned long)m->bytes);
}

static void check_all(const run *r, int *lost) {
    for (int i = 0; i < r->n; i++) {
        const item *m = &r->items[i];
        int near = r->gone_ns && (m->from == 1 || m->to == 1 || m->any);
        CHECK_AT(m->code_sent == LC_OK || (near && m->code_sent == LC_E_PEER), "seed %lu code %d",
                 (unsigned long)r->seed, m->code_sent);
        CHECK_AT(m->code_received == LC_OK || (near && m->code_received == LC_E_PEER),
                 "seed %lu code %d", (unsigned long)r->seed, m->code_received);
        /* Its confirmation may come after the news that the receiver has left; where nearly all of
         * what the receiver repeats meanwhile is lost, never. */
        int likely = memory_path_of(r->net, 1, m->from)->loss < 0.1;
        int taken = likely && m->received && m->code_received == LC_OK && m->to == 1 && !r->dies;
        CHECK_AT(!taken || m->code_sent == LC_OK, "seed %lu: received, and not sent",
                 (unsigned long)r->seed);
        *lost += m->code_sent == LC_E_PEER || m->code_received == LC_E_PEER;
        check_item(r, m);
    }
}

static void tidy(run *r) {
    for (uint16_t i = 0; i < r->ranks; i++) {
        lc_failure failure;
        (void)lc_group_failure(r->group[i], &failure);
        CHECK_AT(failure.code == LC_OK, "seed %lu: group failed with %d", (unsigned long)r->seed,
                 failure.code);
        if (i % 2 == 0)
            for (int k = 0; k < r->n; k++) {
                if (r->items[k].from == i && r->items[k].send > 0 && r->items[k].sent)
                    lc_group_release(r->group[i], r->items[k].send);
                if (r->items[k].to == i && r->items[k].receive > 0 && r->items[k].received)
                    lc_group_release(r->group[i], r->items[k].receive);
            }
        lc_stats stats;
        lc_group_stats(r->group[i], &stats);
        recovered += stats.packets_recovered;
        lc_group_close(r->group[i]);
        lc_host_close(r->host[i]);
    }
    for (int i = 0; i < r->n; i++) {
        free(r->items[i].data);
        free(r->items[i].room);
    }
    memory_net_free(r->net);
}

/* Who is gone leaves receives from any rank without a message: others may take theirs. */
static int may_starve(const run *r) {
    return r->gone;
}

static void scenario(uint64_t seed, uint64_t *packets_lost, int *messages, int *lost) {
    run *r = calloc(1, sizeof *r);
    r->seed = seed;
    r->random = mix(seed);
    setup(r);
    uint64_t end = SECOND + (may_starve(r) || r->gone_ns ? 30 * SECOND : LONGEST_NS);
    while (!all_done(r) && memory_now(r->net) < end && check_failed == 0) {
        go_away(r);
        look(r);
        turns(r);
        look(r);
        step(r);
    }
    int starved = 0;
    for (int i = 0; i < r->n; i++)
        starved += r->gone_ns && r->items[i].any && !r->items[i].received;
    CHECK_AT(all_done(r) || starved, "seed %lu: not done", (unsigned long)seed);
    check_all(r, lost);
    *packets_lost += memory_counts_of(r->net).lost;
    *messages += r->n;
    tidy(r);
    free(r);
}

/* What a record says of a message that can't be. */
static void test_records(void) {
    const lc_record good = {.kind = LC_R_MESSAGE,
                            .op = 7,
                            .slot = LC_SLOT_MESSAGE,
                            .a = 2,
                            .b = 4 | 1 << 16,
                            .c = UINT64_MAX >> 1,
                            .d = 1000};
    lc_letter letter;
    CHECK(lc_letter_read(&letter, &good));
    CHECK(letter.number == 7 && letter.bytes == 4000 && letter.eager && letter.type == 2);
    lc_record again = lc_letter_record(&letter);
    CHECK(memcmp(&again, &good, sizeof good) == 0);
    lc_record lossy = good;
    lossy.b = 4 | 1 << 17 | 3u << 24;
    lossy.d = LC_MAIL_SMALL;
    CHECK(lc_letter_read(&letter, &lossy) && letter.lossy && letter.repair == 3 && !letter.eager);
    again = lc_letter_record(&letter);
    CHECK(memcmp(&again, &lossy, sizeof lossy) == 0);
    enum { BAD = 12 };
    lc_record bad[BAD];
    for (int i = 0; i < BAD; i++)
        bad[i] = i < 8 ? good : lossy;
    bad[0].kind = LC_R_FIN;
    bad[1].slot = 3;
    bad[2].round = 1;
    bad[3].b = 0;              /* elements of no bytes */
    bad[4].b = 65;             /* of too many */
    bad[5].b = 4 | 1 << 18;    /* a bit that means nothing */
    bad[6].d = UINT64_MAX / 4; /* more bytes than can be counted */
    bad[7].d = LC_MAIL_SMALL;  /* ahead of its receive, though it isn't small */
    bad[8].d = 1000;           /* small, and lossy */
    bad[9].b = 4 | 3 << 16;    /* ahead, and lossy */
    bad[10].b = 4 | 3u << 24;  /* rounds of what is reliable */
    bad[11].b |= 1 << 23;      /* a bit that means nothing */
    for (int i = 0; i < BAD; i++)
        CHECK_AT(!lc_letter_read(&letter, &bad[i]), "record %d is taken", i);
    bad[7].b = 4; /* announced */
    CHECK(lc_letter_read(&letter, &bad[7]) && !letter.eager);
}

int main(int n, char **arguments) {
    test_records();
    uint64_t scenarios = 300, first = 1, packets_lost = 0;
    int messages = 0, lost = 0;
    for (int i = 1; i < n; i++) {
        (void)sscanf(arguments[i], "-scenarios=%lu", &scenarios);
        (void)sscanf(arguments[i], "-first=%lu", &first);
    }
    /* One scenario that goes wrong says enough, and what is broken may take long. */
    scenario(SLOW, &packets_lost, &messages, &lost);
    for (uint64_t seed = first; seed < first + scenarios && check_failed == 0; seed++)
        scenario(seed, &packets_lost, &messages, &lost);
    CHECK(packets_lost > 0 || scenarios < 10 || check_failed);
    CHECK(recovered > 0 || scenarios < 100 || check_failed);
    CHECK(lost > 0 || scenarios < 100 || check_failed);
    printf("test_messages %lu scenarios: %d messages, %lu packets lost, %d ended by a loss\n",
           scenarios, messages, packets_lost, lost);
    return check_result("test_messages");
}
