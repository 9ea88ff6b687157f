/* How much one sender may have under way to one peer.
 *
 * The peer's window keeps its socket buffer from overflowing; this congestion window keeps the path
 * from filling without bound (RFC 8085, section 3.1). It grows while the round-trip time stays near
 * its least, and shrinks when a standing queue builds up, or when more is lost than the tolerance.
 * Loss below the tolerance is not congestion. */
#ifndef LC_PACE_H
#define LC_PACE_H

#include <stdint.h>

typedef struct {
    double window;         /* packets */
    uint64_t rtt_ns;       /* smoothed; 0: unknown */
    uint64_t rtt_min_ns;   /* least of this and the last epoch */
    uint64_t epoch_min_ns; /* least of this epoch */
    uint64_t epoch_ns;     /* when this epoch began */
    uint64_t changed_ns;   /* when the window was last cut */
    uint32_t acked, lost;  /* since the window was last judged */
} lc_pace;

void lc_pace_init(lc_pace *pace, uint64_t now);
/* Packets that may be in flight, given the peer's own window. */
uint32_t lc_pace_window(const lc_pace *pace, uint32_t peer_window);
/* An acknowledgement: rtt_ns 0 when it carries no echo. */
void lc_pace_acked(lc_pace *pace, uint64_t now, uint64_t rtt_ns, uint32_t acked, uint32_t lost);
/* How long to wait for an answer before asking again. */
uint64_t lc_pace_rto(const lc_pace *pace);

/* A fixed rate for all that a rank sends. */
typedef struct {
    double bytes_per_s; /* 0: none */
    double tokens;      /* bytes that may go now */
    uint64_t filled_ns; /* when tokens were last added */
} lc_rate;

void lc_rate_init(lc_rate *rate, double bytes_per_s, uint64_t now);
/* Packets of packet_bytes that may go now; at most want. */
uint32_t lc_rate_take(lc_rate *rate, uint64_t now, uint32_t want, uint32_t packet_bytes);
/* Nanoseconds until one packet may go; 0: now. */
uint64_t lc_rate_delay(const lc_rate *rate, uint64_t now, uint32_t packet_bytes);

#endif
