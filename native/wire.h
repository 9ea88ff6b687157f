/* The wire format: one fixed-size header, then payload. All fields are little-endian.
 *
 *   0 u16 magic      2 u8 version    3 u8 kind       4 u32 crc32c of the header, this field as 0
 *   8 u64 session   16 u32 link_seq 20 u32 op       24 u32 packet
 *  28 u16 slot      30 u16 sender   32 u16 receiver 34 u16 length (payload bytes)
 *  36 u16 count     38 u8 round     39 u8 format    40 u32 group     44 u32 time_us
 *
 * `kind` is the type in its low 3 bits, then 4 bits of lc_encoding: how elements stand in the
 * payload (codec.h). Its top bit is set in packets that are sent ahead of the peer's READY
 * (cells.h).
 *
 * A data packet carries the elements [packet * elements_per_packet, ...) of a slot. `format` is the
 * dtype in its low 3 bits. The next bit says that the packet is of the first round: then `round`
 * has the low 8 bits of the stream's code word, and the upper 4 bits of `format` the high ones. The
 * word tells a receiver from the first packet on which packets are protected together (rs.h). 0:
 * there is no parity. In later rounds `round` is the round's number, and the upper 4 bits are 0.
 * Parity packet j of a stream of n packets has `packet` = n + j (sets.h), the length of the first
 * packet of its set, and the counts of its set, coded as payloads are, as `count`.
 *
 * In control packets `round` and `format` are 0, `op` is the crc32c of their records, and `slot`
 * the bytes of the largest datagram that has come from there since the last one (packet_size.h).
 *
 * A control packet carries `count` records of 32 bytes:
 *
 *   0 u8 kind  1 u8 round  2 u16 slot  4 u32 op  8 u32 a  12 u32 b  16 u64 c  24 u64 d
 *
 * With one record, of the path alone, it may be longer: what follows is 0, and makes a probe as
 * large as the packets that it stands for (packet_size.h).
 *
 * A datagram holds one packet; or a control packet, and after it one of data or parity; or a piece
 * of a packet of data or parity that is too large for the path. A piece's payload are bytes from
 * `packet` on of that packet, header included, which has `op` of them in all. It is number `slot`
 * of `count` pieces, and `link_seq` is the packet's.
 *
 * `sender` and `receiver` are numbers of processes; `group` is 0 in control packets about the path
 * alone. A data packet's `count` is at least 1 and at most the number of processes. Its payload is
 * guarded by UDP's own checksum; the header has its own since some kernels damage the headers of
 * offloaded sends.
 *
 * A sealed datagram (seal.h) differs in its first header, and has a tag of LC_TAG_BYTES after it;
 * what follows is encrypted as a whole.
 *
 *   2 u8 version with its top bit set    4 u16 filter    6 u16 low bits of the key's epoch
 *   8 u64 number, which counts what this sender sent to this receiver, control too
 */
#ifndef LC_WIRE_H
#define LC_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum {
    LC_HEADER_BYTES = 48,
    LC_RECORD_BYTES = 32,
    LC_MAGIC = 0x4C43,
    LC_WIRE_VERSION = 8,
    LC_MAX_FORMAT = 4,       /* the largest lc_dtype */
    LC_MAX_ENCODING = 8,     /* the largest number of an lc_encoding */
    LC_SLOT_MESSAGE = 0xFFFE /* in place of a slot's number: op is a message's (letter.h) */
};

enum lc_packet_type { LC_DATA = 1, LC_CONTROL = 2, LC_PARITY = 3, LC_PIECE = 4 };

/* Fields don't stand as on the wire, where compilers would read two of them as one word (wire.c).
 */
typedef struct {
    uint64_t session;
    uint32_t op;
    uint32_t packet;
    uint32_t time_us;  /* sender's clock, echoed by LC_R_ACK */
    uint32_t link_seq; /* counts what this sender sent to this receiver, data only */
    uint32_t group;    /* 0: none */
    uint16_t slot;     /* number at the receiver */
    uint16_t sender;
    uint16_t receiver;
    uint16_t length;
    uint16_t count; /* contributions in a data packet, records in a control packet */
    uint8_t type;
    uint8_t eager;    /* sent ahead of the peer's READY */
    uint8_t format;   /* lc_dtype */
    uint8_t round;    /* 0 for the first sending, then the repair round */
    uint8_t encoding; /* lc_encoding */
    uint16_t code;    /* code word, in round 0 (sets.h) */
} lc_header;

/* What a header must say to be ours. */
typedef struct {
    uint64_t session;
    uint16_t process;
    uint16_t processes;
    uint16_t payload_bytes; /* the largest length */
    uint16_t filter;        /* of sealed datagrams */
} lc_expect;

enum lc_verdict {
    LC_GOOD = 0,
    LC_MALFORMED = 1,
    LC_FOREIGN = 2,
    LC_FORGED = 3,  /* its tag is wrong */
    LC_REPLAYED = 4 /* its number has come, or is too old to know */
};

/* What a record says, and what its fields hold beyond op, slot and round.
 *
 *   READY     a peer has posted op: send          a dtype, b 1: it can wait to hear that its
 *                                                 streams are done, c signature, d elements
 *   WANT      op is posted here; is it there?     the same
 *   FIN       this round of a stream is sent      a packets sent in it, with parity, b next
 *                                                 link_seq, c microseconds since then, d the
 *                                                 stream's code word; 0: it isn't known any more
 *   NACK      missing after a round               a first packet, b the next record's, c d bits
 *   DONE      a stream has settled                a packets missing for good
 *   ACK       the link, from its receiver         a link_seq seen + 1, b packets that may be in
 *                                                 flight, c time echo and its age, d packets taken
 *                                                 and (high half) runs of lost ones seen, op the
 *                                                 receiver's clock (us) at that packet, slot
 *                                                 milliseconds since anything came to it (0xFFFF:
 *                                                 nothing has, or that is longer), round the rate
 *                                                 of its host to other sites (lc_rate_level), told
 *                                                 to those of its own
 *   PROBE     the link, from its sender           a link_seq of the next packet
 *   MISMATCH  op means something else here        as READY
 *   ASK       a stream is silent: where is it?
 *   WAIT      it waits for its own sources or its rank, or behind older operations, or (slot
 *             0xFFFF) op is not posted yet: nothing is lost
 *   LOST      given up for good after a round     as NACK
 *   MESSAGE   op is this message                  a type, b bytes of an element, bit 16 if it comes
 *                                                 ahead, else bit 17 if packets of it may be
 *                                                 missing, and then bits 24 to 31 rounds of
 *                                                 resending; c tag, d elements
 *   MAIL      messages before op have been heard  a 1: say so, too; c bytes of credit given back
 *
 * The records about a stream, and READY, speak of a message's where slot is LC_SLOT_MESSAGE. */
enum lc_record_kind {
    LC_R_READY = 1,
    LC_R_WANT = 2,
    LC_R_FIN = 3,
    LC_R_NACK = 4,
    LC_R_DONE = 5,
    LC_R_ACK = 6,
    LC_R_PROBE = 7,
    LC_R_MISMATCH = 8,
    LC_R_ASK = 9,
    LC_R_WAIT = 10,
    LC_R_LOST = 11,
    LC_R_MESSAGE = 12,
    LC_R_MAIL = 13,
    LC_R_LAST = 13
};

typedef struct {
    uint64_t c, d;
    uint32_t op;
    uint32_t a, b;
    uint16_t slot;
    uint8_t kind;
    uint8_t round;
} lc_record;

/* Writes LC_HEADER_BYTES, checksum included. */
void lc_wire_put(uint8_t *dst, const lc_header *header);
/* The bytes of the first packet of a datagram of n bytes; n unless it is a control packet and more
 * follows. */
size_t lc_wire_first(const uint8_t *src, size_t n);
/* Checks every field of a packet of n bytes that this file can know to be right; *header is
 * valid only when the verdict is LC_GOOD. Ranges of op, slot and packet are for the engine to
 * check. */
enum lc_verdict lc_wire_get(const uint8_t *src, size_t n, const lc_expect *expect,
                            lc_header *header);
/* What can be seen of a sealed datagram of n bytes before it is opened: *sender is valid only when
 * the verdict is LC_GOOD. */
enum lc_verdict lc_wire_outer(const uint8_t *src, size_t n, const lc_expect *expect,
                              uint16_t *sender);
/* The number and the epoch's low bits in a sealed datagram's header. */
uint64_t lc_wire_number(const uint8_t *src, uint16_t *epoch);
/* Makes a header one of a sealed datagram, and a plain one again. */
void lc_wire_seal(uint8_t *header, uint16_t filter, uint16_t epoch, uint64_t number);
void lc_wire_unseal(uint8_t *header, uint64_t session);
void lc_record_put(uint8_t *dst, const lc_record *record);
/* What the header's `op` must be for n records: changed ones would be believed where UDP's checksum
 * isn't looked at, or was made anew on the way. */
uint32_t lc_records_check(const uint8_t *records, uint32_t n);
/* LC_GOOD or LC_MALFORMED (unknown kind). */
enum lc_verdict lc_record_get(const uint8_t *from, lc_record *record);

#endif
