/* A process among others: its links, how it reaches them, sealing, gates. */
#ifndef LOSSYCOLL_HOST_H
#define LOSSYCOLL_HOST_H

#include "lossycoll_types.h"
#include "lossycoll_verbs.h"

/* cdef begin */

/* ---- engine ---- */
enum { LC_SHARED_PAYLOAD = 65024 }; /* data bytes per packet in shared memory */

enum lc_fast_path {
    LC_GSO = 1,
    LC_GRO = 2,
    LC_MMSG = 4,
    LC_GATHER = 8,
    LC_SIMD = 16,
    LC_STAMPS = 32,  /* when the kernel got a datagram */
    LC_PATH_MTU = 64 /* packets as large as each path carries: without it, all are sent as they are
                        (packet_size.h) */
};

/* ---- sealing (docs/sealing.md) ---- */
enum lc_cipher {
    LC_CIPHER_NONE = 0,
    LC_AES_128_GCM = 1,
    LC_AES_256_GCM = 2,
    LC_CHACHA20_POLY1305 = 3,
    LC_CIPHERS = 4
};
enum {
    LC_SECRET_BYTES = 32, /* of a path and direction; the keys of its epochs are derived from it */
    LC_TAG_BYTES = 16     /* that sealing adds to each datagram */
};

typedef struct {
    uint8_t cipher;         /* lc_cipher */
    uint8_t clear;          /* payloads stay readable, and can't be changed */
    uint16_t filter;        /* equal in all processes, and of no other job if possible */
    uint64_t rekey_ns;      /* age of a key at most; 0: any */
    const uint8_t *secrets; /* by process: of what goes there, and of what comes from there */
} lc_seal_config;

/* A process among those that it meets: its links, one thread. */
typedef struct {
    const char *address; /* numeric address to bind; its family decides IPv4 or IPv6 */
    uint16_t port;       /* 0: the kernel chooses */
    uint16_t process;    /* number of this process */
    uint16_t processes;
    uint16_t payload_bytes; /* data bytes per packet; a multiple of 8 */
    int32_t socket_buffer;  /* bytes asked of the kernel for each direction; 0: the most it gives */
    uint32_t disable;       /* lc_fast_path bits that must not be used */
    uint64_t eager_bytes;   /* memory for packets of processes that are ahead; 0: none is sent
                               ahead. Equal in all processes */
    double pace_bytes_per_s; /* of all that is sent; 0: no fixed rate, congestion window only */
    uint64_t keepalive_ns;   /* a network path on which nothing was sent for so long gets a
                                datagram; 0: it gets none */
    uint8_t paces_port;      /* all paths of an interface are paced together, as one flow */
} lc_host_config;

/* How a process is reached: by which of the host's links, and what that one needs to know. */
typedef struct {
    const char *host; /* numeric */
    uint16_t port;
    uint16_t link;  /* its number, from 0 */
    int memory;     /* of link 1, shared memory: the peer's, and what wakes the peer, as its */
    int wake;       /* lc_host_share gave them. The caller closes them after lc_host_start */
    uint8_t absent; /* nobody has this number yet */
    uint8_t far;    /* it is at another site */
    lc_verbs_address verbs; /* of the link of RDMA */
} lc_address;

/* What happens to links that go on by themselves. */
enum lc_event_kind {
    LC_EVENT_REFUSED = 1, /* a fast path to a process: done without it, and tried again later */
    LC_EVENT_LOST = 2,    /* packets to a process are dropped in this machine, which is loss */
    LC_EVENT_FAILING = 3, /* nothing can be sent: tried again, slower and slower */
    LC_EVENT_WORKS = 4,   /* again, after waited_ns */
    LC_EVENT_SIZE = 5,    /* a path carries no packets as large as the host's, but datagrams of so
                             many bytes */
    LC_EVENT_SINGLE = 6   /* what is sent as one vanishes on the way, so packets go one by one */
};

typedef struct {
    int32_t kind;
    int32_t sys_errno;
    int32_t peer;       /* a process, or -1: all */
    uint32_t fast_path; /* which lc_fast_path bit was refused */
    uint64_t waited_ns;
    uint16_t link;          /* its number */
    uint32_t bytes, wanted; /* of datagrams: that the path carries, and of a full packet */
} lc_event;

/* Between an operation and a device whose streams fill and empty its buffers, in memory that both
 * reach (docs/devices.md). It is its caller's, who keeps it until the operation is finished and the
 * device has seen done. */
typedef struct {
    uint32_t ready;  /* 0; lc_gate_open makes it 1, perhaps before the operation is submitted; until
                        then it isn't started, nor any that was submitted to its group later */
    uint32_t done;   /* 0; the engine makes it 1 once the output may be read */
    uint32_t failed; /* 0; the engine makes it 1 first, if the operation fails without a result */
    int32_t wake[2]; /* lc_host_wakers */
    void *spoiled;   /* of an operation that fails, what is made NaN (all bits are set) before the
                        device reads it, whether it fails before the gate is opened or after; NULL:
                        nothing is */
    uint64_t spoiled_bytes;
} lc_gate;

const char *lc_version(void);
/* Opens the links. NULL on failure, with the reason in *failure. LC_E_ARGUMENT where a packet is
 * larger than one of them carries: mine[0] has its bytes, theirs[0] the link's limit,
 * theirs[1] its number. */
lc_host *lc_host_open(const lc_host_config *config, lc_failure *failure);
/* Opens link number 1 to the processes that share this machine's memory: n of them, ascending, this
 * one among them. Between lc_host_open and lc_host_start, once. Writes the descriptors of this
 * process's memory and of what wakes it, to be passed to the others; they stay the host's. Returns
 * LC_OK, or a code with the reason in *failure: then the host is as before. */
int lc_host_share(lc_host *host, const uint16_t *processes, uint16_t n, int descriptors[2],
                  lc_failure *failure);
/* More processes of the job run here than there are cores: who waits sleeps at once, and never
 * looks again and again. Before lc_host_start. */
void lc_host_crowded(lc_host *host);
/* Seals all that leaves this machine, from lc_host_start on, before which it is called. LC_OK,
 * LC_E_ARGUMENT, LC_E_MEMORY, or LC_E_CRYPTO. */
int lc_host_seal(lc_host *host, const lc_seal_config *config, lc_failure *failure);
/* New keys for whatever is sent from now on. Any thread may call it. */
void lc_host_rekey(lc_host *host);
/* Asks another process's engine for a sign of life, whatever its callers do. Returns when one last
 * came, as of the call before, by CLOCK_MONOTONIC in nanoseconds; 0: never. Any thread may call it.
 */
uint64_t lc_host_pulse(lc_host *host, uint16_t process);
/* Makes the processes known (an address for each) and starts the progress thread. Those that are
 * absent are to come (lc_host_admit). LC_E_ARGUMENT for an address that its link can't use, or of a
 * link that isn't there. */
int lc_host_start(lc_host *host, uint64_t session, const lc_address *processes);
/* Makes another process known by a number: it comes, or comes back, or takes the place of one that
 * has gone. Nothing is left of what was known by that number, nor is anything at the other end,
 * which does the same. `address` NULL: nobody has the number now. `secrets`: what goes there and
 * what comes (2 * LC_SECRET_BYTES), where packets are sealed, else NULL. While the host runs, of
 * its socket alone; any thread may call it. LC_E_ARGUMENT also while some group has the process as
 * a member. */
int lc_host_admit(lc_host *host, uint16_t process, const lc_address *address,
                  const uint8_t *secrets);
/* Stops and joins the thread, closes the links and frees the host. Its groups are closed before. */
void lc_host_close(lc_host *host);
/* Descriptors for gates of its operations, which are the caller's to close: what opens a gate may
 * come after the host was closed. LC_OK or LC_E_SYSTEM. */
int lc_host_wakers(lc_host *host, int32_t descriptors[2]);
/* Opens a gate (lc_gate): its operation may start. From any thread; it neither waits nor
 * allocates. */
void lc_gate_open(void *gate);
/* Takes the oldest event of the links. Returns whether there was one. */
int lc_host_event(lc_host *host, lc_event *event);

/* Header size on the wire, bytes. */
uint32_t lc_header_bytes(void);
/* Of the packets' form: ranks that differ in it can't hear each other. */
uint32_t lc_wire_version(void);
/* lc_fast_path bits that the processor and kernel offer, before any switch. */
uint32_t lc_probe(void);

/* cdef end */

#endif
