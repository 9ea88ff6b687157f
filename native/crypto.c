/* libcrypto, opened at run time. Its headers aren't needed: what is used of it has kept its form
 * since OpenSSL 1.1, and its types stay opaque. */
#include "crypto.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CTRL_GET_TAG = 0x10, /* EVP_CTRL_AEAD_GET_TAG */
    CTRL_SET_TAG = 0x11,
    HASH_BYTES = 32,
    INFO_MAX = 64
};

typedef struct evp_cipher evp_cipher;
typedef struct evp_cipher_ctx evp_cipher_ctx;
typedef struct evp_md evp_md;

static struct {
    const evp_cipher *(*ciphers[LC_CIPHERS])(void);
    evp_cipher_ctx *(*ctx_new)(void);
    void (*ctx_free)(evp_cipher_ctx *ctx);
    int (*init)(evp_cipher_ctx *ctx, const evp_cipher *cipher, void *engine, const uint8_t *key,
                const uint8_t *iv, int encrypts);
    int (*update)(evp_cipher_ctx *ctx, uint8_t *out, int *n_out, const uint8_t *in, int n);
    int (*final)(evp_cipher_ctx *ctx, uint8_t *out, int *n_out);
    int (*ctrl)(evp_cipher_ctx *ctx, int what, int n, void *with);
    const evp_md *(*sha256)(void);
    uint8_t *(*hmac)(const evp_md *md, const void *key, int n_key, const uint8_t *data, size_t n,
                     uint8_t *out, unsigned *n_out);
    const char *(*version)(int what);
} lib;

/* What was found, and where; under the lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *missing = "it was not looked for"; /* NULL: all is there */
static char found_at[PATH_MAX];

/* ---- finding it ---- */

static const struct {
    const char *name;
    void *to;
} symbols[] = {{"EVP_aes_128_gcm", &lib.ciphers[LC_AES_128_GCM]},
               {"EVP_aes_256_gcm", &lib.ciphers[LC_AES_256_GCM]},
               {"EVP_chacha20_poly1305", &lib.ciphers[LC_CHACHA20_POLY1305]},
               {"EVP_CIPHER_CTX_new", &lib.ctx_new},
               {"EVP_CIPHER_CTX_free", &lib.ctx_free},
               {"EVP_CipherInit_ex", &lib.init},
               {"EVP_CipherUpdate", &lib.update},
               {"EVP_CipherFinal_ex", &lib.final},
               {"EVP_CIPHER_CTX_ctrl", &lib.ctrl},
               {"EVP_sha256", &lib.sha256},
               {"HMAC", &lib.hmac},
               {"OpenSSL_version", &lib.version}};

/* The one that the process has already, as Python's ssl and hashlib do, comes first: two of them in
 * one process are safe, but nobody wants that. */
static void *open_library(const char *path) {
    if (*path)
        return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so.4",
                                        "libcrypto.so"};
    const size_t n = sizeof names / sizeof *names;
    for (int loaded = 1; loaded >= 0; loaded--)
        for (size_t i = 0; i < n; i++) {
            void *found = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
            if (found)
                return found;
        }
    return NULL;
}

/* HMAC of test case 2 of RFC 4231. */
static int hashes_right(void) {
    static const uint8_t want[HASH_BYTES] = {0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e,
                                             0x6a, 0x04, 0x24, 0x26, 0x08, 0x95, 0x75, 0xc7,
                                             0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27, 0x39, 0x83,
                                             0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43};
    static const uint8_t data[] = "what do ya want for nothing?";
    uint8_t out[64];
    unsigned n = 0;
    return lib.hmac(lib.sha256(), "Jefe", 4, data, sizeof data - 1, out, &n) && n == HASH_BYTES &&
           !memcmp(out, want, n);
}

/* An empty text under a key and IV of zeros: the first cases of the GCM specification for each size
 * of key; and what RFC 8439's construction gives. */
static int seals_right(int cipher) {
    static const uint8_t tags[LC_CIPHERS][LC_TAG_BYTES] = {
        [LC_AES_128_GCM] = {0x58, 0xe2, 0xfc, 0xce, 0xfa, 0x7e, 0x30, 0x61, 0x36, 0x7f, 0x1d, 0x57,
                            0xa4, 0xe7, 0x45, 0x5a},
        [LC_AES_256_GCM] = {0x53, 0x0f, 0x8a, 0xfb, 0xc7, 0x45, 0x36, 0xb9, 0xa9, 0x63, 0xb4, 0xf1,
                            0xc4, 0xcb, 0x73, 0x8b},
        [LC_CHACHA20_POLY1305] = {0x4e, 0xb9, 0x72, 0xc9, 0xa8, 0xfb, 0x3a, 0x1b, 0x38, 0x2b, 0xb4,
                                  0xd3, 0x6f, 0x5f, 0xfa, 0xd1}};
    static const uint8_t zeros[LC_SECRET_BYTES];
    uint8_t tag[LC_TAG_BYTES];
    lc_aead *aead = lc_aead_open(cipher, 1, zeros);
    int right = aead && lc_aead_seal(aead, zeros, (struct iovec){NULL, 0}, NULL, 0, NULL, tag) &&
                !memcmp(tag, tags[cipher], sizeof tag);
    lc_aead_close(aead);
    return right;
}

static const char *loaders_reason(void) {
    static char text[256];
    const char *reason = dlerror();
    snprintf(text, sizeof text, "%s", reason ? reason : "it can't be loaded");
    return text;
}

static void load(const char *path) {
    void *found = open_library(path);
    missing = found ? NULL : *path ? loaders_reason() : "there is no libcrypto";
    for (size_t i = 0; !missing && i < sizeof symbols / sizeof *symbols; i++) {
        void *at = dlsym(found, symbols[i].name);
        memcpy(symbols[i].to, &at, sizeof at);
        if (!at)
            missing = "libcrypto lacks a function that is needed";
    }
    if (!missing && !hashes_right())
        missing = "libcrypto's HMAC gives wrong results";
    for (int cipher = LC_CIPHER_NONE + 1; !missing && cipher < LC_CIPHERS; cipher++)
        if (!seals_right(cipher))
            missing = "libcrypto's ciphers give wrong results";
}

const char *lc_crypto_load(const char *path) {
    const char *wanted = path ? path : "";
    pthread_mutex_lock(&lock);
    if (missing) {
        load(wanted);
        snprintf(found_at, sizeof found_at, "%s", wanted);
    }
    const char *why = missing;
    if (!why && *wanted && strcmp(wanted, found_at))
        why = "this process uses another library already";
    pthread_mutex_unlock(&lock);
    return why;
}

const char *lc_crypto_version(void) {
    return lc_crypto_load(NULL) ? "" : lib.version(0);
}

/* ---- a cipher ---- */

struct lc_aead {
    evp_cipher_ctx *ctx;
    int seals;
};

lc_aead *lc_aead_open(int cipher, int seals, const uint8_t *key) {
    if (cipher <= LC_CIPHER_NONE || cipher >= LC_CIPHERS || !lib.ctx_new)
        return NULL;
    lc_aead *aead = calloc(1, sizeof *aead);
    if (!aead)
        return NULL;
    aead->seals = seals;
    aead->ctx = lib.ctx_new();
    if (!aead->ctx || lib.init(aead->ctx, lib.ciphers[cipher](), NULL, key, NULL, seals) != 1) {
        lc_aead_close(aead);
        return NULL;
    }
    return aead;
}

void lc_aead_close(lc_aead *aead) {
    if (!aead)
        return;
    lib.ctx_free(aead->ctx);
    free(aead);
}

int lc_aead_set_key(lc_aead *aead, const uint8_t *key) {
    return lib.init(aead->ctx, NULL, NULL, key, NULL, aead->seals) == 1;
}

static int begin(lc_aead *aead, const uint8_t *iv, struct iovec known) {
    int n = 0;
    return lib.init(aead->ctx, NULL, NULL, NULL, iv, aead->seals) == 1 &&
           (!known.iov_len ||
            lib.update(aead->ctx, NULL, &n, known.iov_base, (int)known.iov_len) == 1);
}

/* Without `to` the bytes are known as the header is. */
static int pass(lc_aead *aead, const void *from, size_t bytes, uint8_t *to) {
    int n = 0;
    return !bytes || lib.update(aead->ctx, to, &n, from, (int)bytes) == 1;
}

int lc_aead_seal(lc_aead *aead, const uint8_t iv[LC_IV_BYTES], struct iovec known,
                 const struct iovec *pieces, int n, uint8_t *to, uint8_t tag[LC_TAG_BYTES]) {
    int rest = 0;
    if (!begin(aead, iv, known))
        return 0;
    for (int i = 0; i < n; i++) {
        if (!pass(aead, pieces[i].iov_base, pieces[i].iov_len, to))
            return 0;
        if (to)
            to += pieces[i].iov_len;
    }
    return lib.final(aead->ctx, tag, &rest) == 1 &&
           lib.ctrl(aead->ctx, CTRL_GET_TAG, LC_TAG_BYTES, tag) == 1;
}

int lc_aead_open_sealed(lc_aead *aead, const uint8_t iv[LC_IV_BYTES], struct iovec known,
                        const uint8_t *sealed, size_t n, uint8_t *to,
                        const uint8_t tag[LC_TAG_BYTES]) {
    uint8_t want[LC_TAG_BYTES];
    int rest = 0;
    memcpy(want, tag, sizeof want); /* the library takes what it may write */
    return begin(aead, iv, known) && pass(aead, sealed, n, to) &&
           lib.ctrl(aead->ctx, CTRL_SET_TAG, LC_TAG_BYTES, want) == 1 &&
           lib.final(aead->ctx, want, &rest) == 1;
}

/* ---- a text by itself ---- */

int lc_text_seal(int cipher, const uint8_t *key, const uint8_t *iv, const uint8_t *known,
                 size_t n_known, const uint8_t *text, size_t n, uint8_t *sealed) {
    struct iovec header = {(void *)(uintptr_t)known, n_known};
    struct iovec piece = {(void *)(uintptr_t)text, n};
    lc_aead *aead = lc_crypto_load(NULL) ? NULL : lc_aead_open(cipher, 1, key);
    int done = aead && lc_aead_seal(aead, iv, header, &piece, 1, sealed, sealed + n);
    lc_aead_close(aead);
    return done ? LC_OK : LC_E_CRYPTO;
}

int lc_text_open(int cipher, const uint8_t *key, const uint8_t *iv, const uint8_t *known,
                 size_t n_known, const uint8_t *sealed, size_t n, uint8_t *text) {
    struct iovec header = {(void *)(uintptr_t)known, n_known};
    lc_aead *aead = lc_crypto_load(NULL) ? NULL : lc_aead_open(cipher, 0, key);
    if (!aead)
        return LC_E_CRYPTO;
    int good = n >= LC_TAG_BYTES && lc_aead_open_sealed(aead, iv, header, sealed, n - LC_TAG_BYTES,
                                                        text, sealed + n - LC_TAG_BYTES);
    lc_aead_close(aead);
    return good ? LC_OK : LC_E_ARGUMENT;
}

/* ---- keys ---- */

int lc_hkdf_expand(const uint8_t *key, const void *info, size_t n_info, uint8_t *out, size_t n) {
    uint8_t block[HASH_BYTES + INFO_MAX + 1];
    uint8_t hash[64];
    size_t before = 0;
    if (!lib.hmac || n_info > INFO_MAX || n > 2 * HASH_BYTES)
        return 0;
    for (uint8_t number = 1; n; number++) {
        unsigned got = 0;
        memcpy(block + before, info, n_info);
        block[before + n_info] = number;
        if (!lib.hmac(lib.sha256(), key, LC_SECRET_BYTES, block, before + n_info + 1, hash, &got))
            return 0;
        size_t some = n < HASH_BYTES ? n : HASH_BYTES;
        memcpy(out, hash, some);
        memcpy(block, hash, HASH_BYTES);
        before = HASH_BYTES;
        out += some;
        n -= some;
    }
    return 1;
}
