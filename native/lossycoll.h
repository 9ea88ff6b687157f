/* lossycoll native engine: the whole public C interface.
 *
 * The part between the two cdef marks is read by native/build_cffi.py as it stands,
 * so it holds plain declarations only. docs/engine.md explains the state machine.
 */
#ifndef LOSSYCOLL_H
#define LOSSYCOLL_H

#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lossycoll needs a little-endian host: packets and planes of bits are in the host's order"
#endif

/* cdef begin */

/* ---- element types on the wire ---- */
enum lc_dtype { LC_F32 = 0, LC_F64 = 1, LC_F16 = 2, LC_BF16 = 3, LC_BYTES = 4 };

/* ---- how elements stand in packets: as they are, or float32 rounded to a shorter float ---- */
enum lc_encoding {
    LC_ENCODING_SAME = 0,
    LC_ENCODING_BF16 = 1,
    LC_ENCODING_F16 = 2,
    LC_ENCODING_INT8 = 3,
    LC_ENCODING_INT6 = 4,
    LC_ENCODING_INT5 = 5,
    LC_ENCODING_INT4 = 6,
    LC_ENCODING_INT3 = 7,
    LC_ENCODING_INT2 = 8,
    /* Packets repeat the number alone. What stands above it are parameters, which are the call's.
     */
    LC_ENCODING_NUMBER = 15,
    LC_ENCODING_GROUP_32 = 16,   /* of INT8 to INT2: groups of 32 elements instead of 128 */
    LC_ENCODING_SPIKES = 32,     /* of these: a group's ends travel as floats */
    LC_ENCODING_STOCHASTIC = 64, /* of these: rounded at random, by the packet's name */
};

/* ---- plan tables (lossycoll/plan/model.py has the meaning of every field) ---- */
enum lc_combine { LC_COPY = 0, LC_ADD = 1 };
enum lc_finish {
    LC_FINISH_NONE = 0,
    LC_FINISH_MEAN = 1,
    LC_FINISH_STRATIFIED = 2,
    LC_FINISH_WEIGHTED = 3
};
enum lc_own { LC_OWN_NONE = 0, LC_OWN_INPUT = 1, LC_OWN_SLOT = 2 };
enum lc_target { LC_TARGET_NONE = 0, LC_TARGET_OUT = 1, LC_TARGET_SCRATCH = 2 };
enum lc_missing { LC_MISSING_KEEP = 0, LC_MISSING_OWN = 1, LC_MISSING_ZERO = 2 };

typedef struct {
    uint64_t offset;     /* elements, in the buffer that target names */
    uint64_t length;     /* elements */
    uint64_t own_offset; /* elements, in the input buffer, or in the range of the slot that feeds */
    uint32_t first_edge; /* sources first, then dests, in the edge table */
    uint32_t n_sources;
    uint32_t n_dests;
    uint16_t number; /* the wire's slot field at this rank */
    uint8_t combine;
    uint8_t own; /* where the rank's own contribution comes from */
    uint8_t finish;
    uint8_t target;
    uint8_t missing;
    uint8_t level; /* which of lc_call.levels */
    uint16_t feed; /* LC_OWN_SLOT: number of the slot whose result it is; that one stands before */
    uint16_t full_weight; /* of a stratified sum of which nothing is missing; 0: sources + 1 */
} lc_slot_desc;

typedef struct {
    uint16_t peer; /* rank in the group */
    uint16_t slot; /* slot number at that peer (unused for sources) */
} lc_edge;

/* How the streams of some slots travel. Both ends of a stream are of one level. */
enum { LC_LEVELS = 4 };

enum lc_choose { LC_CHOOSE_PARITY = 1, LC_CHOOSE_ROUNDS = 2 };

typedef struct {
    uint32_t elements_per_packet;
    uint8_t reliable;  /* resend until everything has arrived */
    uint8_t repair;    /* rounds of resending when not reliable */
    uint8_t selective; /* receivers may need single packets, which are resent until they come */
    uint8_t feedback;  /* receivers tell senders which packets they have given up */
    uint8_t choose;    /* lc_choose: what is chosen for each stream by what its path loses */
    uint8_t most;      /* parity, if it is chosen: at most so many packets for 64 */
    uint8_t plain;     /* elements travel as they are, however the call's are encoded */
    uint16_t code;     /* of parity, if it isn't (sets.h); 0: none */
    float max_missing; /* share that may be missing, where something is chosen; below 0: a tenth of
                          what the path loses */
} lc_level;

/* ---- seeded faults ---- */
typedef struct {
    double loss;    /* fraction of data packets, 0..1 */
    double burst;   /* mean burst length in packets; <= 1 means single losses */
    double dup;     /* fraction delivered twice */
    double reorder; /* fraction delivered after their successor */
    uint64_t seed;
} lc_inject;

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

/* Where finished tickets come out. */
typedef struct lc_completions lc_completions;

/* Some of the host's processes. Its members are numbered by rank. */
typedef struct {
    uint32_t number; /* on the wire: equal for all members, of no other group of theirs; not 0 */
    uint16_t rank;
    uint16_t size;
    const uint16_t *members;  /* processes by rank; NULL: those of the same numbers */
    uint32_t fault_group;     /* keys injected faults and random rounding; equal on all ranks */
    uint64_t definition;      /* what members must agree on besides each call; part of the
                                 signature of every operation */
    uint64_t deadline_min_ns; /* floor of the learnt deadline */
    uint64_t deadline_max_ns; /* how long a stream or a path may be silent */
    uint64_t link_ns;         /* how long a reliable operation waits for a link that delivers
                                 nothing of what its peer sends; 0: as long as for the peer */
    uint64_t reorder_ns;      /* least time a stream waits after its end; 0: one millisecond */
    lc_inject inject;
    const double *inject_loss; /* loss of packets from each rank to this one (size entries), in
                                  place of inject.loss; NULL: alike from all */
    uint8_t met; /* every member is known to have the group by now: packets may go ahead at once */
    lc_completions *completions; /* of calls with notify; NULL: there are none. It outlives the
                                    group */
    uint64_t owner;              /* what lc_completions_next names the group by */
    const char *name;            /* of the status page; NULL: none. Not kept */
} lc_group_config;

enum lc_code {
    LC_OK = 0,
    LC_PENDING = 1,
    LC_E_ARGUMENT = -1,
    LC_E_MEMORY = -2,
    LC_E_SYSTEM = -3,   /* errno in lc_failure.sys_errno */
    LC_E_MISMATCH = -4, /* a peer means another collective, size or dtype */
    LC_E_TIMEOUT = -5,  /* a peer never took part within the operation's timeout */
    LC_E_ABORTED = -6,  /* lc_group_abort, or a peer's failure */
    LC_E_CLOSED = -7,
    LC_E_LINK = -8, /* a link delivers nothing, or no data, within link_ns: lc_failure.mine has the
                       packets of data that the peer said it sent (0: nothing was heard at all), and
                       (mine[2]) for how many ns. theirs[0]: packets that were sent to the peer,
                       which says that it hears nothing; 0: the other direction is dead */
    LC_E_MESSAGE = -9, /* a message isn't what its receive expects. mine: tag, elements, type of
                          the receive; theirs: of the message */
    LC_E_MESSAGE_LATE = -10, /* a send or receive wasn't done within its timeout. mine: tag,
                                elements, type; theirs: timeout_ns, 1 for a send */
    LC_E_PEER = -11,         /* the message's peer died or left: only this message fails */
    LC_E_CRYPTO = -12        /* no libcrypto that can be used: lc_crypto_load says why */
};

typedef struct {
    int32_t code;
    int32_t sys_errno;
    int32_t peer; /* rank in the group, or -1 */
    uint32_t op;
    uint8_t of_message; /* of a message: op is its number among those of the two ranks */
    uint64_t mine[3];   /* signature, element count, dtype: of this rank's call */
    uint64_t theirs[3]; /* the same of the peer's call */
} lc_failure;

enum lc_cause {
    LC_CAUSE_COMPLETE = 0,
    LC_CAUSE_LOSS = 1,
    LC_CAUSE_DEADLINE = 2,
    LC_CAUSE_PEER = 3, /* a peer died: what it still owed was given up */
    LC_CAUSE_FAILED = 4
};

/* Figures of one operation at this rank. A "contribution" is one rank's addend in one packet. */
typedef struct {
    uint32_t op;
    int32_t cause;
    uint64_t packets_sent;
    uint64_t packets_resent;  /* of those sent, in repair rounds */
    uint64_t resent_reliable; /* of those, in streams that are reliable */
    uint64_t parity_sent;     /* of those sent, parity */
    uint64_t parity_received;
    uint64_t packets_received;  /* settled by arrival; parity is not counted */
    uint64_t packets_recovered; /* of those, by parity */
    uint64_t nan_groups; /* groups of few bits that were NaN as a whole when they were encoded */
    uint64_t packets_missing;  /* settled by being given up */
    uint64_t packets_injected; /* dropped by injection */
    uint64_t bytes_sent;       /* headers included */
    uint64_t bytes_received;
    uint64_t contribution_packets; /* finished packets that the next two figures describe */
    uint64_t contributions;        /* their contributions, added up */
    uint32_t contributions_min;
    uint32_t deadline_hits; /* streams ended by the deadline */
    uint64_t own_filled;    /* packets filled by on_missing="own" */
    uint64_t kept;          /* packets left as they were */
    uint64_t zero_filled;   /* packets filled by on_missing="zero" */
    uint64_t alone;         /* stratified packets to which no other rank contributed */
    uint64_t order_kept; /* packets that waited for those of lower ranks (lc_call.deterministic), */
    uint64_t order_bytes; /* and the most memory that they took at a time */
    uint64_t elapsed_ns;
    float max_missing; /* the greatest of its levels; < 0: none has one */
} lc_report;

/* A stream of a finished operation that came here. Times are since it was submitted. */
typedef struct {
    uint64_t first_ns, last_ns; /* when its first and its last packet came; 0: none did */
    uint64_t gap_ns;            /* longest silence between two packets */
    uint64_t settled_ns;        /* 0: it has not, since the operation failed */
    uint32_t packets;
    uint32_t arrived;
    uint16_t slot; /* number here */
    uint16_t peer;
    uint16_t code;  /* of its parity, as far as is known (native/sets.h) */
    uint8_t rounds; /* of resending */
    uint8_t cause;  /* why it settled */
} lc_stream;

/* Figures of a group since it was opened. Those that no group can be told for (malformed, foreign,
 * forged, replayed, socket_overflow, send_calls, receive_calls, control_sent, control_received,
 * fast_path_refusals, send_failures) are its host's. */
typedef struct {
    uint64_t operations;
    uint64_t packets_sent, packets_resent, resent_reliable, bytes_sent;
    uint64_t packets_received, bytes_received;
    uint64_t parity_sent, parity_received, packets_recovered, nan_groups;
    uint64_t packets_injected, packets_duplicated, packets_reordered;
    uint64_t packets_missing;
    uint64_t contributions, contribution_packets;
    uint64_t deadline_hits;
    uint64_t order_kept;
    uint64_t malformed;       /* too short, bad magic, version, checksum, length or range */
    uint64_t foreign;         /* another session, or an address that is not the sender's */
    uint64_t forged;          /* sealed with another key, or changed on the way */
    uint64_t replayed;        /* sealed, and come before, or older than can be told */
    uint64_t stale;           /* of an operation that has ended, or a round that is over */
    uint64_t repeated;        /* arrived before */
    uint64_t eager_kept;      /* came before this rank had posted their operation, and waited */
    uint64_t eager_dropped;   /* the same, and there was no room for them */
    uint64_t socket_overflow; /* dropped by the kernel because the socket buffer was full */
    uint64_t send_calls, receive_calls, control_sent, control_received;
    uint64_t fast_path_refusals; /* times that the kernel refused one: lc_host_event says which */
    uint64_t send_failures;      /* times that nothing could be sent, and it was tried again */
    uint64_t operation_ns;       /* time of all operations, added up */
    uint64_t messages_sent, messages_received; /* done; their packets are among those above */
} lc_stats;

/* ---- datagrams aside: by the host's socket, and no packets of the engine ---- */
enum { LC_ASIDE_BYTES = 128, LC_ASIDE_MARK_BYTES = 4 };

typedef struct {
    uint8_t address[16]; /* where it came from; of IPv4 as IPv6 maps it (::ffff:a.b.c.d) */
    uint16_t port;
    uint16_t length;
    uint8_t data[128];
} lc_aside;

/* Which direction between two processes that live is dead. */
enum lc_silence {
    LC_HEARD = 0,
    LC_SILENT_FROM = 1, /* nothing comes from the peer */
    LC_SILENT_TO = 2,   /* the peer says that nothing comes to it */
    LC_NO_DATA = 3      /* control comes from the peer, and none of the data that it says it sent */
};

typedef struct {
    uint64_t packets_sent, packets_received, packets_missing;
    uint64_t rtt_ns;      /* smoothed; 0 while unknown */
    uint64_t deadline_ns; /* the deadline that a stream of one packet would get now */
    double delivery_rate; /* received / (received + missing); 1 while unknown */
    uint64_t offered;     /* packets to be added up that might be lost */
    uint64_t delivered;   /* those of them that came */
    double rate;          /* bytes/s that the path delivers; 0 while unknown */
    uint64_t queue_ns;    /* standing on the path in the present round trip */
    uint32_t window;      /* packets that may be in flight */
    double link_loss;     /* share of all packets to the peer that is lost now, before recovery, */
    double link_burst;    /* and how many are lost in a row, in the mean */
    double expected_missing; /* share of the latest stream's packets that its means were to leave
                                missing, */
    float max_missing;       /* and that its level allowed; < 0: no means were chosen yet */
    uint16_t code;           /* those means: of its parity, */
    uint8_t rounds;          /* and of resending */
    uint8_t silence;         /* lc_silence, now: operations have given the peer up */
    uint32_t silences;       /* times that they began to; the latest: */
    uint64_t silent_ns;      /* for how long nothing comes, */
    uint64_t silent_packets; /* and datagrams that were sent there without an answer; of
                                LC_NO_DATA, packets that the peer sent */
} lc_peer_stats;

typedef struct {
    int32_t receive_buffer, send_buffer; /* what the kernel gave */
    uint32_t active;                     /* lc_fast_path bits in use now */
    uint16_t port;
    uint16_t payload_bytes;
} lc_link_info;

/* ---- the status page: what a process tells those who look, without being asked ----
 *
 * A file that the engine maps. It has an lc_page, `world` times lc_page_peer, then `groups` blocks
 * of `group_bytes`: an lc_page_group, its members' processes (uint16_t, `world` of them), and two
 * sets of ranks (uint64_t words). docs/operate.md has who writes what. */
enum {
    LC_PAGE_MAGIC = 0x5350434C, /* "LCPS" */
    LC_PAGE_VERSION = 1,
    LC_PAGE_GROUPS = 16,  /* groups at a time; further ones aren't told */
    LC_PAGE_CALLS = 64,   /* the latest calls of each, */
    LC_PAGE_MESSAGES = 8, /* and sends and receives that aren't done */
    LC_PAGE_TEXT = 80
};

enum lc_page_state { LC_PAGE_HERE = 0, LC_PAGE_ENDED = 1, LC_PAGE_SILENT = 2, LC_PAGE_LEFT = 3 };

/* A call, a send or a receive. Times are by CLOCK_MONOTONIC; 0: not yet. */
typedef struct {
    uint64_t op; /* number of the operation and one; 0: the place is free */
    int64_t seq; /* number of the call that it serves; -1: none */
    uint64_t begin_ns, end_ns;
    uint64_t bytes;
    int32_t peer;     /* of a message: rank in the group; -1: any */
    uint8_t receives; /* it is a receive */
    uint8_t failed;
    char text[LC_PAGE_TEXT];
} lc_page_call;

typedef struct {
    uint32_t number; /* on the wire; 0: the block is free */
    uint16_t rank, size;
    uint32_t submitted; /* operations so far: the number of the next one */
    int32_t failed;     /* lc_code; 0: sound */
    uint64_t usual_ns;  /* time of a call, on average of the latest ones */
    uint64_t waits_op;  /* the operation that the sets of ranks are of, and one; 0: none */
    char name[LC_PAGE_TEXT];
    lc_page_call calls[LC_PAGE_CALLS]; /* by number */
    lc_page_call messages[LC_PAGE_MESSAGES];
} lc_page_group;

typedef struct {
    uint64_t heard_ns; /* when the engine last heard it; 0: never, */
    uint64_t beat_ns;  /* and the control plane */
    uint64_t packets_sent, packets_received, packets_missing; /* of all groups here now */
    uint64_t rtt_ns, queue_ns;
    double rate; /* bytes/s */
    double link_loss, link_burst;
    uint32_t rank;   /* torch's global rank */
    uint8_t state;   /* lc_page_state */
    uint8_t silence; /* lc_silence, in any group */
    uint8_t link;    /* number of the link */
    uint8_t reserved;
} lc_page_peer;

typedef struct {
    uint32_t magic, version;
    uint32_t sequence; /* odd while the engine writes */
    uint32_t world, process, pid;
    uint32_t groups, group_bytes;
    uint64_t pid_start; /* of /proc/PID/stat: who has the number later has another one */
    uint64_t pid_space; /* inode of the namespace that it is a number in */
    uint64_t session;   /* of the job */
    uint64_t liveness_ns;
    uint64_t turn_ns; /* when the engine last wrote its figures */
    uint32_t groups_untold;
    uint8_t sealed;
    uint8_t reserved[3];
    char host[LC_PAGE_TEXT];    /* the machine's name, */
    char control[LC_PAGE_TEXT]; /* and where the control plane listens, as ADDRESS:PORT */
    lc_stats stats;             /* of all groups so far */
} lc_page;

/* ---- unreliable datagrams of RDMA (docs/rdma.md) ---- */

/* What the other processes need to know of one. */
typedef struct {
    uint8_t gid[16];     /* of its port */
    uint32_t queue_pair; /* 24 bits */
    uint32_t key;        /* without it the device drops a datagram */
    uint16_t lid;        /* 0 on an Ethernet */
    uint16_t partition;
} lc_verbs_address;

typedef struct {
    const char *library;  /* NULL: the system's libibverbs */
    const char *device;   /* its name */
    const char *counters; /* folder of its port's own counters in sysfs; NULL: it has none */
    uint8_t port;
    uint8_t gid;    /* index in the port's table */
    uint32_t queue; /* datagrams that may wait here, at most; 0: the usual number */
} lc_verbs_config;

typedef struct lc_verbs_port lc_verbs_port;

/* What a port is like. */
typedef struct {
    uint16_t mtu;      /* bytes of a datagram */
    uint8_t ethernet;  /* RoCE */
    uint32_t queue;    /* datagrams that may wait here, */
    uint32_t queue_of; /* and those that were asked for: fewer fit into what may be locked */
    lc_verbs_address address;
} lc_verbs_info;

/* Where opening a device ended: lc_failure.mine[0]. */
enum lc_verbs_step {
    LC_VERBS_LIBRARY = 1, /* there is no libibverbs */
    LC_VERBS_DEVICE = 2,  /* there is no such device, */
    LC_VERBS_OPEN = 3,    /* or it can't be opened: /dev/infiniband */
    LC_VERBS_PORT = 4,    /* there is no such port, or it isn't active */
    LC_VERBS_GID = 5,     /* or it has no such GID */
    LC_VERBS_MEMORY = 6,  /* too little may be locked */
    LC_VERBS_QUEUES = 7   /* no queue pair is to be had */
};

/* How a process is reached: by which of the host's links, and what that one needs to know. */
typedef struct {
    const char *host; /* numeric */
    uint16_t port;
    uint16_t link;  /* its number, from 0 */
    int memory;     /* of link 1, shared memory: the peer's, and what wakes the peer, as its */
    int wake;       /* lc_host_share gave them. The caller closes them after lc_host_start */
    uint8_t absent; /* nobody has this number yet */
    lc_verbs_address verbs; /* of the link of RDMA */
} lc_address;

/* What happens to links that go on by themselves. */
enum lc_event_kind {
    LC_EVENT_REFUSED = 1, /* a fast path to a process: done without it, and tried again later */
    LC_EVENT_LOST = 2,    /* packets to a process are dropped in this machine, which is loss */
    LC_EVENT_FAILING = 3, /* nothing can be sent: tried again, slower and slower */
    LC_EVENT_WORKS = 4,   /* again, after waited_ns */
    LC_EVENT_SIZE = 5 /* a path carries no packets as large as the host's, but datagrams of so many
                         bytes */
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

typedef struct {
    const lc_slot_desc *slots;
    const lc_edge *edges;
    uint32_t n_slots;
    uint32_t n_edges;
    const void *in;
    void *out; /* may equal in */
    uint64_t in_elements;
    uint64_t out_elements;
    uint64_t scratch_elements;
    lc_level levels[LC_LEVELS]; /* those that slots name are looked at, and the first */
    uint8_t dtype;
    uint8_t encoding;        /* lc_encoding, with its parameters: how packets carry the elements */
    uint8_t gather_encoding; /* of finished sums that are sent, and of all that comes to a copy; 0:
                                encoding is. With another one, neither is LC_ENCODING_SAME */
    uint8_t notify;          /* the ticket comes out of the group's lc_completions, which there must
                                be */
    uint8_t waits;         /* the caller waits for it at once: the first wait does the engine's work
                              itself, as long as packets come, and nobody does before; not with
                              notify */
    uint8_t keeps_sums;    /* sums that are sent encoded stay here as they were, not as others get
                              them */
    uint8_t deterministic; /* contributions are added in the order of ranks, whatever comes first */
    uint8_t lingers;       /* where this rank has its result, and sends little, it is done once
                              that is copied. What fails it later fails the group */
    const uint8_t *needed; /* which this rank needs: a byte for each packet of each copy that comes
                              from a peer on a selective level, in the plan's order; NULL: none. Not
                              read after submit */
    uint64_t n_needed;
    const double *weights; /* by rank: what contributions are multiplied by; NULL: 1. Not read
                              after submit */
    double divisor; /* of LC_FINISH_WEIGHTED; 0: the weights of what went in, added up, and the
                       own contribution is multiplied by this rank's. They are above 0, and no
                       sum is partial */
    double scale;   /* world for SUM, 1 for a mean */
    uint64_t signature;
    uint64_t timeout_ns; /* for peers that never take part */
    lc_gate *gate;       /* NULL: the input is there */
    int64_t ticket;      /* set by submit: what it returns, for callers that an interrupt may keep
                            from seeing that */
    const char *text;    /* of the status page; NULL: none. Not read after submit */
    int64_t seq;         /* of it: number of the caller's call; -1: it has none */
} lc_call;

/* A send or a receive. Messages from one rank to another arrive in the order of their sends. */
typedef struct {
    void *data; /* the elements, or room for them */
    uint64_t elements;
    uint64_t tag;           /* a receive gets messages of its tag alone */
    uint64_t timeout_ns;    /* 0: none */
    int64_t ticket;         /* set by post: what it returns */
    uint32_t type;          /* of the elements: equal at both ends; means nothing here */
    uint16_t element_bytes; /* 1 to 64 */
    int32_t peer;           /* rank in the group; -1: a receive from any */
    uint8_t receive;
    /* Where both ends of a message of more than 64 KiB are lossy, packets may be missing: */
    uint8_t lossy;
    uint8_t repair;  /* rounds of resending: those of the end that wants more */
    uint8_t missing; /* of a receive: LC_MISSING_KEEP or LC_MISSING_ZERO */
} lc_message;

typedef struct lc_host lc_host;
typedef struct lc_group lc_group;

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
/* Opens a device's port and a queue pair, before it is known whether others are reached by it. NULL
 * on failure, with the reason in *failure: mine[0] is an lc_verbs_step. */
lc_verbs_port *lc_verbs_open(const lc_verbs_config *config, lc_verbs_info *info,
                             lc_failure *failure);
/* Only of one that no host has taken. */
void lc_verbs_close(lc_verbs_port *port);
/* Finds the ways to n processes, those whose address has a queue pair, which may take seconds.
 * LC_OK, also where there is no way to some; or LC_E_MEMORY. */
int lc_verbs_know(lc_verbs_port *port, uint16_t own, const lc_verbs_address *addresses, uint16_t n);
/* Finds out who of them is reached, while they do the same: datagrams of so many bytes (24 to 4096)
 * until all have answered or so much time is over. heard[i] becomes 1 if one came from process i.
 * token: of this meeting alone. LC_OK or LC_E_ARGUMENT. */
int lc_verbs_greet(lc_verbs_port *port, uint64_t token, uint16_t own, uint16_t n, uint32_t bytes,
                   uint64_t timeout_ns, uint8_t *heard);
/* Drops what has come: greetings that nobody waits for any more, once all have ended theirs. */
void lc_verbs_drop_arrived(lc_verbs_port *port);
/* Makes it the host's next link, whose number is returned, if it is above 0: the port is the host's
 * from then on. Between lc_host_open and lc_host_start, after lc_host_share. LC_E_ARGUMENT, as by
 * lc_host_open, where packets are too large for it. */
int lc_host_verbs(lc_host *host, lc_verbs_port *port, lc_failure *failure);
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
/* Bytes of the status page of a process among so many. */
uint64_t lc_page_bytes(uint32_t world);
/* Writes to a status page from now on, a file of lc_page_bytes whose lc_page is filled in by its
 * caller, who may close it. Before lc_host_start. LC_OK, LC_E_ARGUMENT or LC_E_SYSTEM. */
int lc_host_page(lc_host *host, int file);
/* Notes on the page what is known of a process apart from its packets: a lc_page_state, and when it
 * last said something (0: as before). Any thread may call it. */
void lc_host_page_peer(lc_host *host, uint16_t process, int state, uint64_t heard_ns);
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
/* Takes datagrams aside from now on: those that come by the host's socket and begin with
 * LC_ASIDE_MARK. They are no packets, and the engine believes nothing of them. Before
 * lc_host_start. Returns a descriptor, which is the host's and an eventfd: readable when one has
 * come where none waited. LC_E_ARGUMENT also where its first link has none; LC_E_MEMORY. */
int lc_host_asides(lc_host *host);
/* Sends a datagram aside, of LC_ASIDE_BYTES at most and with the mark, by the host's socket, to any
 * address of the socket's family. It may be lost like any other. Any thread may call it. LC_OK,
 * LC_E_ARGUMENT, or LC_E_SYSTEM if the system didn't take it. */
int lc_host_say(lc_host *host, const lc_address *to, const uint8_t *data, uint16_t n);
/* Takes the oldest one that has come. Returns whether there was one. By one thread at a time. */
int lc_host_heard(lc_host *host, lc_aside *aside);
/* How many were too long, or found no room. Any thread may call it. */
uint64_t lc_host_asides_dropped(lc_host *host);
/* Stops and joins the thread, closes the links and frees the host. Its groups are closed before. */
void lc_host_close(lc_host *host);
/* What a link says of itself; LC_E_ARGUMENT if there is none of that number. */
int lc_host_link(lc_host *host, uint16_t number, lc_link_info *info);
/* Descriptors for gates of its operations, which are the caller's to close: what opens a gate may
 * come after the host was closed. LC_OK or LC_E_SYSTEM. */
int lc_host_wakers(lc_host *host, int32_t descriptors[2]);
/* Opens a gate (lc_gate): its operation may start. From any thread; it neither waits nor
 * allocates. */
void lc_gate_open(void *gate);
/* Takes the oldest event of the links. Returns whether there was one. */
int lc_host_event(lc_host *host, lc_event *event);

/* Makes a group at this process: no other is asked, and none needs to have it yet. After
 * lc_host_start. NULL on failure (LC_E_ARGUMENT also where its number is taken). */
lc_group *lc_group_open(lc_host *host, const lc_group_config *config, lc_failure *failure);
/* Fails what is pending and frees the group. Nobody else may be calling any more, but for those
 * that wait. */
void lc_group_close(lc_group *group);

/* Hands an operation to the group. Returns a ticket (> 0), or an lc_code < 0 at once. Buffers
 * belong to the engine until the ticket is done. Operation numbers are given in submit order. */
int64_t lc_group_submit(lc_group *group, lc_call *call);
/* LC_OK when done, LC_PENDING after timeout_ns, or the code the operation failed with. */
int lc_group_wait(lc_group *group, int64_t ticket, uint64_t timeout_ns);
/* As lc_group_wait, but LC_OK as soon as the result is there, whatever becomes of the operation
 * later: all that comes here has settled, and what fills gaps is in place. Streams to peers may
 * still be open: the buffers may be read, and not be written before the ticket is done. An
 * operation with `waits`, a message, and one that has gaps to fill in place, have it when they are
 * done. */
int lc_group_wait_result(lc_group *group, int64_t ticket, uint64_t timeout_ns);
int lc_group_result(lc_group *group, int64_t ticket, lc_report *report, lc_failure *failure);
/* Why the group takes no operation any more; returns its code, LC_OK if it does. */
int lc_group_failure(lc_group *group, lc_failure *failure);
/* Which packets of the stream (slot number here, peer) of an operation that is finished, or has its
 * result, arrived: a byte for each of its n_packets. LC_PENDING: it hasn't. LC_E_ARGUMENT if there
 * is no such stream, or of another length. */
int lc_group_arrived(lc_group *group, int64_t ticket, uint16_t slot, uint16_t peer,
                     uint8_t *arrived, uint32_t n_packets);
/* Which packets of the stream to (slot number there, peer) of a finished operation with feedback
 * the peer has given up: a byte for each of its n_packets. LC_E_ARGUMENT as above. */
int lc_group_given_up(lc_group *group, int64_t ticket, uint16_t slot, uint16_t peer,
                      uint8_t *given_up, uint32_t n_packets);
/* The streams of a finished operation that came here, in the plan's order, as many as there is room
 * for. Returns how many there are. */
int lc_group_streams(lc_group *group, int64_t ticket, lc_stream *streams, uint32_t room);
/* How many operations are done for their callers and not for the peers, who need packets. *oldest:
 * the number of the first of those, where there is one; NULL: not asked for. */
uint32_t lc_group_lingering(lc_group *group, uint32_t *oldest);
/* Forgets a finished ticket, which nobody may be waiting for. One with notify must have been taken
 * from lc_completions before. */
void lc_group_release(lc_group *group, int64_t ticket);
/* As if the ticket, which has no notify yet, had been submitted with it. */
void lc_group_notify(lc_group *group, int64_t ticket);

/* One queue for the finished tickets of any groups of any hosts. NULL: no memory. */
lc_completions *lc_completions_open(void);
/* Nobody may be calling, and all groups that were opened with it are closed. */
void lc_completions_close(lc_completions *completions);
/* The next finished ticket among those with notify, and its group's owner; 0 after timeout_ns;
 * LC_E_CLOSED while it is stopped and empty. Tickets of groups that were closed don't come. */
int64_t lc_completions_next(lc_completions *completions, uint64_t timeout_ns, uint64_t *owner);
/* Wakes who waits in lc_completions_next, or has them wait again. */
void lc_completions_stop(lc_completions *completions, int stopped);

/* Posts a send or a receive. Returns a ticket as lc_group_submit, which is finished when the
 * message is; 0: a small message is on its way, and its memory may change; or a code < 0. */
int64_t lc_group_post(lc_group *group, lc_message *message);
/* The rank that a finished receive was served by, or -1. */
int lc_group_source(lc_group *group, int64_t ticket);
/* How many messages that count as sent may not have reached their receivers yet. */
uint32_t lc_group_unheard(lc_group *group);
/* The peer has left in order: what came from it before can be received, and nothing else. */
void lc_group_peer_left(lc_group *group, int peer);

void lc_group_abort(lc_group *group, int code, int peer);
/* From now on the peer counts as lost altogether, for good: what it owes is given up, in reliable
 * operations too, what is owed to it is dropped, and its packets are not believed. */
void lc_group_peer_dead(lc_group *group, int peer);
void lc_group_stats(lc_group *group, lc_stats *stats);
int lc_group_peer_stats(lc_group *group, int peer, lc_peer_stats *stats);
void lc_group_last_report(lc_group *group, lc_report *report);

/* Which packets of a stream injection drops: one byte per packet, 1 = dropped. */
void lc_inject_stream(const lc_inject *inject, uint32_t group, uint32_t op, uint16_t slot,
                      uint16_t sender, uint16_t receiver, uint8_t round, uint32_t n_packets,
                      uint8_t *dropped);
/* The sets of a stream of n packets by themselves (native/sets.h): its parity packets with such a
 * code, and the set of data packet < n, or of parity packet number - n. UINT32_MAX: no sender can
 * mean it. */
uint32_t lc_parity_packets(uint32_t code, uint32_t n);
uint32_t lc_set_of(uint32_t code, uint32_t n, uint32_t packet);
/* The m rows of a set of k packets of so many bytes, one behind the other (native/rs.h); simd: as
 * fast as this processor can. LC_E_ARGUMENT: there is no such code. */
int lc_parity_rows(int simd, uint32_t k, uint32_t m, uint32_t bytes, const uint8_t *packets,
                   uint8_t *rows);
/* The choice of means by itself (native/recovery.h). */
typedef struct {
    uint16_t code;   /* of parity (native/sets.h); 0: none */
    uint8_t rounds;  /* of resending */
    double expected; /* share of the data packets that will be missing */
    double seconds;  /* that it adds to the stream's time */
} lc_recovery;
typedef struct {
    double loss;      /* share of packets lost on the path */
    double burst;     /* mean run of lost packets */
    double rtt_s;     /* round trip */
    double reorder_s; /* how long a round waits for late packets before it asks */
    double rate;      /* bytes per second that the path carries; 0: not known */
    double row_rate;  /* of the arithmetic, bytes per second and row (native/gf.h) */
    uint32_t packets; /* of the stream */
    uint32_t packet_bytes;
    float max_missing; /* share that may be missing; below 0: a tenth of what is lost */
    uint8_t choose;    /* LC_CHOOSE_PARITY | LC_CHOOSE_ROUNDS; what is not chosen is given: */
    uint8_t rounds;
    uint16_t code;
    uint8_t most; /* parity at most so many 64ths of the data */
    uint8_t has_last;
    lc_recovery last; /* chosen before for such a stream: kept while it is nearly as good */
} lc_recovery_ask;
/* The means of least time that leave no more than is wanted; if none do, those that leave least. */
lc_recovery lc_recovery_choose(const lc_recovery_ask *ask);
/* Share of the data that stays missing: sets of k with m rows, so many of them interleaved. */
double lc_recovery_left(double loss, double burst, uint32_t k, uint32_t m, uint32_t sets);
/* The codecs by themselves (native/codec.h), by lc_encoding and lc_dtype; simd: as fast as this
 * processor can, or plain C, which gives the same bits. Elements that fit into a payload, and bytes
 * that n elements become in one packet; 0: there is no such codec. */
uint32_t lc_encoding_elements(int encoding, int dtype, uint16_t payload_bytes);
uint64_t lc_encoding_bytes(int encoding, int dtype, uint32_t n);
/* One packet's elements. LC_E_ARGUMENT: there is no such codec. */
int lc_encode(int encoding, int dtype, int simd, void *dst, const void *src, uint32_t n,
              uint64_t seed);
int lc_decode(int encoding, int dtype, int simd, void *dst, const void *src, uint32_t n);
/* acc = own + decoded x * factor; own may be NULL, or acc where both are of one type. */
int lc_decode_add(int encoding, int dtype, int simd, void *acc, const void *own, const void *x,
                  double factor, uint32_t n);
/* NULL if there is a libcrypto that can be used, or why there is none; and what it calls itself.
 * `path` names the library's file, if it isn't NULL or empty; a process uses one of them. */
const char *lc_crypto_load(const char *path);
const char *lc_crypto_version(void);
/* Whether that library has a cipher (lc_cipher) which seals and opens as it must. */
int lc_crypto_has(int cipher);
/* Seals a text by itself, n bytes and a tag behind them, or opens it. No two texts may have the
 * same key and IV (12 bytes). Returns LC_OK, LC_E_CRYPTO, or of a text that isn't what was sealed
 * LC_E_ARGUMENT: what is written then is worth nothing. */
int lc_text_seal(int cipher, const uint8_t *key, const uint8_t *iv, const uint8_t *known,
                 size_t n_known, const uint8_t *text, size_t n, uint8_t *sealed);
int lc_text_open(int cipher, const uint8_t *key, const uint8_t *iv, const uint8_t *known,
                 size_t n_known, const uint8_t *sealed, size_t n, uint8_t *text);
/* Header size on the wire, bytes. */
uint32_t lc_header_bytes(void);
/* Of the packets' form: ranks that differ in it can't hear each other. */
uint32_t lc_wire_version(void);
/* lc_fast_path bits that the processor and kernel offer, before any switch. */
uint32_t lc_probe(void);

/* cdef end */

/* What a datagram aside begins with: no packet does (wire.h). */
#define LC_ASIDE_MARK {'A', 'S', 'I', 'D'}
#endif
