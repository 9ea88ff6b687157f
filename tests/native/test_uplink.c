/* Ranks of one host share an uplink: together they use it as one would, whoever of them sends,
 * leads or has died. Time is the simulation's, but for the last test, whose ranks are threads. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "lossycoll.h"
#include "uplink.h"

enum { RANKS = 4, PACKET = 1452, STEP_NS = 1000000, RTT_STEPS = 20, MOST = 10000 };

static const double BYTES_PER_S = 12.5e6, QUEUE_S = 0.025;

typedef struct {
    lc_uplink uplink;
    lc_uplink_rank ranks[RANKS];
    int sends;
    double moved, taken, waited; /* bytes so far */
    struct {
        double moved, taken;
    } way[RTT_STEPS];
} rank;

typedef struct {
    lc_uplink_board boards[RANKS];
    rank ranks[RANKS];
    int n;
    double waits; /* bytes */
    int64_t queue_ns[RTT_STEPS];
    uint64_t now;
} host;

static void begin(host *h, int n) {
    memset(h, 0, sizeof *h);
    h->n = n;
    h->now = 1000000000u;
    for (int i = 0; i < n; i++) {
        const lc_uplink_board *others[RANKS];
        uint32_t m = 0;
        for (int k = 0; k < n; k++)
            if (k != i)
                others[m++] = &h->boards[k];
        atomic_store(&h->boards[i].key, 1);
        lc_uplink_init(&h->ranks[i].uplink, h->now);
        lc_uplink_share(&h->ranks[i].uplink, &h->boards[i], h->ranks[i].ranks, others, m);
        lc_uplink_serves(&h->ranks[i].uplink, 2, h->now);
        h->ranks[i].sends = 1;
    }
}

static lc_port_ack ack_of(const host *h, const rank *r, int slot) {
    return (lc_port_ack){.now = h->now,
                         .sent_ns = h->now - RTT_STEPS * STEP_NS,
                         .rtt_ns = (uint64_t)RTT_STEPS * STEP_NS,
                         .queue_ns = h->queue_ns[slot],
                         .moved = r->way[slot].moved,
                         .taken = r->way[slot].taken,
                         .packet = PACKET};
}

/* In turns, so that no rank has the room for itself. */
static void forward(host *h, int slot) {
    double room = BYTES_PER_S * QUEUE_S - h->waits;
    uint32_t sent = 0;
    for (int more = 1; more;) {
        more = 0;
        CHECK_AT(++sent < MOST, "%u packets at once", sent);
        if (sent >= MOST)
            return;
        for (int i = 0; i < h->n; i++) {
            rank *r = &h->ranks[i];
            if (!r->sends || !lc_uplink_room(&r->uplink, h->now, 1, PACKET, 1))
                continue;
            more = 1;
            lc_uplink_spend(&r->uplink, h->now, PACKET);
            r->way[slot].moved += PACKET;
            if (room < PACKET)
                continue;
            room -= PACKET;
            h->waits += PACKET;
            r->way[slot].taken += PACKET;
        }
    }
    h->queue_ns[slot] = (int64_t)(1e9 * h->waits / BYTES_PER_S);
}

static void pass(host *h, double seconds) {
    uint64_t end = h->now + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < h->n; i++)
        h->ranks[i].moved = h->ranks[i].taken = 0;
    for (; h->now < end; h->now += STEP_NS) {
        int slot = (int)(h->now / STEP_NS % RTT_STEPS);
        for (int i = 0; i < h->n; i++) {
            rank *r = &h->ranks[i];
            lc_port_ack ack = ack_of(h, r, slot);
            if (r->sends && ack.moved > 0)
                lc_uplink_acked(&r->uplink, &ack);
            r->moved += r->way[slot].moved;
            r->taken += r->way[slot].taken;
            r->way[slot].moved = r->way[slot].taken = 0;
        }
        double carried = BYTES_PER_S * 1e-9 * STEP_NS;
        h->waits = h->waits > carried ? h->waits - carried : 0;
        forward(h, slot);
    }
}

static void check(const host *h, double seconds, const char *what) {
    double moved = 0, taken = 0;
    for (int i = 0; i < h->n; i++) {
        moved += h->ranks[i].moved;
        taken += h->ranks[i].taken;
    }
    double used = taken / seconds / BYTES_PER_S, lost = 1 - taken / moved;
    CHECK_AT(used > 0.9, "%s: %.2f used", what, used);
    CHECK_AT(lost < 0.002, "%s: %.4f lost", what, lost);
}

static int leaders(const host *h) {
    int n = 0;
    for (int i = 0; i < h->n; i++)
        n += h->ranks[i].uplink.leads;
    return n;
}

static int leader(const host *h) {
    for (int i = 0; i < h->n; i++)
        if (h->ranks[i].uplink.leads)
            return i;
    return -1;
}

static host h; /* its boards are large for a stack */

static void test_together(void) {
    for (int n = 2; n <= RANKS; n++) {
        begin(&h, n);
        pass(&h, 3);
        pass(&h, 5);
        check(&h, 5, "all send");
        CHECK(leaders(&h) == 1);
        const lc_uplink *leads = &h.ranks[leader(&h)].uplink;
        for (uint32_t i = 0; i < leads->n_ranks; i++) /* it has heard all but the latest */
            CHECK(atomic_load(&leads->ranks[i].board->n_acks) - leads->ranks[i].n_acks < 3);
        for (int i = 0; i < n; i++) {
            double part = h.ranks[i].taken / 5 / BYTES_PER_S * n;
            CHECK_AT(part > 0.85 && part < 1.15, "rank %d of %d has %.2f of its part", i, n, part);
        }
    }
}

/* What one leaves is the others', at once and without loss as it comes back. */
static void test_some(void) {
    begin(&h, 2);
    pass(&h, 3);
    for (int i = 0; i < 20; i++) {
        int rests = i % 2 ? leader(&h) : 1 - leader(&h);
        h.ranks[rests].sends = 0;
        pass(&h, 0.3);
        double used = h.ranks[1 - rests].taken / 0.3 / BYTES_PER_S;
        CHECK_AT(used > 0.8, "%.2f used by one", used);
        h.ranks[rests].sends = 1;
        pass(&h, 0.3);
        check(&h, 0.3, "one more sends");
    }
}

/* The next one goes on with what the leader had found: a slow start would take half a second. */
static void test_dead_leader(void) {
    begin(&h, 3);
    pass(&h, 3);
    for (int dead = 0; dead < 2; dead++) {
        int before = leader(&h);
        CHECK(before >= 0);
        h.ranks[before].sends = 0;
        h.ranks[before].uplink.leads = 0;
        pass(&h, 0.1);
        CHECK(leaders(&h) == 1 && leader(&h) != before);
        pass(&h, 0.3);
        check(&h, 0.3, "the leader died");
    }
}

/* A rank of another address doesn't count, nor does what makes no sense. */
static void test_others(void) {
    begin(&h, 2);
    atomic_store(&h.boards[1].key, 2);
    h.ranks[1].sends = 0;
    atomic_store(&h.boards[1].busy_ns, UINT64_MAX / 2);
    for (int i = 0; i < 200; i++) {
        atomic_store(&h.boards[1].led_ns, h.now);
        pass(&h, 0.015);
        CHECK(i < 10 || h.ranks[0].uplink.leads);
    }
    CHECK(h.ranks[0].uplink.leads && h.ranks[0].uplink.busy == 1);
    pass(&h, 2);
    check(&h, 2, "beside another uplink");
}

static void fill(lc_uplink_board *b, uint64_t word, uint64_t led_ns) {
    for (int i = 0; i < LC_PORT_KNOWN_WORDS; i++)
        atomic_store(&b->known[i], word);
    for (int i = 0; i < LC_UPLINK_ACKS; i++)
        for (int k = 0; k < LC_UPLINK_ACK_WORDS; k++)
            atomic_store(&b->acks[i][k], word);
    atomic_store(&b->busy_ns, word);
    atomic_store(&b->led_ns, led_ns);
}

/* A member may keep others from sending, as it could by sending itself; it breaks nothing. */
static void test_nonsense(void) {
    static const double values[] = {NAN, INFINITY, -1e9, 1e300, -0.0, 1e-300};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        uint64_t word;
        memcpy(&word, &values[i], sizeof word);
        begin(&h, 2);
        pass(&h, 2);
        h.ranks[1].sends = 0;
        h.ranks[1].uplink.leads = 0;
        for (int k = 0; k < 50; k++) {
            fill(&h.boards[1], word, k % 2 ? h.now : 0);
            atomic_fetch_add(&h.boards[1].n_acks, 1 + (uint64_t)k * 7);
            atomic_fetch_add(&h.boards[1].sequence, (uint64_t)k % 3);
            pass(&h, 0.02);
            const lc_uplink *u = &h.ranks[0].uplink;
            CHECK(isfinite(u->law.rate) && isfinite(u->law.allowed) && isfinite(u->gate.tokens));
        }
        fill(&h.boards[1], 0, 0);
        pass(&h, 3);
        pass(&h, 2);
        check(&h, 2, "after nonsense");
    }
}

/* However large a packet is, and however little the ranks of a host may send, all of them go on. */
static void test_large_packets(void) {
    static const uint32_t packets[] = {PACKET, 8960, 24000, LC_SHARED_PAYLOAD};
    for (size_t i = 0; i < sizeof packets / sizeof *packets; i++) {
        begin(&h, RANKS);
        double sent[RANKS] = {0};
        for (int ms = 0; ms < 20000; ms++, h.now += STEP_NS)
            for (int k = 0; k < RANKS; k++) {
                lc_uplink *u = &h.ranks[k].uplink;
                const lc_port_ack ack = {.now = h.now,
                                         .sent_ns = h.now - 300 * STEP_NS,
                                         .rtt_ns = 300 * STEP_NS,
                                         .moved = ms % 300 ? 0 : packets[i],
                                         .taken = ms % 300 ? 0 : packets[i],
                                         .packet = packets[i]};
                if (ms % 10 == 0)
                    lc_uplink_acked(u, &ack);
                if (!lc_uplink_room(u, h.now, 1, packets[i], 2))
                    continue;
                lc_uplink_spend(u, h.now, packets[i]);
                sent[k] += packets[i];
            }
        for (int k = 0; k < RANKS; k++)
            CHECK_AT(sent[k] >= 10.0 * packets[i], "rank %d sent %.0f packets of %u", k,
                     sent[k] / packets[i], packets[i]);
    }
}

/* What goes ahead of its turn holds data up, but not for longer than a burst takes. */
static void test_debts(void) {
    begin(&h, 2);
    pass(&h, 2);
    lc_uplink *u = &h.ranks[0].uplink;
    for (int i = 0; i < MOST; i++)
        lc_uplink_spend(u, h.now, PACKET);
    uint64_t wait = lc_uplink_delay(u, h.now, PACKET);
    CHECK_AT(wait > 0 && wait < 50 * STEP_NS, "%.3f s", (double)wait * 1e-9);
}

/* ---- ranks as threads ---- */

static atomic_int goes_on;

static void *drive(void *arg) {
    rank *r = arg;
    for (uint64_t now = h.now, i = 0; i < 20000 && atomic_load(&goes_on); i++) {
        now += 50000;
        uint32_t room = lc_uplink_room(&r->uplink, now, 8, PACKET, 1);
        if (!room)
            continue;
        lc_uplink_spend(&r->uplink, now, room * PACKET);
        lc_port_ack ack = {.now = now,
                           .sent_ns = now - 1000000,
                           .rtt_ns = 1000000,
                           .moved = room * PACKET,
                           .taken = room * PACKET,
                           .packet = PACKET};
        lc_uplink_acked(&r->uplink, &ack);
        r->moved += ack.moved;
    }
    return NULL;
}

static void test_threads(void) {
    pthread_t threads[RANKS];
    begin(&h, RANKS);
    atomic_store(&goes_on, 1);
    for (int i = 0; i < RANKS; i++)
        CHECK(pthread_create(&threads[i], NULL, drive, &h.ranks[i]) == 0);
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    double moved = 0, led = 0;
    for (int i = 0; i < RANKS; i++) {
        moved += h.ranks[i].moved;
        led += (double)atomic_load(&h.boards[i].led_ns);
    }
    CHECK(moved > 0 && led > 0);
}

int main(void) {
    test_together();
    test_some();
    test_dead_leader();
    test_others();
    test_nonsense();
    test_large_packets();
    test_debts();
    test_threads();
    return check_result("test_uplink");
}
