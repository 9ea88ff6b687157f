/* Parity of packets, and the share of it that a measured loss asks for. */
#include "fec.h"

#include <math.h>
#include <string.h>

/* Packets that one parity packet protects, by code. lossycoll/plan/parity.py has the same table. */
static const uint16_t sizes[LC_FEC_CODES] = {0,  1,  2,   3,   4,   5,   6,   7,   8,   9,  10,
                                             12, 14, 16,  18,  20,  25,  30,  35,  40,  50, 60,
                                             70, 80, 100, 125, 150, 200, 250, 300, 400, 500};

/* How many packets the loss is averaged over. The long one is the estimate; the short one only says
 * that loss has begun, when it is above the long one by more than chance. */
static const double LONG = 8192, SHORT = 1024;
/* By how much more a count of losses varies that come in bursts of four. */
static const double BURSTS = 8;
/* Below this share there is no loss: one packet in the long average falls below it when as many
 * again have come. */
static const double NO_LOSS = 5e-5;
/* A packet comes back if the g others of its set (parity is one) do: (1 - p)^g = 0.9. */
static const double LOG_KEPT = 0.105;
/* The set size stays while what is wanted is within this factor of it: the estimate is noisy. */
static const double STEADY = 1.5;

uint32_t lc_fec_size(uint32_t code) {
    return code < LC_FEC_CODES ? sizes[code] : 0;
}

uint32_t lc_fec_parity(uint32_t code, uint32_t n) {
    uint32_t size = lc_fec_size(code);
    return size ? (uint32_t)(((uint64_t)n + size - 1) / size) : 0;
}

/* ---- parity ---- */

/* Eight bytes at a time, which the compiler makes wider; the vectors must not overlap. */
static void add_bytes(uint8_t *restrict into, const uint8_t *restrict from, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t a, b;
        memcpy(&a, into + i, 8);
        memcpy(&b, from + i, 8);
        a ^= b;
        memcpy(into + i, &a, 8);
    }
    for (; i < n; i++)
        into[i] ^= from[i];
}

int lc_parity_fits(const lc_parity *p, uint32_t code, uint32_t n) {
    return p->known ? code == p->code : lc_fec_parity(code, n) <= p->most;
}

void lc_parity_begin(lc_parity *p, uint8_t code, uint32_t n, uint32_t packet_bytes) {
    p->known = 1;
    p->code = code;
    p->sets = lc_fec_parity(code, n);
    for (uint32_t j = 0; j < p->sets; j++)
        p->left[j] = (uint16_t)((n - j - 1) / p->sets + 1);
    memset(p->sums, 0, (size_t)p->sets * packet_bytes);
}

void lc_parity_add(lc_parity *p, uint32_t set, const void *payload, uint32_t bytes,
                   uint32_t packet_bytes, uint16_t count) {
    add_bytes(p->sums + (size_t)set * packet_bytes, payload, bytes);
    p->counts[set] ^= count;
}

/* ---- how much of it ---- */

static void average(double *sent, double *lost, double window, double more, double gone) {
    double keep = more < window ? 1 - more / window : 0;
    *sent = *sent * keep + more;
    *lost = *lost * keep + gone;
}

/* Packets out of order are lost first and taken later, and so come to nothing in the end. */
void lc_fec_told(lc_fec_path *path, uint32_t sent, uint32_t taken) {
    int32_t gone = (int32_t)(sent - taken);
    if ((int32_t)sent < 0 || gone > (int32_t)sent)
        return; /* numbers that make no sense */
    average(&path->sent, &path->lost, LONG, sent, gone);
    average(&path->soon_sent, &path->soon_lost, SHORT, sent, gone);
}

static double share(double lost, double sent, double least) {
    return lost > 0 ? lost / (sent > least ? sent : least) : 0;
}

/* The loss that is believed. Of few packets hardly any is, or the first one lost would be all. */
static double loss_of(const lc_fec_path *path) {
    double late = share(path->lost, path->sent, SHORT);
    double soon = share(path->soon_lost, path->soon_sent, SHORT);
    double sure = soon - 2 * sqrt(soon * BURSTS / SHORT);
    return sure > late ? sure : late;
}

uint8_t lc_fec_half(uint8_t code, uint8_t most) {
    uint8_t half = most;
    while (half + 1 < code && 2 * sizes[half + 1] <= sizes[code])
        half++;
    return half < code ? half : code;
}

uint8_t lc_fec_choose(lc_fec_path *path, uint8_t most) {
    double loss = loss_of(path);
    if (loss < NO_LOSS)
        return path->code = 0;
    double want = LOG_KEPT / loss;
    double have = sizes[path->code];
    if (have > 0 && path->code >= most && want < have * STEADY && have < want * STEADY)
        return path->code;
    uint8_t code = most;
    while (code + 1 < LC_FEC_CODES && sizes[code + 1] <= want)
        code++;
    return path->code = code;
}
