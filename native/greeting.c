/* Finding out whom a link reaches, before a host uses it. Nothing that comes is believed but a
 * greeting of this meeting from the peer that it names. */
#define _GNU_SOURCE
#include "link_verbs.h"

#include <poll.h>
#include <string.h>

enum { HEARD = 1, ANSWERED = 2, ASKS = 4 };
enum { TURNS = 1024 };

static const uint8_t padding[LC_VERBS_LARGEST];

static const uint64_t MAGIC = 0x31474C4C4F43534C; /* "LSCOLLG1" */
static const uint64_t AGAIN_NS = 10000000, MS = 1000000;
/* An answer may be lost: whoever has heard all goes on answering until nobody has asked for so
 * long. */
static const uint64_t QUIET_NS = 5 * AGAIN_NS;

typedef struct {
    uint64_t magic, token;
    uint16_t from, to;
    uint32_t state; /* the sender has HEARD the receiver, and that one has ANSWERED */
} greeting;

typedef struct {
    lc_link *link;
    uint64_t token;
    uint32_t bytes; /* of a greeting: as many as packets will have */
    uint8_t *state; /* by process */
    uint16_t own, n;
} meeting;

/* Whether there is a way to it, which lc_verbs_know has found. */
static int takes_part(const meeting *m, uint16_t process) {
    return process != m->own && lc_verbs_peer_of((const lc_verbs *)(void *)m->link, process);
}

static void greet(const meeting *m, uint16_t to) {
    greeting g = {MAGIC, m->token, m->own, to, m->state[to] & (HEARD | ANSWERED)};
    struct iovec pieces[2] = {{&g, sizeof g}, {(void *)(uintptr_t)padding, m->bytes - sizeof g}};
    const lc_run run = {.iov = pieces, .n_packets = 1, .packet_bytes = m->bytes, .peer = to};
    int error;
    (void)lc_link_send(m->link, &run, 1, &error); /* it is sent again */
}

static int is_over(const meeting *m) {
    for (uint16_t i = 0; i < m->n; i++)
        if (takes_part(m, i) && (m->state[i] & (HEARD | ANSWERED)) != (HEARD | ANSWERED))
            return 0;
    return 1;
}

static void hear(const meeting *m, const lc_arrival *a) {
    greeting g;
    if (a->length != m->bytes)
        return;
    memcpy(&g, a->data, sizeof g);
    if (g.magic != MAGIC || g.token != m->token || g.to != m->own || g.from >= m->n ||
        !takes_part(m, g.from) || !lc_link_is_from(m->link, a, g.from))
        return;
    m->state[g.from] |= HEARD;
    if (g.state & HEARD)
        m->state[g.from] |= ANSWERED;
    if (!(g.state & ANSWERED))
        m->state[g.from] |= ASKS;
}

/* Answers each that asks once, however often it has. Returns whether some did. */
static int hear_all(const meeting *m) {
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    int n;
    for (int turn = 0;
         turn < TURNS && (n = lc_link_receive(m->link, arrivals, LC_RECEIVE_BUFFERS)) > 0; turn++)
        for (int i = 0; i < n; i++)
            hear(m, &arrivals[i]);
    int asked = 0;
    for (uint16_t i = 0; i < m->n; i++) {
        if (m->state[i] & ASKS)
            greet(m, i);
        asked |= m->state[i] & ASKS;
        m->state[i] &= (uint8_t)~ASKS;
    }
    return asked;
}

static void sleep_until(const meeting *m, uint64_t now, uint64_t until) {
    struct pollfd fds[LC_LINK_DESCRIPTORS];
    uint64_t left = until > now ? until - now : 0;
    int n = lc_link_descriptors(m->link, 0, fds, &left);
    (void)poll(fds, (nfds_t)n, (int)((left + MS - 1) / MS));
}

int lc_verbs_know(lc_verbs_port *port, uint16_t own, const lc_verbs_address *addresses,
                  uint16_t n) {
    lc_link *link = (lc_link *)(void *)port;
    for (uint16_t i = 0; i < n; i++) {
        const lc_address address = {.verbs = addresses[i]};
        int failed = i == own || !addresses[i].queue_pair;
        for (uint16_t k = 0; k < i && !failed; k++) /* each takes a second to find nobody */
            failed =
                k != own && !memcmp(addresses[k].gid, addresses[i].gid, sizeof address.verbs.gid) &&
                addresses[k].queue_pair && !lc_verbs_peer_of((const lc_verbs *)(void *)link, k);
        if (!failed && lc_link_set_peer(link, i, &address) == LC_E_MEMORY)
            return LC_E_MEMORY;
    }
    return LC_OK;
}

int lc_verbs_greet(lc_verbs_port *port, uint64_t token, uint16_t own, uint16_t n, uint32_t bytes,
                   uint64_t timeout_ns, uint8_t *heard) {
    meeting m = {(lc_link *)(void *)port, token, bytes, heard, own, n};
    memset(heard, 0, n);
    if (bytes < sizeof(greeting) || bytes > LC_VERBS_LARGEST)
        return LC_E_ARGUMENT;
    uint64_t now = lc_clock_now(m.link->clock), end = now + timeout_ns, again = now, asked = now;
    while (now < end && (!is_over(&m) || now - asked < QUIET_NS)) {
        if (now >= again) {
            for (uint16_t i = 0; i < n; i++)
                if (takes_part(&m, i) && m.state[i] != (HEARD | ANSWERED))
                    greet(&m, i);
            again = now + AGAIN_NS;
        }
        if (hear_all(&m) || !is_over(&m))
            asked = now;
        sleep_until(&m, now, again < end ? again : end);
        now = lc_clock_now(m.link->clock);
    }
    for (uint16_t i = 0; i < n; i++)
        heard[i] &= HEARD;
    return LC_OK;
}

lc_verbs_port *lc_verbs_open(const lc_verbs_config *config, lc_verbs_info *info,
                             lc_failure *failure) {
    return (lc_verbs_port *)(void *)lc_verbs_link(config, &lc_system_clock, info, failure);
}

void lc_verbs_drop_arrived(lc_verbs_port *port) {
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    for (int turn = 0; turn < TURNS; turn++)
        if (lc_link_receive((lc_link *)(void *)port, arrivals, LC_RECEIVE_BUFFERS) <= 0)
            return;
}

void lc_verbs_close(lc_verbs_port *port) {
    lc_link_close((lc_link *)(void *)port);
}
