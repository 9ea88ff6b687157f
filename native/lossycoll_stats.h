/* Figures of groups and links, and the status page. */
#ifndef LOSSYCOLL_STATS_H
#define LOSSYCOLL_STATS_H

#include "lossycoll_types.h"

/* cdef begin */

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
 * sets of ranks (uint64_t words). docs/status-reference.md has who writes what. */
enum {
    LC_PAGE_MAGIC = 0x5350434C, /* "LCPS" */
    LC_PAGE_VERSION = 1,
    LC_PAGE_GROUPS = 16,  /* groups at a time; further ones aren't told */
    LC_PAGE_CALLS = 64,   /* the latest calls of each, */
    LC_PAGE_MESSAGES = 8, /* and sends and receives that aren't done */
    LC_PAGE_TEXT = 80
};

enum lc_page_state { LC_PAGE_PRESENT = 0, LC_PAGE_ENDED = 1, LC_PAGE_LOST = 2, LC_PAGE_LEFT = 3 };

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
    uint64_t heard_ns;     /* when the engine last heard it; 0: never, */
    uint64_t heartbeat_ns; /* and the control plane */
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

/* Bytes of the status page of a process among so many. */
uint64_t lc_page_bytes(uint32_t world);
/* Writes to a status page from now on, a file of lc_page_bytes whose lc_page is filled in by its
 * caller, who may close it. Before lc_host_start. LC_OK, LC_E_ARGUMENT or LC_E_SYSTEM. */
int lc_host_page(lc_host *host, int file);
/* Notes on the page what is known of a process apart from its packets: a lc_page_state, and when it
 * last said something (0: as before). Any thread may call it. */
void lc_host_page_peer(lc_host *host, uint16_t process, int state, uint64_t heard_ns);
/* What a link says of itself; LC_E_ARGUMENT if there is none of that number. */
int lc_host_link(lc_host *host, uint16_t number, lc_link_info *info);
void lc_group_stats(lc_group *group, lc_stats *stats);
int lc_group_peer_stats(lc_group *group, int peer, lc_peer_stats *stats);

/* cdef end */

#endif
