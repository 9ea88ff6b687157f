/* Inside the shared-memory link: how a process's memory is laid out, and what the link's files
 * share. link_shm.c makes the memory and knows the peers, link_shm_move.c moves packets.
 * docs/shared-memory.md says who writes what, and what a peer can do at worst. */
#ifndef LC_LINK_SHM_H
#define LC_LINK_SHM_H

#define _GNU_SOURCE
#include "link.h"
#include "uplink.h"

#include <stdatomic.h>

enum {
    LC_SHM_VERSION = 5,
    LC_SHM_PROCESSES = 256, /* of one host, at most */
    LC_SHM_HEADER_BYTES = 8192,
    LC_SHM_ENTRIES = 512,            /* of a ring, at most; */
    LC_SHM_ENTRIES_LEAST = 64,       /* at least; a power of two */
    LC_SHM_ENTRIES_BUDGET = 4 << 20, /* for those of all rings, bytes; but the least for each */
    LC_SHM_ENTRY_BYTES = 1536,       /* a packet of an Ethernet lies in one */
    LC_SHM_HEAD_MAX = LC_SHM_ENTRY_BYTES - 16,
    LC_SHM_COPY = 16,
    LC_SHM_BUFFERS = 32,     /* for each peer, at most, */
    LC_SHM_BUDGET = 8 << 20, /* and for all of them, bytes; but two for each at least */
    LC_SHM_NONE = 0xFFFF,    /* no buffer: all of the packet is its first piece, */
    LC_SHM_INSIDE = 0xFFFE,  /* or the second piece follows it in the entry, */
    LC_SHM_INSIDE_MIN = 256  /* if it has so many bytes: fewer cost less to copy */
};

static const uint64_t LC_SHM_MAGIC = 0x314D48534C4C4F43; /* "COLLSHM1" */

/* ---- the memory of a process: its header, a ring for each peer, buffers ---- */

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint16_t process, processes;        /* its number, and how many share this machine's memory */
    uint32_t peers[12];                 /* room to grow; zero */
    _Alignas(64) _Atomic uint32_t naps; /* odd: it sleeps, and wants to be woken */
    _Alignas(64) lc_uplink_board uplinks[LC_UPLINKS];
} lc_shm_header;

/* One packet. Its first piece lies here, and all of it if there is room. Small packets thus take no
 * buffer, so that many of them may be under way. */
typedef struct {
    /* From the lowest bit: the packet's number in the ring plus one (32 bits), bytes of head (16),
     * number of the buffer that the rest is in, LC_SHM_NONE or _INSIDE (16). Written last. */
    _Atomic uint64_t word;
    uint32_t rest_bytes;
    uint32_t unused;
    uint8_t head[LC_SHM_HEAD_MAX];
} lc_shm_entry;

/* What goes to one peer, and how much of what comes from it has been taken. */
typedef struct {
    _Alignas(64) _Atomic uint32_t taken; /* packets, ever */
    _Alignas(64) lc_shm_entry entries[]; /* as many as lc_shm.entries says */
} lc_shm_ring;

_Static_assert(sizeof(lc_shm_entry) == LC_SHM_ENTRY_BYTES, "an entry is as large as it says");
_Static_assert(LC_SHM_HEAD_MAX % LC_SHM_COPY == 0, "heads are copied by so many bytes");
_Static_assert(sizeof(lc_shm_header) <= LC_SHM_HEADER_BYTES, "the header has its room");

/* ---- the link ---- */

typedef struct {
    const uint8_t *memory; /* the peer's, read-only; NULL: it isn't known */
    const lc_shm_ring *in; /* there: what it sends here */
    lc_shm_ring *out;      /* here: what goes there */
    int wake_fd; /* its pipe, opened anew: what peers do to their end doesn't change this one */
    uint16_t process;
    uint8_t broken; /* its memory holds nonsense: nothing of it is believed any more */
    uint32_t sent;  /* packets that went there, ever; */
    uint32_t freed; /* those of them whose entries and buffers are ours again */
    uint32_t holds; /* buffers that wait for it */
    uint32_t taken; /* packets that came from there, ever; */
    uint32_t told;  /* those of them that it knows to be taken */
    uint32_t woken; /* its nap that was last ended from here */
    uint16_t buffer_of[LC_SHM_ENTRIES];
} lc_shm_peer;

/* A payload buffer. It keeps what it holds until it is filled again, so a receiver that is served
 * later than others needs no copy of its own. */
typedef struct {
    uint64_t content;    /* see lc_run; 0: of one receiver */
    uint16_t users;      /* entries that name it, and that their peer has not taken */
    uint16_t to_serve;   /* receivers that haven't been given what it holds */
    uint16_t next, prev; /* in the circle of those without users */
} lc_shm_buffer;

typedef struct {
    lc_link link;
    int fd;
    int wake_fds[2]; /* a pipe: this process sleeps on the first, and gives peers the second */
    uint8_t *memory;
    size_t bytes;
    lc_shm_header *header;
    uint8_t *buffers;
    uint16_t own;     /* index of this process among those that share */
    uint16_t n_peers; /* the others */
    uint16_t share;   /* buffers that may wait for one peer */
    uint16_t entries; /* of each ring; a power of two */
    uint16_t n_buffers;
    uint16_t processes; /* entries of peer_of */
    uint16_t *peer_of;  /* by number of the process: index in peers, or LC_SHM_NONE */
    lc_shm_peer *peers;
    /* sending */
    lc_shm_buffer *buffer;  /* and one more, at which the circle begins: what it has next is filled
                               first. Three parts, in each of which the first freed is first: those
                               that nobody needs, those that were never filled, and those that some
                               receiver still needs */
    uint16_t n_idle;        /* in the circle */
    uint16_t last_unneeded; /* the last of the first part; where the circle begins: it is empty */
    uint16_t *holder;       /* by the lowest bits of a content: the buffer that may hold it */
    uint32_t holder_mask;
    uint64_t copied; /* payloads, ever */
    /* receiving */
    uint16_t turn; /* the peer whose packets are looked at first */
    uint32_t naps;
    int drains; /* the pipe may hold something */
    _Alignas(64) uint8_t heads[LC_RECEIVE_BUFFERS][LC_SHM_ENTRY_BYTES];
    lc_link_stats stats;
    lc_event event; /* kind 0: none */
} lc_shm;

static inline lc_shm *lc_shm_of(lc_link *link) {
    return (lc_shm *)(void *)link;
}
static inline const lc_shm *lc_shm_of_const(const lc_link *link) {
    return (const lc_shm *)(const void *)link;
}
/* NULL: no peer has this number. */
static inline lc_shm_peer *lc_shm_peer_of(const lc_shm *s, uint16_t process) {
    uint16_t i = process < s->processes ? s->peer_of[process] : (uint16_t)LC_SHM_NONE;
    return i == LC_SHM_NONE ? NULL : &s->peers[i];
}

/* link_shm_move.c */
int lc_shm_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno);
int lc_shm_receive(lc_link *link, lc_arrival *arrivals, int max);
int lc_shm_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer);
int lc_shm_watch(lc_link *link);
int lc_shm_descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns);

#endif
