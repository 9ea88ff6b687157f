/* How much one sender may have under way to one peer, and how fast it goes out.
 *
 * The peer's window keeps its socket buffer from overflowing. This law keeps the path busy and its
 * queue short, and needs no setting; docs/congestion.md derives it. Loss by itself is not
 * congestion: what speaks for that is a queue that stands, or a rate of delivery that does not
 * follow the rate of sending. */
#ifndef LC_PACE_H
#define LC_PACE_H

#include "measure.h"
#include "rate.h"

enum { LC_PACE_ROUNDS = 8 };

typedef struct {
    int same_host; /* no network lies between: the peer's window is enough */
    lc_measure measure;
    double rate;                   /* packets/s delivered: the most of the last rounds */
    double loss;                   /* share: the least of the last rounds */
    double rates[LC_PACE_ROUNDS];  /* of the last rounds in which sending was held back */
    double losses[LC_PACE_ROUNDS]; /* of the same rounds */
    uint32_t n_rounds;             /* so far, in both */
    /* the law */
    double window; /* packets */
    double packet_bytes;
    int cruising;         /* the path's rate has been found */
    uint32_t flat_rounds; /* rounds of a start that delivered no more than the one before */
    int alone;            /* no other path leaves by its interface */
    uint64_t high_ns;     /* since when the queue is too long for a start; 0: it is not */
    uint32_t high_us;     /* the same by the peer's clock */
    uint32_t idle_rounds; /* rounds in a row with hardly any queue */
    uint32_t patience;    /* rounds of that before more is tried */
    double tried_from;    /* the rate before more was tried; 0: nothing is being tried */
    double trial;         /* times which it is */
    uint32_t trial_rounds;
    uint32_t rounds; /* of cruising */
    int calm; /* this round sends no more than was delivered, to see whether that is lost too */
    uint32_t high_rounds; /* in a row with a queue of several times what is aimed at */
    double window_before; /* the window when that began */
    uint64_t dip_ns;   /* until when the window is low, to see the path without this flow's queue */
    uint64_t clock_ns; /* what makes `now` a clock that all senders of the path share */
    /* a buffer shorter than the aim */
    double modest;              /* share of the aim that it has room for */
    double few_lost, few_moved; /* packets of the last rounds, of which the latest count most */
    double base_loss;           /* what is lost however modest this sender is */
    double modest_from;         /* before less was tried; 0: that is not being tried */
    double loss_from;
    uint32_t modest_rounds; /* since less was tried */
    /* beside TCP, which fills the queue */
    double rival_window;  /* packets that TCP would have in flight; 0: there is none */
    int64_t rival_way_ns; /* the least way without its queue, */
    int64_t rival_rtt_ns; /* and the least round trip */
    uint32_t rival_dips;  /* since those were taken; 0: they aren't known */
    uint32_t rival_seen;  /* dips in which its queue was seen, less those in which it wasn't */
    /* after a pause */
    uint64_t heard_ns; /* when an acknowledgement last came */
    /* beside other paths of this host */
    double share; /* of the rate that may be used until the next acknowledgement; above 1: so much
                     more others have */
    double least_share, most_share;   /* in this round, */
    double least_before, most_before; /* and in the one before, in which its samples were sent */
    uint32_t untold;  /* rounds in a row of which they don't tell what the rate is */
    double far_tries; /* trials that may send FAR_TRIAL times as much */
    /* beside a port that is paced */
    int by_port; /* that paces it: this law only bounds what is in flight, for what lies beyond */
    int64_t common_ns; /* queue that all paths of the port meet, */
    int64_t queue_ns;  /* that the latest packet met */
    uint32_t renewed;  /* lc_port.renewed when its least delays were last forgotten */
    /* this round */
    uint64_t round_ns; /* when it began */
    int64_t least_queue_ns;
    double best_rate; /* of the samples in it */
    uint32_t moved, taken;
    int limited; /* sending was held back by this law */
    lc_rate gate;
} lc_pace;

/* The rate is looked for from here on: a test had held the search back. */
void lc_pace_start(lc_pace *pace);
/* clock_ns: what `now` lacks to the time of day, in which all senders look for the empty path at
 * the same moments. */
void lc_pace_init(lc_pace *pace, uint64_t now, uint64_t clock_ns, uint32_t packet_bytes);
/* Seconds of queue that a flow of such a rate aims at, alone in it. */
double lc_pace_aim_s(double bytes_per_s);
/* Packets that may be in flight. peer_window is what the peer's socket buffer holds; what is under
 * way on a long path is not in that buffer. */
uint32_t lc_pace_window(const lc_pace *pace, uint32_t peer_window);
/* Packets have so many bytes, on average, from now on. Calls differ in that, and a link carries
 * bytes. */
void lc_pace_sized(lc_pace *pace, double packet_bytes);
/* Packets of packet_bytes that may go now; at most want. */
uint32_t lc_pace_room(const lc_pace *pace, uint64_t now, uint32_t want, uint32_t packet_bytes);
/* So many packets go now. */
void lc_pace_spend(lc_pace *pace, uint64_t now, uint32_t packets, uint32_t packet_bytes);
/* Whether nothing has been heard for a round trip: with nothing in flight, what goes now begins
 * anew. */
int lc_pace_rests(const lc_pace *pace, uint64_t now);
/* Begins anew, beside others of this host: at such a share (at most 1) of the rate until something
 * is heard, and with such a share of the window. */
void lc_pace_begin(lc_pace *pace, uint64_t now, double share);
/* Nanoseconds until a packet may go; 0: now. */
uint64_t lc_pace_delay(const lc_pace *pace, uint64_t now, uint32_t packet_bytes);
/* There is something to send, and the law holds it back. */
void lc_pace_limited(lc_pace *pace);
/* common_ns: queue that isn't for this law, since all paths of the port meet it.
 * share: of its rate that it may go on with beside others of this host; above 1 if they have more.
 */
void lc_pace_acked(lc_pace *pace, const lc_measure_ack *ack, double share, int64_t common_ns);
/* Bytes/s that it sends at; 0 while it isn't known what the path delivers. */
double lc_pace_rate(const lc_pace *pace);
/* The standing queue of the present round, ns; 0 while it is not known. */
uint64_t lc_pace_queue(const lc_pace *pace);
/* How long to wait for an answer before asking again. */
uint64_t lc_pace_rto(const lc_pace *pace);

#endif
