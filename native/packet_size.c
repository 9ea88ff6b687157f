/* The packet size of a path: looked for with probes, given up where large packets vanish. */
#include "packet_size.h"

enum {
    FIRST_ATTEMPTS = 4, /* one after the other, as far apart as answers need at most */
    VANISHED = 12       /* datagrams of one size of which none came, while others do */
};

enum { MS = 1000000 };
static const uint64_t ATTEMPT_NS = 100 * MS; /* on a path whose round trip isn't known */
static const uint64_t DOUBT_NS = 20 * MS;    /* between the probes of a size that is doubted */
static const uint64_t WAIT_NS = 1000 * MS, WAIT_MOST_NS = 60000ull * MS;
/* A size that lasted for so long is no reason to try it again more rarely when it is given up. */
static const uint64_t LASTED_NS = 60000ull * MS;
/* An answer to probes comes sooner; what comes later was asked for by nobody. */
static const uint64_t ANSWER_NS = 10000ull * MS;

/* What networks carry, less 48 bytes of headers of IPv6 and UDP: jumbo frames of several makers,
 * Ethernet, PPPoE, VXLAN, WireGuard and other tunnels, the least of IPv6, and less. */
static const uint16_t LADDER[] = {8152, 4304, 2000, 1452, 1444, 1402, 1372,
                                  1352, 1332, 1302, 1232, 1152, 952,  652};
enum { HALF_LADDER = 8 };
/* The first of them that are tried: more takes longer than it is worth where all are answered. */
static const uint16_t FIRST[] = {1452, 1232};

void lc_size_begin(lc_packet_size *s, uint32_t want, int on) {
    *s = (lc_packet_size){.want = want, .size = want, .is_found = 1};
    uint32_t least = want / 48 + 128; /* of pieces, which are not too many */
    least = least > LC_SIZE_FLOOR ? least : LC_SIZE_FLOOR;
    if (!on || want <= least)
        return;
    s->size = s->floor = least;
    s->is_found = 0;
    s->ask_ns = 1; /* as soon as something is sent */
    s->wait_ns = WAIT_NS;
}

void lc_size_sent(lc_packet_size *s, uint32_t bytes, uint32_t n, uint32_t next, uint64_t now) {
    if (!s->floor || !n)
        return;
    s->wanted = 1;
    if (bytes <= s->floor || bytes < s->tried)
        return;
    if (bytes > s->tried) {
        s->tried = bytes;
        s->n_tried = 0;
        s->doubt_ns = 0;
    }
    if (s->n_tried < VANISHED) {
        s->many_ns = now;
        s->many_seq = next;
    }
    s->n_tried += n;
}

/* Nothing larger is under way of which it isn't known whether it comes. */
static void forget_tried(lc_packet_size *s) {
    s->tried = s->n_tried = 0;
    s->doubt_ns = 0;
}

void lc_size_came(lc_packet_size *s, uint32_t bytes, uint64_t now) {
    if (!s->floor || bytes > s->want)
        return;
    if (bytes && bytes >= s->tried)
        forget_tried(s);
    s->heard |= bytes != 0;
    if (bytes <= s->size || !s->asked_ns || now - s->asked_ns > ANSWER_NS)
        return;
    if (bytes >= s->vanished && now < s->hold_ns)
        return;
    s->size = bytes;
    if (bytes == s->want) {
        s->ask_ns = 0;
        s->is_found = 1;
        s->news = 0;
    }
}

static uint64_t longer(uint64_t wait_ns) {
    return 2 * wait_ns < WAIT_MOST_NS ? 2 * wait_ns : WAIT_MOST_NS;
}

/* Back to what every path carries, until the answers to probes come. A path that changes often has
 * to wait, longer and longer. */
static void fall(lc_packet_size *s, uint64_t now) {
    int lasted = !s->fell_ns || now - s->fell_ns > LASTED_NS;
    s->wait_ns = lasted ? WAIT_NS : longer(s->wait_ns);
    s->hold_ns = lasted ? 0 : now + s->wait_ns;
    s->vanished = s->tried;
    s->fell_ns = now;
    s->size = s->floor;
    s->attempts = 0;
    s->is_found = s->heard = 0;
    s->ask_ns = now;
    forget_tried(s);
}

void lc_size_check(lc_packet_size *s, uint64_t now, uint64_t rto_ns, uint64_t heard_ns,
                   uint32_t acked) {
    if (!s->floor || s->n_tried < VANISHED)
        return;
    if (s->doubt_ns) {
        /* Since the last of the probes, so that its answer would have come. */
        if (s->doubts == LC_SIZE_DOUBTS && heard_ns > s->asked_ns + s->doubt_wait_ns)
            fall(s, now);
        return;
    }
    if (heard_ns <= s->many_ns + rto_ns || (int32_t)(acked - s->many_seq) < 0)
        return;
    s->doubt_ns = now;
    s->doubt_wait_ns = rto_ns > DOUBT_NS ? rto_ns : DOUBT_NS;
    s->doubts = 0;
}

/* Chance takes packets too, and many in a row: probes tell. */
static uint32_t doubted(lc_packet_size *s, uint64_t now, uint32_t sizes[LC_SIZE_PROBES]) {
    s->doubts++;
    s->asked_ns = now;
    sizes[0] = sizes[1] = s->tried;
    return 2;
}

static uint32_t add(const lc_packet_size *s, uint32_t *sizes, uint32_t n, const uint16_t *ladder,
                    uint32_t steps) {
    for (uint32_t i = 0; i < steps; i++)
        if (ladder[i] > s->size && ladder[i] < s->want)
            sizes[n++] = ladder[i];
    return n;
}

static void wait_longer(lc_packet_size *s, uint64_t now) {
    s->ask_ns = now + s->wait_ns;
    s->wait_ns = longer(s->wait_ns);
    s->wanted = 0;
}

uint32_t lc_size_probes(lc_packet_size *s, uint64_t now, uint64_t rto_ns,
                        uint32_t sizes[LC_SIZE_PROBES]) {
    if (s->doubt_ns)
        return doubted(s, now, sizes);
    if (!s->is_found && s->attempts == FIRST_ATTEMPTS) {
        /* A path on which nothing arrives says nothing of sizes. */
        s->is_found = s->news = s->heard;
        s->attempts = s->heard ? s->attempts : 0;
        wait_longer(s, now);
        return 0;
    }
    uint32_t n = 1;
    sizes[0] = s->want;
    if (s->attempts % FIRST_ATTEMPTS) {
        /* A few packets apart: chance is less likely to take them all. */
        n = add(s, sizes, n, LADDER, HALF_LADDER);
        sizes[n++] = s->want;
        n = add(s, sizes, n, LADDER + HALF_LADDER, sizeof LADDER / sizeof *LADDER - HALF_LADDER);
        sizes[n++] = s->want;
    } else {
        n = add(s, sizes, n, FIRST, sizeof FIRST / sizeof *FIRST);
    }
    s->attempts++;
    if (!s->is_found && s->attempts == FIRST_ATTEMPTS - 1)
        s->heard = 0; /* a path that has gone silent since says nothing of sizes either */
    s->asked_ns = now;
    if (s->is_found)
        wait_longer(s, now);
    else
        s->ask_ns = now + (2 * rto_ns > ATTEMPT_NS ? 2 * rto_ns : ATTEMPT_NS);
    return n;
}
