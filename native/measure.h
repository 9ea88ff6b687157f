/* What acknowledgements tell of the path to a peer: its round trip, the queue on the way there, and
 * how fast packets come out of it. docs/congestion.md says how each is measured. */
#ifndef LC_MEASURE_H
#define LC_MEASURE_H

#include <stdint.h>

/* What threads and clocks blur: delays that are shorter aren't taken for a queue. */
enum { LC_NOISE_NS = 1000000 };

/* The least of this and the last epoch. */
typedef struct {
    int64_t now, before;
    uint64_t began_ns;
    int known;
} lc_least;

/* What an acknowledgement tells. Clocks are in microseconds and wrap; the peer's has any offset. */
typedef struct {
    uint64_t now;
    uint64_t rtt_ns;     /* 0: it carries no echo, and the clocks say nothing either */
    uint64_t elapsed_ns; /* since the packet was sent: with the time that threads took to look */
    uint32_t sent_us;    /* the sender's clock in the latest packet that the peer has seen */
    uint32_t arrived_us; /* the peer's clock when it came */
    uint32_t moved;      /* packets that the peer has newly seen, or seen to be missing */
    uint32_t taken;      /* of them, those that came */
} lc_measure_ack;

typedef struct {
    uint64_t rtt_ns; /* smoothed; 0: unknown */
    lc_least rtt;    /* round trip, ns */
    lc_least way; /* one-way delay against the first one, us: offset and drift of clocks cancel */
    uint32_t way_first_us;
    uint32_t strange; /* acknowledgements in a row whose clocks make no sense */
    double hold_s;    /* what threads add to a round trip; the path's own share is in rtt and way */
    int bursts;       /* the peer sends bursts: what waits behind one is no part of that, */
    int64_t back_ns;  /* beyond what stood before the peer's port in the last round, */
    int64_t least_back_ns; /* and in this one */
    uint64_t lowest_ns;    /* when the queue was last seen empty */
    int watched;           /* the least delays are also taken on their own */
    lc_least watched_way, watched_rtt;
    /* the present train of packets */
    uint32_t train_us, train_taken; /* where it began */
    uint32_t last_us;               /* the latest arrival in it */
    int in_train;
} lc_measure;

/* Takes the delays in. Returns the queue that the packet met, ns. Only with an echo. */
int64_t lc_measure_sample(lc_measure *path, const lc_measure_ack *ack);
/* Packets/s along a train that ends with this acknowledgement; 0: none does. rate: what is known of
 * it, 0 if nothing is. window: packets that may be in flight. */
double lc_measure_rate(lc_measure *path, const lc_measure_ack *ack, double rate, double window);
/* The least round trip. */
int64_t lc_measure_rtt_ns(const lc_measure *path);
double lc_measure_rtt_s(const lc_measure *path);
/* The least one-way delay, against the first one. */
int64_t lc_measure_way_ns(const lc_measure *path);
/* From sending to hearing of it, without any queue, s. */
double lc_measure_loop_s(const lc_measure *path);
/* A round of packets ends. bursts: nothing paces what the two ends send. A window that covered the
 * peer's bursts would send as large ones, which the peer's would cover. */
void lc_measure_round(lc_measure *path, int bursts);
/* The path is another: its delays are measured from here on. */
void lc_measure_forget(lc_measure *path);
/* From here on it is watched, without the queue of those who share it. */
void lc_measure_watch(lc_measure *path);
/* What was seen since is the path now. Returns 0 if nothing was; *longer_ns: by how much it has
 * grown. */
int lc_measure_watched(lc_measure *path, uint64_t now, int64_t *longer_ns);

#endif
