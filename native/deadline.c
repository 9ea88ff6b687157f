#include "deadline.h"

#include <string.h>

enum { SAMPLES_NEEDED = 8, QUANTILE_PERCENT = 95, MARGIN = 4 };

void lc_deadline_add(lc_deadline *d, uint64_t duration_ns, uint64_t gap_ns, uint32_t n_packets) {
    uint32_t i = d->n++ % LC_DEADLINE_SAMPLES;
    d->per_packet_ns[i] = n_packets ? duration_ns / n_packets : 0;
    d->gap_ns[i] = gap_ns;
    d->fresh = 0;
}

static uint64_t quantile(const uint64_t *samples, uint32_t n) {
    uint64_t sorted[LC_DEADLINE_SAMPLES];
    memcpy(sorted, samples, n * sizeof *samples);
    for (uint32_t i = 1; i < n; i++) {
        uint64_t v = sorted[i];
        uint32_t j = i;
        for (; j > 0 && sorted[j - 1] > v; j--)
            sorted[j] = sorted[j - 1];
        sorted[j] = v;
    }
    return sorted[(n - 1) * QUANTILE_PERCENT / 100];
}

static void refresh(lc_deadline *d) {
    if (d->fresh)
        return;
    uint32_t n = d->n < LC_DEADLINE_SAMPLES ? d->n : LC_DEADLINE_SAMPLES;
    d->per_packet_q = quantile(d->per_packet_ns, n);
    d->gap_q = quantile(d->gap_ns, n);
    d->fresh = 1;
}

uint64_t lc_deadline_silence(lc_deadline *d, uint64_t gap_ns) {
    if (d->n)
        refresh(d);
    return MARGIN * (d->gap_q > gap_ns ? d->gap_q : gap_ns);
}

uint64_t lc_deadline_of(lc_deadline *d, uint32_t n_packets, uint64_t floor_ns,
                        uint64_t ceiling_ns) {
    if (d->n < SAMPLES_NEEDED)
        return ceiling_ns;
    refresh(d);
    uint64_t t = MARGIN * (n_packets * d->per_packet_q + d->gap_q);
    if (t < floor_ns)
        t = floor_ns;
    return t < ceiling_ns ? t : ceiling_ns;
}
