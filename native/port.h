/* How fast a host sends by one interface, all paths together.
 *
 * All that leaves crosses the host's own uplink, so it is paced as one flow. The law has no socket
 * and no clock; docs/congestion.md derives it. */
#ifndef LC_PORT_H
#define LC_PORT_H

#include "overrun.h"

/* What an acknowledgement of one path tells of the port. */
typedef struct {
    uint64_t now;
    uint64_t sent_ns; /* when its latest packet was sent; 0: unknown */
    uint64_t rtt_ns;  /* least round trip of the path; 0: unknown */
    int64_t queue_ns; /* queue that its latest packet met; -1: unknown */
    double moved;     /* bytes that the peer has seen or missed, */
    double taken;     /* and those that came; late ones count when they come */
    double packet;    /* bytes of one */
    double burst;     /* packets that the path loses in a row, on average */
    double sent;      /* bytes that left since the acknowledgement before, */
    int held;         /* and whether packets waited for this law */
} lc_port_ack;

/* What others go on with. */
typedef struct {
    double allowed, rate, start, aim_most, cap, cap_found, cap_lost, usual; /* as below */
    double trial, patience, renewed, rtt_ns, low_ns;
} lc_port_known;

enum { LC_PORT_KNOWN_WORDS = sizeof(lc_port_known) / sizeof(double) };

typedef struct {
    double allowed;   /* bytes/s that may be sent; 0: no bound */
    double rate;      /* bytes/s that the uplink carries; 0: unknown */
    double start;     /* bytes of a round trip while it is unknown */
    double aim_most;  /* s of queue that the uplink has room for; 0: not met */
    double cap;       /* bytes/s beyond which packets are lost without a queue; 0: none known */
    double cap_found; /* the latest that a test has found, */
    uint32_t sure;    /* and how often the one before was about the same */
    double cap_lost;  /* share that was lost at any rate then, as far as was known */
    double tested;    /* bytes/s before the latest test of an overrun */
    lc_overrun overrun;
    uint32_t idle;            /* epochs in a row that were held back and met no queue */
    uint32_t patience;        /* of those before more is tried */
    double trial;             /* share by which the next trial exceeds the rate */
    double tried_from;        /* the rate before more was tried; 0: nothing is being tried */
    uint32_t tried;           /* epochs since, */
    uint64_t tried_ns;        /* when that began */
    uint64_t tried_to_ns;     /* and ended, */
    double tried_sent;        /* the rate at which packets left by then, */
    double tried_found;       /* and the share that it has found so far */
    uint32_t cuts;            /* epochs in a row in which much less was sent, for the queue, */
    double cut_from, shrinks; /* the queue before, and by how much it should be shorter */
    uint32_t others;    /* ranks that have told the rate of a host with which it shares its way */
    uint32_t evened;    /* epochs in which the rate may be more than was found, for them */
    double others_rate; /* bytes/s, on average; both until an epoch ends */
    uint32_t renewed;   /* times that the least delays of all paths turned out to be of the past */
    /* this epoch */
    uint64_t epoch_ns, heard_ns, rtt_ns;
    double packets;      /* that peers have seen or missed: */
    double moved, taken; /* bytes, */
    double sent;         /* and those that left, */
    double spilled;      /* and those that were lost while a queue stood */
    double sent_before;  /* bytes/s, in the last epoch */
    int began;           /* nothing was sent before it */
    int rests;           /* less was sent than might be */
    uint64_t told_ns;    /* when the latest packet was sent that is known to have come */
    int held;            /* packets waited for this law, */
    int held_before;     /* as in the last epoch */
    int64_t least_queue_ns, most_queue_ns;
    double shed_from; /* the rate before so much was lost at once; 0: it wasn't */
    uint32_t sudden;  /* epochs in a row that lost much more than usual */
    double lost;      /* share, in the last epoch */
    int fresh;        /* the rate is that of a start's end */
    int64_t low_ns;  /* the queue of the latest packets, of whatever path: the least, which grows by
                        a second in a second at most */
    int64_t peak_ns; /* the most that it was in this epoch */
    uint64_t low_at_ns, high_ns; /* and when it was last too short to end a start, */
    double high_taken;           /* and bytes that have come since */
} lc_port;

void lc_port_init(lc_port *port, uint64_t now);
/* So many paths leave by it from now on. */
void lc_port_serves(lc_port *port, uint16_t n_paths);
void lc_port_acked(lc_port *port, const lc_port_ack *ack);
/* The same where it has one path, whose own law sends at `rate` (bytes/s): it is only bounded.
 * Returns whether a test of its loss has held that law back for nothing. */
int lc_port_bound(lc_port *port, const lc_port_ack *ack, double rate);
/* Bytes/s below which it never goes. */
double lc_port_least(const lc_port *port);
lc_port_known lc_port_tell(const lc_port *port);
/* Goes on with what another has found. */
void lc_port_resume(lc_port *port, const lc_port_known *known, uint64_t now);

#endif
