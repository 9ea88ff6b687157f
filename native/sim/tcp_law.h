/* Congestion windows of TCP that lose to find their rate: Reno (RFC 5681) and CUBIC (RFC 9438). */
#ifndef LC_TCP_LAW_H
#define LC_TCP_LAW_H

#include <math.h>
#include <stdint.h>

enum { TCP_RENO = 1, TCP_CUBIC = 2 };
/* The receiver's window, in packets: without it a path that loses nothing is sent ever more. */
static const double TCP_WINDOW_MOST = 65536;

typedef struct {
    int kind;
    double cwnd, ssthresh; /* packets */
    double most, friendly; /* of CUBIC: at the last loss; what Reno would have */
    uint64_t cut_ns;       /* when it last shrank */
} tcp_law;

static inline tcp_law tcp_law_new(int kind) {
    return (tcp_law){.kind = kind, .cwnd = 10, .ssthresh = 1e9};
}

static inline void tcp_law_shrink(tcp_law *law, uint64_t now, double kept) {
    law->most = law->cwnd < law->most ? law->cwnd * (1 + kept) / 2 : law->cwnd;
    law->ssthresh = law->cwnd = law->friendly = law->cwnd * kept > 2 ? law->cwnd * kept : 2;
    law->cut_ns = now;
}

/* The window at t seconds since the cut, with the round trip. */
static inline void tcp_law_cubic(tcp_law *law, double t, double moved) {
    static const double SCALE = 0.4, KEPT = 0.7;
    double k = cbrt(law->most * (1 - KEPT) / SCALE);
    double want = law->most + SCALE * (t - k) * (t - k) * (t - k);
    law->friendly += 3 * (1 - KEPT) / (1 + KEPT) * moved / law->cwnd;
    want = want > law->friendly ? want : law->friendly;
    want = want < 1.5 * law->cwnd ? want : 1.5 * law->cwnd;
    if (want > law->cwnd)
        law->cwnd += (want - law->cwnd) * moved / law->cwnd;
}

/* `moved` packets are known to have come, or to be lost: `lost` of them. A window shrinks once in a
 * round trip. */
static inline void tcp_law_acked(tcp_law *law, uint64_t now, uint64_t rtt_ns, double moved,
                                 double lost) {
    if (lost > 0 && now - law->cut_ns > rtt_ns + 1000000)
        tcp_law_shrink(law, now, law->kind == TCP_CUBIC ? 0.7 : 0.5);
    else if (law->cwnd < law->ssthresh)
        law->cwnd += moved;
    else if (law->kind == TCP_CUBIC)
        tcp_law_cubic(law, 1e-9 * (double)(now - law->cut_ns + rtt_ns), moved);
    else
        law->cwnd += moved / law->cwnd;
    law->cwnd = law->cwnd < TCP_WINDOW_MOST ? law->cwnd : TCP_WINDOW_MOST;
}

#endif
