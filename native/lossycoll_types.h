/* Types that all parts of the interface use: elements, encodings, results. */
#ifndef LOSSYCOLL_TYPES_H
#define LOSSYCOLL_TYPES_H

#include <stddef.h>
#include <stdint.h>

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

/* ---- results ---- */
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

/* A process among others: its links and its thread. */
typedef struct lc_host lc_host;
/* Some of these processes. */
typedef struct lc_group lc_group;
/* Where finished tickets come out. */
typedef struct lc_completions lc_completions;

/* cdef end */

#endif
