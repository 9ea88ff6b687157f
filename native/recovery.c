/* How lost packets come back in the least time: a model of what parity and rounds leave and cost,
 * and the choice. */
#include "recovery.h"

#include <math.h>
#include <string.h>

/* Estimates are noisy: nothing is done about a loss of so much more than what is wanted. And where
 * nothing is enough, what leaves so much more than the least is as good. */
static const double NEARLY = 1.1;
/* What was chosen before stays while it leaves between these multiples of what is wanted, and takes
 * no more than so much longer than what is best. */
static const double KEEP_LEAST = 0.4, KEEP_MOST = 1.25, KEEP_TIME = 1.3;
/* Of two means within this share of a stream's time, the one with fewer bytes. */
static const double SAME_TIME = 0.03;
/* Below this share nothing is lost, and nothing smaller can be asked for. */
static const double NO_LOSS = 5e-5, NOTHING = 1e-9;
/* Where nothing is enough, a parity packet brings back at least so much of one, or isn't sent. */
static const double WORTH = 0.125;
static const double LOSS_MOST = 0.99, BURST_MOST = 64;

/* ---- what a code leaves ---- */

/* A chain over the packets of a set, data first, of whether each is lost (Gilbert), with the number
 * of those lost so far: its chance, and the data packets lost times that chance. Numbers above the
 * most rows that may be asked for are left out, since what is missing on average is known. */
typedef struct {
    double begin,
        stay; /* chance that a packet is lost after one that is not, and after one that is */
    uint32_t steps, most;
    double good[LC_ROWS_MOST + 1], bad[LC_ROWS_MOST + 1];
    double good_data[LC_ROWS_MOST + 1], bad_data[LC_ROWS_MOST + 1];
} chain;

static void start(chain *c, double loss, double burst, uint32_t sets, uint32_t most) {
    double leave = 1 / burst, correlation = 1 - leave - loss * leave / (1 - loss);
    correlation = correlation > 0 ? correlation : 0;
    double kept = 1;
    for (uint32_t i = 0; i < sets; i++)
        kept *= correlation; /* packets of a set are so far apart */
    memset(c, 0, sizeof *c);
    c->begin = loss * (1 - kept);
    c->stay = loss + (1 - loss) * kept;
    c->most = most;
    c->good[0] = 1 - loss; /* of a packet before the first */
    c->bad[0] = loss;
}

static void step(chain *c, double data) {
    for (uint32_t l = c->most + 1; l-- > 0;) {
        double good = c->good[l] * (1 - c->begin) + c->bad[l] * (1 - c->stay);
        double good_data = c->good_data[l] * (1 - c->begin) + c->bad_data[l] * (1 - c->stay);
        double bad = l ? c->good[l - 1] * c->begin + c->bad[l - 1] * c->stay : 0;
        double bad_data = l ? c->good_data[l - 1] * c->begin + c->bad_data[l - 1] * c->stay : 0;
        c->good[l] = good;
        c->good_data[l] = good_data;
        c->bad[l] = bad;
        c->bad_data[l] = bad_data + data * bad;
    }
    c->steps++;
}

static void data_steps(chain *c, uint32_t k) {
    while (c->steps < k)
        step(c, 1);
}

/* After k packets of data and m of parity. */
static double left(const chain *c, double loss, uint32_t k, uint32_t m) {
    double restored = 0;
    for (uint32_t l = 0; l <= m; l++)
        restored += c->good_data[l] + c->bad_data[l];
    double share = loss - restored / k;
    return share > 0 ? share : 0;
}

static double clean_loss(double loss) {
    return loss > NO_LOSS ? (loss < LOSS_MOST ? loss : LOSS_MOST) : 0;
}

/* Independent losses have runs of 1 / (1 - loss). */
static double clean_burst(double burst, double loss) {
    double least = 1 / (1 - loss);
    return burst > least ? (burst < BURST_MOST ? burst : fmax(BURST_MOST, least)) : least;
}

double lc_recovery_left(double loss, double burst, uint32_t k, uint32_t m, uint32_t sets) {
    loss = clean_loss(loss);
    if (!k || m > LC_ROWS_MOST)
        return loss;
    chain c;
    start(&c, loss, clean_burst(burst, loss), sets, m);
    data_steps(&c, k);
    while (c.steps < k + m)
        step(&c, 0);
    return left(&c, loss, k, m);
}

/* ---- what means cost ---- */

typedef struct {
    lc_recovery recovery;
    double bytes; /* beyond the data, as a share of it */
    int enough;
} candidate;

enum { CANDIDATES = LC_SIZES * 64 };

typedef struct {
    const lc_recovery_ask *ask;
    double loss, burst, wanted, wire, cap;
    uint32_t n, rounds_least, rounds_most;
    uint32_t count;
    candidate found[CANDIDATES];
} search;

static int is_enough(const search *s, const candidate *c, double remains, uint32_t rounds) {
    int nothing = !c->recovery.code && !rounds;
    return remains <= s->wanted * (nothing ? NEARLY : 1);
}

/* Rounds after a code that leaves so much: as few as are enough. */
static void add_rounds(const search *s, candidate *c, double remains) {
    const lc_recovery_ask *ask = s->ask;
    double seconds = 0, bytes = 0;
    uint32_t rounds = 0;
    while (rounds < s->rounds_least ||
           (rounds < s->rounds_most && !is_enough(s, c, remains, rounds))) {
        double any =
            -expm1(s->n * log1p(-remains)); /* that anything is missing before this round */
        seconds += (rounds ? 0 : ask->rtt_s / 2) + any * (ask->rtt_s + ask->reorder_s);
        seconds += s->wire * remains;
        bytes += remains;
        remains *= s->loss;
        rounds++;
    }
    c->recovery.rounds = (uint8_t)rounds;
    c->recovery.expected = remains;
    c->recovery.seconds += seconds;
    c->bytes += bytes;
    c->enough = is_enough(s, c, remains, rounds);
}

/* Row 0 is an XOR, which costs nothing to speak of; other rows are made while packets travel. */
static candidate measure(const search *s, uint16_t code, double remains) {
    lc_shape shape = lc_shape_of(code, s->n);
    double share = (double)shape.parity / s->n, rows = shape.m > 1 ? shape.m - 1 : 0;
    double bytes = (double)s->n * s->ask->packet_bytes;
    double arithmetic = s->ask->row_rate > 0 ? rows * bytes / s->ask->row_rate : 0;
    double beside = s->wire * (1 + share);
    candidate c = {.recovery = {.code = code}, .bytes = share};
    c.recovery.seconds = s->wire * share + (arithmetic > beside ? arithmetic - beside : 0);
    add_rounds(s, &c, remains);
    return c;
}

/* What one code leaves for a stream of n packets. */
static double left_by(const search *s, uint16_t code) {
    if (!code)
        return s->loss;
    lc_shape shape = lc_shape_of(code, s->n);
    uint32_t columns = lc_shape_columns(&shape, 0);
    return lc_recovery_left(s->loss, s->burst, columns, shape.m, shape.each);
}

/* Sets no larger than the stream, but for the next size. */
static int suits(uint32_t k, uint32_t n) {
    uint32_t i = 0;
    while (lc_code_size(i) < n && i < LC_SIZES - 1)
        i++;
    return k <= lc_code_size(i);
}

static int allowed(const search *s, uint32_t parity) {
    return parity <= s->cap * s->n * (1 + 1e-9);
}

/* All codes with sets of k, in the order of their rows, until one is enough without a round. */
static void try_size(search *s, uint32_t k) {
    lc_shape one = lc_shape_of(lc_code(k, 1), s->n);
    uint32_t columns = lc_shape_columns(&one, 0), most = 0;
    for (uint32_t m = 1; lc_code(k, m) && allowed(s, one.sets * m); m = lc_code_rows_up(m + 1)) {
        most = m;
        if (m == LC_ROWS_MOST)
            break;
    }
    if (!most)
        return;
    chain c;
    start(&c, s->loss, s->burst, one.each, most);
    data_steps(&c, columns);
    for (uint32_t m = 1; m <= most && s->count < CANDIDATES; m = lc_code_rows_up(m + 1)) {
        while (c.steps < columns + m)
            step(&c, 0);
        double remains = left(&c, s->loss, columns, m);
        candidate found = measure(s, lc_code(k, m), remains);
        if (found.enough || s->loss - remains >= WORTH * one.sets * m / s->n)
            s->found[s->count++] = found;
        if ((found.enough && found.recovery.rounds == s->rounds_least) || m == most)
            return;
    }
}

static void try_all(search *s) {
    if (!(s->ask->choose & LC_CHOOSE_PARITY)) {
        uint16_t code = lc_code_fitted(s->ask->code, s->n);
        s->found[s->count++] = measure(s, code, left_by(s, code));
        return;
    }
    s->found[s->count++] = measure(s, 0, s->loss);
    if (s->found[0].enough && !s->found[0].recovery.rounds)
        return; /* nothing is quicker than nothing */
    for (uint32_t i = 0; i < LC_SIZES; i++)
        if (suits(lc_code_size(i), s->n))
            try_size(s, lc_code_size(i));
}

/* ---- the choice ---- */

/* The quickest of those that are enough, or of few bytes if that makes little difference; if none
 * is enough, that which leaves the least, in the same way. */
static const candidate *best_of(const search *s) {
    const candidate *best = NULL;
    double least = INFINITY;
    int enough = 0;
    for (uint32_t i = 0; i < s->count; i++)
        enough |= s->found[i].enough;
    for (uint32_t i = 0; i < s->count; i++) {
        const candidate *c = &s->found[i];
        double cost = enough ? c->recovery.seconds : c->recovery.expected;
        if (c->enough == enough && cost < least)
            least = cost;
    }
    double most = enough ? least + SAME_TIME * (s->wire + s->ask->rtt_s / 2) : least * NEARLY;
    for (uint32_t i = 0; i < s->count; i++) {
        const candidate *c = &s->found[i];
        double cost = enough ? c->recovery.seconds : c->recovery.expected;
        if (c->enough == enough && cost <= most && (!best || c->bytes < best->bytes))
            best = c;
    }
    return best;
}

/* Whether the means chosen before may be chosen for this stream, and which they are now. */
static int again(search *s, candidate *found) {
    const lc_recovery *last = &s->ask->last;
    if (!s->ask->has_last || !lc_code_valid(last->code))
        return 0;
    int may =
        s->ask->choose & LC_CHOOSE_PARITY
            ? suits(lc_code_k(last->code), s->n) && allowed(s, lc_shape_of(last->code, s->n).parity)
            : last->code == lc_code_fitted(s->ask->code, s->n);
    if (!may || last->rounds < s->rounds_least || last->rounds > s->rounds_most)
        return 0;
    uint32_t least = s->rounds_least, most = s->rounds_most;
    s->rounds_least = s->rounds_most = last->rounds;
    *found = measure(s, last->code, left_by(s, last->code));
    s->rounds_least = least;
    s->rounds_most = most;
    return found->recovery.expected >= s->wanted * KEEP_LEAST &&
           found->recovery.expected <= s->wanted * KEEP_MOST;
}

static double cap_of(double loss, uint8_t most) {
    double needed = fmax(0.5, 2.2 * loss / (1 - loss));
    return fmin(most / 64.0, needed);
}

lc_recovery lc_recovery_choose(const lc_recovery_ask *ask) {
    search s;
    s.ask = ask;
    s.count = 0;
    s.n = ask->packets;
    s.loss = clean_loss(ask->loss);
    s.burst = clean_burst(ask->burst, s.loss);
    s.wanted = fmax(ask->max_missing < 0 ? s.loss / 10 : ask->max_missing, NOTHING);
    s.wire = ask->rate > 0 ? (double)s.n * ask->packet_bytes / ask->rate : 0;
    s.cap = cap_of(s.loss, ask->most);
    s.rounds_least = ask->choose & LC_CHOOSE_ROUNDS ? 0 : ask->rounds;
    s.rounds_most = ask->choose & LC_CHOOSE_ROUNDS ? LC_RECOVERY_ROUNDS : ask->rounds;
    if (!s.n)
        return (lc_recovery){.rounds = (uint8_t)s.rounds_least};
    try_all(&s);
    const candidate *best = best_of(&s);
    candidate same;
    if (again(&s, &same) && same.recovery.seconds <= best->recovery.seconds * KEEP_TIME +
                                                         SAME_TIME * (s.wire + ask->rtt_s / 2))
        return same.recovery;
    return best->recovery;
}

/* ---- choices that are kept ---- */

/* Rates swing as a path is probed, and a choice takes time. */
static int near(double a, double b, double share) {
    return fabs(a - b) <= share * fmin(fabs(a), fabs(b));
}

static int same_stream(const lc_recovery_ask *a, const lc_recovery_ask *b) {
    return a->packets == b->packets && a->packet_bytes == b->packet_bytes &&
           a->max_missing == b->max_missing && a->choose == b->choose && a->rounds == b->rounds &&
           a->code == b->code && a->most == b->most;
}

lc_recovery lc_recovery_recall(lc_recovery_memo *memo, const lc_recovery_ask *ask) {
    uint32_t at = (ask->packets * 2654435761u >> 16) % LC_RECOVERY_KEPT;
    lc_recovery_ask *kept = &memo->asks[at], now = *ask;
    now.has_last = same_stream(kept, ask);
    if (now.has_last && near(clean_loss(kept->loss), clean_loss(ask->loss), 0.1) &&
        near(kept->burst, ask->burst, 0.25) && near(kept->rtt_s, ask->rtt_s, 1) &&
        near(kept->reorder_s, ask->reorder_s, 1) && near(kept->rate, ask->rate, 1) &&
        near(kept->row_rate, ask->row_rate, 1))
        return memo->recoveries[at];
    now.last = memo->recoveries[at];
    *kept = now;
    return memo->recoveries[at] = lc_recovery_choose(&now);
}
