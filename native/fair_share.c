#include "fair_share.h"

#include <math.h>

static const uint64_t AGAIN_NS = 1000000u;
enum { STEPS = 8 };

static int sends(const lc_path *p, int begins) {
    return !p->pace.same_host && p->pace.rate > 0 && (p->outs || (begins && lc_units_flying(p)));
}

static double most_of(const lc_interface *via, int begins) {
    double most = 0;
    for (uint16_t i = 0; i < via->n_paths; i++)
        if (sends(via->paths[i], begins) && via->paths[i]->pace.rate > most)
            most = via->paths[i]->pace.rate;
    return most;
}

/* Packets/s beyond which no path goes, so that they send no more than `together`: those that can't
 * use their part leave it to the others. Each step finds more of them. */
static double level_of(const lc_interface *via, double together, int begins) {
    double level = INFINITY;
    for (int step = 0; step < STEPS; step++) {
        double below = 0;
        uint32_t above = 0;
        for (uint16_t i = 0; i < via->n_paths; i++) {
            const lc_path *p = via->paths[i];
            if (!sends(p, begins))
                continue;
            if (step > 0 && p->pace.rate < level)
                below += p->pace.rate;
            else
                above++;
        }
        if (!above)
            break;
        double next = (together - below) / above;
        if (next == level)
            break;
        level = next;
    }
    return level;
}

double lc_fair_share_to_begin(const lc_interface *via, const lc_path *p) {
    double together = lc_shared_rate_begin(&via->rate, most_of(via, 1));
    double level = level_of(via, together, 1);
    return level < p->pace.rate ? level / p->pace.rate : 1;
}

double lc_fair_share(lc_interface *via, const lc_path *p, uint64_t now) {
    if (p->pace.same_host)
        return 1;
    if (now - via->level_ns >= AGAIN_NS) {
        double together = lc_shared_rate_bound(&via->rate, most_of(via, 0));
        via->level = isinf(together) ? INFINITY : level_of(via, together, 0);
        via->level_ns = now;
    }
    return isinf(via->level) || p->pace.rate <= 0 ? 1 : via->level / p->pace.rate;
}
