#include "loss.h"

#include <math.h>

/* How many packets the loss is averaged over. The long average is the estimate; the short one only
 * says that loss has begun, when it is above the long one by more than chance. */
static const double LONG = 8192, SHORT = 1024;
/* Packets that must be lost before their share is believed, of so many sent at least. Of fewer, it
 * is of more: the first one lost isn't the measure of all. */
static const double SURE = 8, SURE_SENT = 128, UNSURE_SENT = 256;
static const int32_t MOST_AT_ONCE = 1 << 20; /* packets of one acknowledgement */

/* ---- the receiver ---- */

static uint64_t bits(uint32_t from, uint32_t to) {
    uint64_t below = to < LC_GAP_BITS ? (1ull << to) - 1 : UINT64_MAX;
    return from < LC_GAP_BITS ? below & (UINT64_MAX << from) : 0;
}

void lc_runs_missed(lc_runs *runs, uint32_t first, uint32_t next) {
    lc_gap *gap = &runs->gaps[runs->latest];
    if (gap->missing && gap->next == first) {
        gap->missing |= bits(first - gap->first, next - gap->first);
        gap->next = next;
        return;
    }
    runs->count++;
    runs->latest = (runs->latest + 1) % LC_GAPS;
    runs->gaps[runs->latest] = (lc_gap){first, next, bits(0, next - first)};
}

void lc_runs_came(lc_runs *runs, uint32_t number) {
    for (int i = 0; i < LC_GAPS; i++) {
        lc_gap *gap = &runs->gaps[i];
        uint32_t at = number - gap->first;
        if (at >= LC_GAP_BITS || gap->next - gap->first > LC_GAP_BITS || !(gap->missing >> at & 1))
            continue;
        gap->missing &= ~(1ull << at);
        runs->count -= !gap->missing;
        return;
    }
}

/* ---- the sender ---- */

static void fade(double *sum, double window, double sent, double more) {
    double keep = sent < window ? 1 - sent / window : 0;
    *sum = *sum * keep + more;
}

void lc_loss_told(lc_loss *loss, uint32_t sent, uint32_t taken, uint32_t runs) {
    int32_t passed = (int32_t)sent, gone = (int32_t)(sent - taken), more = (int32_t)runs;
    if (passed < 0 || passed > MOST_AT_ONCE || gone > MOST_AT_ONCE || gone < -MOST_AT_ONCE ||
        more > MOST_AT_ONCE || more < -MOST_AT_ONCE)
        return; /* numbers that make no sense */
    fade(&loss->sent, LONG, sent, sent);
    fade(&loss->lost, LONG, sent, gone);
    fade(&loss->runs, LONG, sent, more);
    fade(&loss->soon_sent, SHORT, sent, sent);
    fade(&loss->soon_lost, SHORT, sent, gone);
}

static double share(double lost, double sent) {
    return lost > 0 ? lost / fmax(sent, lost < SURE ? UNSURE_SENT : SURE_SENT) : 0;
}

double lc_loss_share(const lc_loss *loss) {
    double late = share(loss->lost, loss->sent);
    double soon = share(loss->soon_lost, loss->soon_sent);
    /* Runs of b packets make a count vary 2 b times as much as single losses. */
    double sure = soon - 2 * sqrt(soon * 2 * lc_loss_burst(loss) / fmax(loss->soon_sent, 1));
    return fmin(sure > late ? sure : late, 1);
}

double lc_loss_burst(const lc_loss *loss) {
    if (loss->runs <= 0 || loss->lost <= loss->runs)
        return 1;
    double mean = loss->lost / loss->runs;
    return mean < LC_BURST_MOST ? mean : LC_BURST_MOST;
}
