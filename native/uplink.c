#include "uplink.h"

#include <math.h>
#include <string.h>

#include "loss.h"

static const double RUN_S = 0.001, PACKETS_MIN = 2, BURST_PACKETS = 4;
static const uint32_t PACKET_BYTES = 1500; /* until one has gone */
static const double START_BURST = 16 * 1500.0;
static const uint64_t COUNT_NS = 100000u;     /* ranks are counted so often */
static const uint64_t BUSY_NS = 1000000u;     /* who had something to send is taken to have more */
static const uint64_t LED_NS = 20000000u;     /* who hasn't led for so long, or two round trips, */
static const uint64_t LED_RTTS = 2;           /* doesn't lead any more */
static const uint64_t AHEAD_NS = 1000000000u; /* a time so far ahead is nonsense */
static const double BYTES_MAX = 1e12;         /* an acknowledgement tells of less */
static const uint64_t USED_NS = 1000000000u;  /* who hears of nothing for so long has left it */
static const int64_t QUEUE_MAX_NS = 60000000000;

/* ---- boards ---- */

/* What is read later is as new as this, */
static uint64_t get(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_acquire);
}

/* and who reads this reads what was written before. So no fences are needed, which TSan can't see.
 */
static void put(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}

static uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double of_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void tell_ack(lc_uplink *u, const lc_port_ack *ack) {
    uint64_t n = get(&u->own->n_acks);
    _Atomic uint64_t *words = u->own->acks[n % LC_UPLINK_ACKS];
    u->moved += ack->moved;
    u->taken += ack->taken;
    u->sent += ack->sent;
    const uint64_t values[LC_UPLINK_ACK_WORDS] = {ack->now,
                                                  ack->sent_ns,
                                                  ack->rtt_ns | (uint64_t)(ack->held != 0) << 63,
                                                  (uint64_t)ack->queue_ns,
                                                  bits_of(u->moved),
                                                  bits_of(u->taken),
                                                  bits_of(u->sent),
                                                  bits_of(ack->packet),
                                                  bits_of(ack->burst)};
    for (int i = 0; i < LC_UPLINK_ACK_WORDS; i++)
        put(&words[i], values[i]);
    put(&u->own->n_acks, n + 1);
}

/* What the rank has told since `before`, which becomes `now`. Whether that can be. */
static int advance(double *before, double now, double *by) {
    *by = now - *before;
    *before = now;
    return isfinite(*by) && *by >= 0 && *by < BYTES_MAX;
}

/* Acknowledgement number n of the rank; 0: it has been overwritten, or makes no sense. */
static int read_ack(lc_uplink_rank *rank, uint64_t n, uint64_t now, lc_port_ack *ack) {
    uint64_t words[LC_UPLINK_ACK_WORDS];
    for (int i = 0; i < LC_UPLINK_ACK_WORDS; i++)
        words[i] = get(&rank->board->acks[n % LC_UPLINK_ACKS][i]);
    if (get(&rank->board->n_acks) - n >= LC_UPLINK_ACKS)
        return 0;
    *ack = (lc_port_ack){.now = words[0] < now ? words[0] : now,
                         .sent_ns = words[1] < now ? words[1] : now,
                         .rtt_ns = words[2] << 1 >> 1,
                         .held = (int)(words[2] >> 63),
                         .queue_ns = (int64_t)words[3],
                         .packet = of_bits(words[7]),
                         .burst = of_bits(words[8])};
    int sane = advance(&rank->moved, of_bits(words[4]), &ack->moved);
    sane &= advance(&rank->taken, of_bits(words[5]), &ack->taken);
    sane &= advance(&rank->sent, of_bits(words[6]), &ack->sent);
    return sane && ack->queue_ns <= QUEUE_MAX_NS && ack->rtt_ns <= (uint64_t)QUEUE_MAX_NS &&
           ack->packet > 0 && ack->packet < BYTES_MAX && ack->burst >= 1 &&
           ack->burst <= LC_BURST_MOST;
}

static void read_acks(lc_uplink *u, lc_uplink_rank *rank, uint64_t now) {
    uint64_t n = get(&rank->board->n_acks);
    uint64_t first = rank->n_acks;
    if (n - first > LC_UPLINK_ACKS - 1)
        first = n - (LC_UPLINK_ACKS - 1);
    rank->n_acks = n;
    for (uint64_t i = first; i != n; i++) {
        lc_port_ack ack;
        if (!read_ack(rank, i, now, &ack))
            continue;
        if (ack.now < u->law.heard_ns) /* it came between two of another rank */
            ack.now = u->law.heard_ns;
        lc_port_acked(&u->law, &ack);
    }
}

/* What was told before isn't of this epoch. */
static void skip_acks(lc_uplink_rank *rank, uint64_t now) {
    lc_port_ack ack;
    rank->n_acks = get(&rank->board->n_acks);
    if (rank->n_acks)
        read_ack(rank, rank->n_acks - 1, now, &ack);
}

static void tell_known(lc_uplink *u, uint64_t now) {
    lc_uplink_board *b = u->own;
    uint64_t n = get(&b->sequence);
    double values[LC_PORT_KNOWN_WORDS];
    u->known = lc_port_tell(&u->law);
    memcpy(values, &u->known, sizeof values);
    put(&b->sequence, n + 1);
    for (int i = 0; i < LC_PORT_KNOWN_WORDS; i++)
        put(&b->known[i], bits_of(values[i]));
    put(&b->led_ns, now);
    put(&b->sequence, n + 2);
}

/* Left as it was if the leader writes it now, or it makes no sense. */
static void read_known(lc_uplink *u, const lc_uplink_board *b, uint64_t led_ns) {
    uint64_t n = get(&b->sequence);
    double values[LC_PORT_KNOWN_WORDS];
    int sane = n % 2 == 0;
    for (int i = 0; i < LC_PORT_KNOWN_WORDS; i++) {
        values[i] = of_bits(get(&b->known[i]));
        sane &= values[i] >= 0 && values[i] < BYTES_MAX; /* not what isn't a number */
    }
    if (!sane || get(&b->sequence) != n)
        return;
    memcpy(&u->known, values, sizeof values);
    u->known_ns = led_ns;
}

/* ---- who leads ---- */

/* Others have an uplink of their own. */
static int sends_by_it(const lc_uplink *u, uint32_t i) {
    return get(&u->ranks[i].board->key) == get(&u->own->key);
}

static int is_past(uint64_t then, uint64_t now) {
    return then > 0 && then < now + AHEAD_NS;
}

/* Who led last leads, this rank where nobody has for a while. */
static int look_for_leader(lc_uplink *u, uint64_t now) {
    const lc_uplink_board *latest = u->own;
    for (uint32_t i = 0; i < u->n_ranks; i++) {
        uint64_t led = get(&u->ranks[i].board->led_ns);
        if (sends_by_it(u, i) && is_past(led, now) && led > get(&latest->led_ns))
            latest = u->ranks[i].board;
    }
    uint64_t led = get(&latest->led_ns), wait = LED_RTTS * u->law.rtt_ns;
    if (latest != u->own && led)
        read_known(u, latest, led);
    if (latest == u->own && led)
        return 1;
    return led + (wait > LED_NS ? wait : LED_NS) < now;
}

static void lead(lc_uplink *u, uint64_t now) {
    if (u->known.allowed > 0)
        lc_port_resume(&u->law, &u->known, now);
    for (uint32_t i = 0; i < u->n_ranks; i++)
        skip_acks(&u->ranks[i], now);
    u->leads = 1;
}

/* ---- what this rank may send ---- */

static void count_busy(lc_uplink *u, uint64_t now) {
    if (!u->own)
        return;
    u->counted_ns = now;
    uint32_t busy = 1;
    for (uint32_t i = 0; i < u->n_ranks; i++) {
        uint64_t until = get(&u->ranks[i].board->busy_ns);
        busy += sends_by_it(u, i) && until >= now && until < now + AHEAD_NS;
    }
    u->busy = busy;
}

static double allowed(const lc_uplink *u) {
    if (!u->own || u->leads || u->known.allowed <= 0)
        return u->law.allowed;
    double least = lc_port_least(&u->law);
    return u->known.allowed > least ? u->known.allowed : least;
}

/* What the others have told since. */
static void listen(lc_uplink *u, uint64_t now) {
    for (uint32_t i = 0; i < u->n_ranks; i++)
        if (sends_by_it(u, i))
            read_acks(u, &u->ranks[i], now);
}

static void set_gate(lc_uplink *u, uint64_t now) {
    double rate = allowed(u) / u->busy;
    if (rate == u->gate.bytes_per_s) /* what may be saved up at the begin stays */
        return;
    if (rate <= 0) {
        lc_rate_init(&u->gate, 0, now);
        return;
    }
    double burst = rate * RUN_S, least = BURST_PACKETS * u->packet_bytes;
    lc_rate_set(&u->gate, rate, burst > least ? burst : least, now);
}

/* A gate that holds less than a packet would never open. */
static void make_room_for(lc_uplink *u, uint32_t packet_bytes) {
    u->packet_bytes = packet_bytes;
    if (u->gate.burst_bytes < BURST_PACKETS * packet_bytes)
        u->gate.burst_bytes = BURST_PACKETS * packet_bytes;
}

void lc_uplink_init(lc_uplink *u, uint64_t now) {
    *u = (lc_uplink){.busy = 1, .packet_bytes = PACKET_BYTES};
    lc_port_init(&u->law, now);
    lc_rate_init(&u->gate, u->law.allowed, now);
    u->gate.tokens = u->gate.burst_bytes = START_BURST;
}

void lc_uplink_share(lc_uplink *u, lc_uplink_board *own, lc_uplink_rank *ranks,
                     const lc_uplink_board *const *boards, uint32_t n) {
    u->ranks = ranks;
    for (u->n_ranks = 0; u->n_ranks < n; u->n_ranks++)
        ranks[u->n_ranks] = (lc_uplink_rank){.board = boards[u->n_ranks]};
    u->own = n ? own : NULL;
    u->gate.tokens = START_BURST / (1 + n);
}

void lc_uplink_serves(lc_uplink *u, uint16_t n_paths, uint64_t now) {
    lc_port_serves(&u->law, u->own ? 2 : n_paths);
    if (u->law.allowed <= 0 || u->gate.bytes_per_s <= 0)
        set_gate(u, now);
}

static void note_queue(lc_uplink *u, const lc_port_ack *ack) {
    int64_t led = (int64_t)u->known.low_ns + (int64_t)(ack->now - u->known_ns);
    u->low_ns += (int64_t)(ack->now - u->low_at_ns);
    u->low_at_ns = ack->now;
    if (ack->queue_ns >= 0 && ack->queue_ns < u->low_ns)
        u->low_ns = ack->queue_ns;
    if (led < 0) /* told by a thread that has read its clock later */
        led = 0;
    if (led < u->low_ns)
        u->low_ns = led;
}

void lc_uplink_acked(lc_uplink *u, const lc_port_ack *ack) {
    lc_port_ack told = *ack;
    told.sent = u->spent;
    told.held = u->held;
    u->spent = 0;
    u->held = 0;
    int leads = !u->own || look_for_leader(u, ack->now);
    if (u->own && leads && !u->leads)
        lead(u, ack->now);
    u->leads = u->own && leads;
    if (u->leads)
        listen(u, ack->now);
    if (leads) {
        lc_port_acked(&u->law, &told);
        u->low_ns = u->law.low_ns;
        u->low_at_ns = ack->now;
    } else {
        if (ack->rtt_ns)
            u->law.rtt_ns = ack->rtt_ns;
        tell_ack(u, &told);
        note_queue(u, &told);
    }
    if (u->leads)
        tell_known(u, ack->now);
    count_busy(u, ack->now);
    set_gate(u, ack->now);
}

int lc_uplink_bound(lc_uplink *u, const lc_port_ack *ack, double rate) {
    int again = lc_port_bound(&u->law, ack, rate);
    set_gate(u, ack->now);
    return again;
}

static void be_busy(lc_uplink *u, uint64_t now, uint32_t packet_bytes) {
    uint64_t wait = lc_rate_delay(&u->gate, now, 2 * packet_bytes);
    put(&u->own->busy_ns, now + BUSY_NS + (wait < AHEAD_NS / 2 ? wait : AHEAD_NS / 2));
    if (now - u->counted_ns < COUNT_NS)
        return;
    count_busy(u, now);
    u->leads = look_for_leader(u, now) && u->leads;
    if (u->leads) {
        listen(u, now);
        tell_known(u, now);
    }
    set_gate(u, now);
}

uint32_t lc_uplink_room(lc_uplink *u, uint64_t now, uint32_t want, uint32_t packet_bytes,
                        uint32_t n_paths) {
    if (u->gate.bytes_per_s <= 0)
        return want;
    if (u->packet_bytes < packet_bytes)
        make_room_for(u, packet_bytes);
    if (u->own)
        be_busy(u, now, packet_bytes);
    double run = u->gate.bytes_per_s * RUN_S / (packet_bytes * (n_paths ? n_paths : 1));
    if (run < PACKETS_MIN)
        run = PACKETS_MIN;
    if (run < want)
        want = (uint32_t)run;
    uint32_t room = lc_rate_room(&u->gate, now, want, packet_bytes);
    if (want && !room)
        u->held = 1;
    return room;
}

void lc_uplink_spend(lc_uplink *u, uint64_t now, double bytes) {
    lc_rate_spend(&u->gate, now, 1, (uint32_t)bytes);
    /* Control goes ahead of its turn, and data must not wait for ever for what it has spent. */
    if (u->gate.tokens < -u->gate.burst_bytes)
        u->gate.tokens = -u->gate.burst_bytes;
    u->spent += bytes;
}

uint64_t lc_uplink_delay(const lc_uplink *u, uint64_t now, uint32_t packet_bytes) {
    return lc_rate_delay(&u->gate, now, packet_bytes);
}

uint32_t lc_uplink_renewed(const lc_uplink *u) {
    return u->own && !u->leads ? (uint32_t)u->known.renewed : u->law.renewed;
}

double lc_uplink_used(const lc_uplink *u, uint64_t now) {
    if (now - u->low_at_ns > USED_NS)
        return 0;
    return u->own && !u->leads ? u->known.rate : u->law.rate;
}

double lc_uplink_lost(const lc_uplink *u) {
    return u->own && !u->leads ? u->known.usual : u->law.overrun.lost;
}

void lc_uplink_shared(lc_uplink *u, uint32_t n, double rate) {
    u->law.others = n;
    u->law.others_rate = rate;
}
