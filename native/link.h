/* A datagram link: what the engine needs of a network, and nothing more. link_udp.c is the first.
 */
#ifndef LC_LINK_H
#define LC_LINK_H

#include <sys/uio.h>

#include "lossycoll.h"

enum {
    LC_RUN_PACKETS = 64,       /* packets in one offloaded send */
    LC_RUN_BYTES = 65000,      /* and their bytes, headers included */
    LC_BATCH_RUNS = 8,         /* runs handed over in one call */
    LC_RECEIVE_BUFFERS = 8,    /* aggregates taken in one call */
    LC_AGGREGATE_BYTES = 65536 /* the kernel never merges more than this */
};

typedef struct lc_link lc_link;

/* Packets for one peer, each of two pieces (header, payload): iov[2 * n]. All have packet_bytes
 * bytes but the last, which may be shorter. */
typedef struct {
    struct iovec *iov;
    uint32_t n_packets;
    uint32_t packet_bytes;
    uint16_t peer;
} lc_run;

/* Datagrams of one sender that arrived together: each of stride bytes, the last may be shorter. */
typedef struct {
    const uint8_t *data;
    uint32_t length;
    uint32_t stride;
    uint64_t came_ns; /* when the kernel got it, on lc_now's clock; 0: not known */
    const void *from; /* opaque; see lc_link_is_from */
} lc_arrival;

lc_link *lc_link_open(const lc_config *config, lc_failure *failure);
void lc_link_close(lc_link *link);
/* Copies the peers' addresses. LC_OK or LC_E_ARGUMENT with *bad the rank whose address is unusable.
 */
int lc_link_set_peers(lc_link *link, const lc_address *peers, uint16_t n, int *bad);
/* Whether a peer's address is one of this host's, as far as that can be told. */
int lc_link_is_here(const lc_link *link, uint16_t peer);
void lc_link_info_of(const lc_link *link, lc_link_info *info);

/* Hands runs over in order. Returns how many packets of all runs, counted in order, are gone (sent,
 * or dropped by a local rule, which is loss like any other); fewer than asked means: the socket is
 * full, try the rest later. < 0: the link is unusable, with errno in *sys_errno. */
int lc_link_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno);
/* Takes what has arrived; the data stays valid until the next call. 0: nothing there. */
int lc_link_receive(lc_link *link, lc_arrival *arrivals, int max);
int lc_link_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer);
/* Sleeps until something arrives, wake() is called, timeout_ns pass, or (when writable is set) the
 * link takes packets again. */
void lc_link_sleep(lc_link *link, uint64_t timeout_ns, int writable);
/* Whether arrivals wake who sleeps; they do at first. From any thread. */
void lc_link_watch(lc_link *link, int on);
/* From any thread. */
void lc_link_wake(lc_link *link);
/* Packets that the kernel dropped because the receive buffer was full. */
uint64_t lc_link_overflow(const lc_link *link);
void lc_link_calls(const lc_link *link, uint64_t *send_calls, uint64_t *receive_calls);

#endif
