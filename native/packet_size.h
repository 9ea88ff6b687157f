/* How large a datagram a path carries, found out end to end (docs/packet-size.md has the states).
 * Nothing but what the peer says it got is believed: routers may say nothing of what they drop. */
#ifndef LC_PACKET_SIZE_H
#define LC_PACKET_SIZE_H

#include "wire.h"

enum {
    LC_SIZE_FLOOR = 548, /* of a datagram that every path carries: an IPv4 packet of 576 bytes */
    LC_SIZE_PROBES = 17, /* of one attempt, at most */
    LC_SIZE_DOUBTS = 3,  /* attempts before a size is given up */
    LC_SIZE_PIECES = 63, /* that a packet is cut into, at most, */
    LC_CUT_BYTES = 60000 /* and its size: the pieces of a larger one don't fit into one run */
};

/* All sizes are bytes of datagrams, without the headers of the network below. */
typedef struct {
    uint32_t want;  /* of a full packet */
    uint32_t floor; /* 0: the path's size isn't looked for, and is what is wanted */
    uint32_t size;  /* larger ones aren't sent */
    uint32_t tried; /* the largest of those sent since the peer last said that one as large came, */
    uint32_t n_tried;       /* how many of that size, */
    uint64_t many_ns;       /* when so many had gone that one should have come, */
    uint32_t many_seq;      /* and the link_seq that followed them */
    uint64_t ask_ns;        /* when larger ones are next tried; 0: not before some data is sent */
    uint64_t doubt_ns;      /* since when the size is doubted; 0: it isn't, */
    uint64_t doubt_wait_ns; /* between probes of that size, */
    uint32_t doubts;        /* and how often they have gone */
    uint64_t asked_ns;      /* when larger ones, or those, were last tried, */
    uint32_t attempts;      /* and how often since the size was last given up */
    uint64_t wait_ns;       /* between attempts, once the first have shown what the path carries */
    uint64_t fell_ns;       /* when the size was last given up; 0: never, */
    uint64_t hold_ns;       /* until when none as large */
    uint32_t vanished;      /* as those that vanished then is believed in */
    uint8_t wanted;         /* data has been sent since larger ones were last tried */
    uint8_t is_found;       /* the first attempts are over, or the wanted size has come */
    uint8_t heard;          /* some datagram has come since the size was last given up */
    uint8_t news;           /* a smaller size than wanted was found, and nobody was told */
} lc_packet_size;

/* on: whether it is looked for. */
void lc_size_begin(lc_packet_size *s, uint32_t want, int on);
/* Datagrams of so many bytes went; `next` is the link_seq of what follows them. */
void lc_size_sent(lc_packet_size *s, uint32_t bytes, uint32_t n, uint32_t next, uint64_t now);
/* The peer says that this is the largest that came since it last said so; 0: none did. */
void lc_size_came(lc_packet_size *s, uint32_t bytes, uint64_t now);
/* Doubts the size where datagrams as large vanish while what follows them arrives: `acked` is the
 * link_seq up to which the peer knows what was sent. That it is heard isn't enough, since what a
 * busy peer says may be older than the datagrams. Gives the size up where probes vanish as well. */
void lc_size_check(lc_packet_size *s, uint64_t now, uint64_t rto_ns, uint64_t heard_ns,
                   uint32_t acked);
/* Whether larger ones are to be tried now. */
static inline int lc_size_is_due(const lc_packet_size *s, uint64_t now) {
    if (s->doubt_ns)
        return s->doubts < LC_SIZE_DOUBTS && now >= s->asked_ns + s->doubt_wait_ns;
    return s->floor && s->ask_ns && s->wanted && now >= s->ask_ns;
}
/* The sizes to be tried now. Returns how many. */
uint32_t lc_size_probes(lc_packet_size *s, uint64_t now, uint64_t rto_ns,
                        uint32_t sizes[LC_SIZE_PROBES]);
/* Datagrams that a packet takes: 1, or so many pieces. bytes: of its datagram as a whole; head: of
 * what stands before the payload in that one, and before the packet's bytes in each piece. */
static inline uint32_t lc_size_pieces(const lc_packet_size *s, uint32_t bytes, uint32_t head) {
    if (bytes <= s->size)
        return 1;
    uint32_t room = s->size - head;
    return (bytes - head + LC_HEADER_BYTES + room - 1) / room;
}

#endif
