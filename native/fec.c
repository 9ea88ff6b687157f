/* The loss that acknowledgements tell of, and the sets that it asks for. */
#include "fec.h"

#include <math.h>

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
double lc_fec_loss(const lc_fec_path *path) {
    double late = share(path->lost, path->sent, SHORT);
    double soon = share(path->soon_lost, path->soon_sent, SHORT);
    double sure = soon - 2 * sqrt(soon * BURSTS / SHORT);
    return sure > late ? sure : late;
}

/* The largest size of sets that is no larger than this, or the first that isn't below the least. */
static uint32_t size_below(double most, uint32_t least) {
    uint32_t i = 0;
    while (i + 1 < LC_SIZES && (lc_code_size(i) < least || lc_code_size(i + 1) <= most))
        i++;
    return lc_code_size(i);
}

uint32_t lc_fec_half(uint32_t size, uint32_t least) {
    return size ? size_below(size / 2.0, least) : 0;
}

uint32_t lc_fec_choose(lc_fec_path *path, uint32_t least) {
    double loss = lc_fec_loss(path);
    if (loss < NO_LOSS)
        return path->size = 0;
    double want = LOG_KEPT / loss;
    double have = path->size;
    if (have > 0 && have >= least && want < have * STEADY && have < want * STEADY)
        return path->size;
    return path->size = size_below(want, least);
}
