/* Inside the UDP link: what its files share. link_udp.c opens it and knows its peers,
 * link_udp_send.c and link_udp_receive.c move packets, link_udp_fast_paths.c is below all three. */
#ifndef LC_LINK_UDP_H
#define LC_LINK_UDP_H

#define _GNU_SOURCE
#include "forks.h"
#include "link.h"
#include "trouble.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef SCM_TIMESTAMPNS
#define SCM_TIMESTAMPNS SO_TIMESTAMPNS
#endif
#ifndef SO_RXQ_OVFL
#define SO_RXQ_OVFL 40
#endif

enum {
    LC_AGGREGATE_BYTES = 65536, /* the kernel never merges more than this */
    LC_UDP_CONTROL_BYTES = 128,
    LC_UDP_EVENTS = 16 /* kept for whoever asks; later ones are only counted */
};

/* The system calls that can fail while packets move. Tests give others. */
typedef struct {
    int (*sendmmsg)(int fd, struct mmsghdr *messages, unsigned n, int flags);
    ssize_t (*sendmsg)(int fd, const struct msghdr *message, int flags);
    int (*recvmmsg)(int fd, struct mmsghdr *messages, unsigned n, int flags, struct timespec *t);
    ssize_t (*recvmsg)(int fd, struct msghdr *message, int flags);
} lc_udp_calls;

typedef union {
    struct sockaddr any; /* sa_family 0: there is no such peer */
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} lc_udp_address;

typedef struct {
    lc_udp_address address;
    lc_backoff segment; /* segmentation offload on the way to it */
    int singly;         /* never, since what went as one didn't come */
    int error;          /* errno for which its packets are lost at present; 0: none */
} lc_udp_peer;

typedef struct {
    lc_link link;
    lc_owned socket;
    int family;
    uint32_t offered; /* lc_fast_path bits that the socket has and that are allowed */
    uint32_t active;  /* those in use now with every peer; read from any thread */
    uint16_t payload_bytes;
    int sizes;          /* what paths carry is looked for: that some is too large is no news */
    uint32_t n_peers;   /* entries of the table */
    uint32_t n_refused; /* those of them with whom segmentation offload is off */
    lc_udp_peer *peers;
    lc_udp_calls calls;
    lc_link_stats stats;
    lc_event events[LC_UDP_EVENTS]; /* a ring */
    uint32_t events_in, events_out;
    /* the socket as a whole has failed */
    lc_trouble failing;
    lc_udp_address here; /* what the socket is bound to */
    uint64_t source_ns;  /* when that was last looked for */
    int source_gone;
    lc_backoff batching; /* sendmmsg and recvmmsg */
    /* receiving */
    uint32_t overflow_seen;  /* the kernel's own counter, which wraps */
    uint64_t now_ns, day_ns; /* both clocks, at the latest receive */
    int stamped;             /* they belong together */
    uint8_t *buffers;        /* LC_RECEIVE_BUFFERS aggregates */
    struct mmsghdr in[LC_RECEIVE_BUFFERS];
    struct iovec in_iov[LC_RECEIVE_BUFFERS];
    lc_udp_address in_from[LC_RECEIVE_BUFFERS];
    char in_control[LC_RECEIVE_BUFFERS][LC_UDP_CONTROL_BYTES];
    /* sending */
    uint8_t *staging; /* one aggregate, for sends without gather */
    struct iovec joined[LC_BATCH_RUNS];
    struct mmsghdr out[LC_BATCH_RUNS * LC_RUN_PACKETS];
    char out_control[LC_BATCH_RUNS][CMSG_SPACE(sizeof(uint16_t))];
} lc_udp;

/* calls NULL: the system's. */
lc_link *lc_udp_open(const lc_host_config *config, const lc_clock *clock, const lc_udp_calls *calls,
                     lc_failure *failure);

static inline lc_udp *lc_udp_of(lc_link *link) {
    return (lc_udp *)(void *)link;
}
static inline const lc_udp *lc_udp_of_const(const lc_link *link) {
    return (const lc_udp *)(const void *)link;
}
static inline socklen_t lc_udp_address_bytes(int family) {
    return family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

/* link_udp_fast_paths.c */
void lc_udp_note(lc_udp *u, lc_event event);
int lc_udp_batches(lc_udp *u); /* whether several messages may go in one call now */
void lc_udp_refuse_batching(lc_udp *u);
int lc_udp_segments(const lc_udp *u, uint16_t peer); /* whether it is used with that peer now */
void lc_udp_refuse_segments(lc_udp *u, uint16_t peer, int error);
void lc_udp_segments_again(lc_udp *u, lc_udp_peer *peer); /* nothing is refused any more */

void lc_udp_go_singly(lc_link *link, uint16_t peer, int on);

/* link_udp_send.c */
int lc_udp_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno);

/* link_udp_receive.c */
void lc_udp_prepare_receive(lc_udp *u);
int lc_udp_receive(lc_link *link, lc_arrival *arrivals, int max);
int lc_udp_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer);

#endif
