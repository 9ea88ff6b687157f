/* Finding out whom a link reaches, before a host uses it. Nothing that comes is believed but a
 * greeting of this meeting from the peer that it names. */
#define _GNU_SOURCE
#include "link_verbs.h"

#include <poll.h>
#include <string.h>

enum { HEARD = 1, ANSWERED = 2, ASKS = 4 };

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
    const lc_verbs_address *addresses;
    uint8_t *state; /* by process */
    uint16_t own, n;
} meeting;

static int takes_part(const meeting *m, uint16_t process) {
    return process != m->own && m->addresses[process].queue_pair;
}

static void greet(const meeting *m, uint16_t to) {
    greeting g = {MAGIC, m->token, m->own, to, m->state[to] & (HEARD | ANSWERED)};
    struct iovec pieces[2] = {{&g, sizeof g}, {NULL, 0}};
    const lc_run run = {
        .iov = pieces, .n_packets = 1, .packet_bytes = sizeof g, .peer = to, .joined = 1};
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
    if (a->length != sizeof g)
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
    while ((n = lc_link_receive(m->link, arrivals, LC_RECEIVE_BUFFERS)) > 0)
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

int lc_verbs_greet(lc_verbs_port *port, uint64_t token, uint16_t own,
                   const lc_verbs_address *addresses, uint16_t n, uint64_t timeout_ns,
                   uint8_t *heard) {
    meeting m = {(lc_link *)(void *)port, token, addresses, heard, own, n};
    memset(heard, 0, n);
    for (uint16_t i = 0; i < n; i++) {
        const lc_address address = {.verbs = addresses[i]};
        int code = takes_part(&m, i) ? lc_link_set_peer(m.link, i, &address) : LC_OK;
        if (code == LC_E_MEMORY)
            return code;
    }
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
    while (lc_link_receive((lc_link *)(void *)port, arrivals, LC_RECEIVE_BUFFERS) > 0)
        ;
}

void lc_verbs_close(lc_verbs_port *port) {
    lc_link_close((lc_link *)(void *)port);
}
