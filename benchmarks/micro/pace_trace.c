/* The control law over time on simulated paths, as CSV: benchmarks/micro/congestion.py draws it. */
#include "pace_sim.h"

#include <stdio.h>

static const double STEP_S = 0.1;

static sim_flow *flow(sim *s, int i, double rtt_ms, double loss, double begin_s) {
    sim_flow *f = &s->flows[i];
    f->way_ns = (uint64_t)(rtt_ms * 0.5e6);
    f->loss = loss;
    f->begin_ns = s->now + (uint64_t)(begin_s * 1e9);
    return f;
}

/* One line for each flow and step: scenario, time, flow, Mbit/s delivered, queue in ms, share lost
 * to the queue and at random. */
static void trace(const char *name, sim *s, double from_s, double to_s) {
    for (double t = from_s; t < to_s; t += STEP_S) {
        sim_count_anew(s);
        sim_run(s, STEP_S);
        for (int i = 0; i < s->n; i++) {
            const sim_flow *f = &s->flows[i];
            double sent = (double)(f->delivered + f->lost_queue + f->lost_random);
            printf("%s,%.2f,%s%d,%.3f,%.3f,%.5f,%.5f\n", name, t + STEP_S,
                   f->tcp ? "TCP " : "flow ", i + 1,
                   (double)f->delivered * SIM_PACKET * 8e-6 / STEP_S, sim_queue_ms(s),
                   sent > 0 ? (double)f->lost_queue / sent : 0,
                   sent > 0 ? (double)f->lost_random / sent : 0);
        }
    }
}

int main(void) {
    sim *s = sim_new(1e9, 0.05, 1);
    flow(s, 0, 80, 0.05, 0)->burst = 8;
    trace("1 Gbit/s; 80 ms; 5% lost in bursts of 8", s, 0, 6);
    sim_free(s);

    s = sim_new(1e9, 0.002, 1);
    flow(s, 0, 20, 0.01, 0);
    trace("a buffer of 2 ms; 20 ms; 1% lost", s, 0, 6);
    sim_free(s);

    s = sim_new(1e9, 0.05, 2);
    flow(s, 0, 20, 0.01, 0);
    flow(s, 1, 20, 0.01, 3);
    trace("two flows; 20 ms; 1% lost", s, 0, 12);
    sim_free(s);

    s = sim_new(1e9, 0.02, 2);
    flow(s, 0, 20, 0, 0);
    flow(s, 1, 20, 0, 3)->law.kind = TCP_RENO;
    trace("beside TCP (Reno); 20 ms; a buffer of 20 ms", s, 0, 20);
    sim_free(s);

    s = sim_new(1e9, 0.05, 1);
    flow(s, 0, 8, 0.01, 0);
    trace("8 ms becomes 80 ms after 4 s; 1% lost", s, 0, 4);
    s->flows[0].way_ns *= 10;
    trace("8 ms becomes 80 ms after 4 s; 1% lost", s, 4, 16);
    sim_free(s);

    s = sim_new(1e9, 0.02, 7);
    for (int i = 0; i < 7; i++)
        flow(s, i, 1.5, 0, 0);
    trace("seven to one; 1.5 ms; a buffer of 20 ms", s, 0, 6);
    sim_free(s);
    return 0;
}
