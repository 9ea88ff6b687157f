/* Whether aggregates vanish: strikes, a trial without them, and the verdict. */
#include "aggregates.h"

enum {
    ENOUGH = 16, /* packets of runs in a window */
    STRIKES = 3  /* windows. What a break of the path takes ends within one: acknowledgements come
                    between any two of them. */
};

static void begin(lc_aggregates *a) {
    a->is_open = a->strikes = a->large = 0;
}

/* Of which most went alone, a window shows nothing: what is missing may be any of them. Packets
 * sent before a window and taken in it count for it, which only delays. */
static int is_strike(const lc_aggregates *a, uint32_t passed, uint32_t taken) {
    return passed - a->singles >= a->singles && taken <= a->singles;
}

static int judge_trial(lc_aggregates *a, uint32_t passed, uint32_t taken) {
    a->mode = 2 * taken > passed ? LC_SINGLE : LC_TOGETHER;
    a->news = a->mode == LC_SINGLE;
    begin(a);
    return a->mode == LC_TOGETHER;
}

static int judge(lc_aggregates *a, uint32_t passed, uint32_t taken) {
    if (is_strike(a, passed, taken))
        a->strikes += a->strikes < STRIKES;
    else if (taken > a->singles)
        begin(a);
    if (a->strikes < STRIKES || !a->large)
        return 0;
    a->mode = LC_TRIED;
    begin(a);
    return 1;
}

int lc_aggregates_told(lc_aggregates *a, uint32_t acked, uint32_t received, uint32_t size) {
    if (a->size != size && a->mode != LC_SINGLE) {
        int tried = a->mode == LC_TRIED;
        a->mode = LC_TOGETHER;
        a->size = size;
        begin(a);
        return tried;
    }
    uint32_t passed = acked - a->from, taken = received - a->received;
    /* In a trial all of them go alone. */
    uint32_t enough = ENOUGH + (a->mode == LC_TRIED ? 0 : a->singles);
    if (!a->is_open || (int32_t)passed < 0 || passed < enough)
        return 0;
    a->is_open = 0;
    return a->mode == LC_TRIED ? judge_trial(a, passed, taken) : judge(a, passed, taken);
}
