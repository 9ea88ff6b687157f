/* Arithmetic of the engine by itself, for those who predict, encode or test. */
#ifndef LOSSYCOLL_CODEC_H
#define LOSSYCOLL_CODEC_H

#include "lossycoll_plan.h"

/* cdef begin */

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

/* cdef end */

#endif
