/* Authenticated encryption and key derivation, by the system's libcrypto (OpenSSL 1.1 or 3), which
 * is opened at run time: whoever seals nothing needs none. */
#ifndef LC_CRYPTO_H
#define LC_CRYPTO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "lossycoll.h"

enum { LC_IV_BYTES = 12 };

/* A cipher with a key, for one direction; used by one thread at a time. */
typedef struct lc_aead lc_aead;

/* NULL: there is no memory, no such cipher, or no libcrypto (lc_crypto_load). */
lc_aead *lc_aead_open(int cipher, int seals, const uint8_t *key);
void lc_aead_close(lc_aead *aead);
/* From now on with this key. Returns whether it could. */
int lc_aead_set_key(lc_aead *aead, const uint8_t *key);
/* Encrypts n pieces one behind the other to `to`. `to` NULL: they stay in clear, and the tag covers
 * them. Returns 0 if the library failed: what is written then is worth nothing. */
int lc_aead_seal(lc_aead *aead, const uint8_t iv[LC_IV_BYTES], struct iovec known,
                 const struct iovec *pieces, int n, uint8_t *to, uint8_t tag[LC_TAG_BYTES]);
/* Decrypts n bytes, which may not overlap `to`, or be just there. `to` NULL: they are in clear.
 * Returns whether the tag is right; what is written otherwise is worth nothing. */
int lc_aead_open_sealed(lc_aead *aead, const uint8_t iv[LC_IV_BYTES], struct iovec known,
                        const uint8_t *sealed, size_t n, uint8_t *to,
                        const uint8_t tag[LC_TAG_BYTES]);

/* HKDF-Expand with SHA-256 (RFC 5869, section 2.3): n bytes, at most 64, of a key of
 * LC_SECRET_BYTES. Returns whether it could. */
int lc_hkdf_expand(const uint8_t *key, const void *info, size_t n_info, uint8_t *out, size_t n);

#endif
