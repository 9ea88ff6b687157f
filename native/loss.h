/* The loss of a path, as its two ends know it: the receiver counts the runs of packets that did not
 * come; the sender, who hears of them with each acknowledgement, keeps how much is lost of late and
 * how long a run is. */
#ifndef LC_LOSS_H
#define LC_LOSS_H

#include <stdint.h>

enum {
    LC_GAPS = 8,      /* runs that may still turn out to be packets out of order */
    LC_GAP_BITS = 64, /* packets of such a run; a longer one is lost */
    LC_BURST_MOST = 64
};

typedef struct {
    uint32_t first, next; /* packet numbers, the latter after the run */
    uint64_t missing;     /* of the first ones a bit each; 0: all have come after all */
} lc_gap;

/* At the receiver. */
typedef struct {
    uint32_t count; /* of runs, ever */
    uint32_t latest;
    lc_gap gaps[LC_GAPS]; /* a ring */
} lc_runs;

/* Numbers [first, next) were passed over: another run, unless the latest one ends there. */
void lc_runs_missed(lc_runs *runs, uint32_t first, uint32_t next);
/* A packet came after its successors. With the last one of a run there was no such run. */
void lc_runs_came(lc_runs *runs, uint32_t number);

/* At the sender: sums that fade with the packets that follow. */
typedef struct {
    double sent, lost, runs;
    double soon_sent, soon_lost; /* the same of the very last */
} lc_loss;

/* The peer has passed so many more packets, taken so many, and counted so many more runs. Packets
 * out of order are lost first and taken later, and so come to nothing in the end. Those that waited
 * for their operation may be taken first and lost later (there was no room, or injection drops
 * them): then more are gone than passed. */
void lc_loss_told(lc_loss *loss, uint32_t sent, uint32_t taken, uint32_t runs);
/* The share of packets that is believed to be lost now. */
double lc_loss_share(const lc_loss *loss);
/* The mean length of a run, 1 to LC_BURST_MOST. */
double lc_loss_burst(const lc_loss *loss);

#endif
