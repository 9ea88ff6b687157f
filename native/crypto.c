/* libcrypto, opened at run time. Its headers aren't needed: what is used of it has kept its form
 * since OpenSSL 1.1, and its types stay opaque. */
#define _GNU_SOURCE
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
static int right[LC_CIPHERS]; /* it has the cipher, and that does what it must */
static char found_at[PATH_MAX];

/* ---- finding it ---- */

static const struct {
    const char *name;
    void *to;
    int needed;
} symbols[] = {{"EVP_aes_128_gcm", &lib.ciphers[LC_AES_128_GCM], 0},
               {"EVP_aes_256_gcm", &lib.ciphers[LC_AES_256_GCM], 0},
               {"EVP_chacha20_poly1305", &lib.ciphers[LC_CHACHA20_POLY1305], 0},
               {"EVP_CIPHER_CTX_new", &lib.ctx_new, 1},
               {"EVP_CIPHER_CTX_free", &lib.ctx_free, 1},
               {"EVP_CipherInit_ex", &lib.init, 1},
               {"EVP_CipherUpdate", &lib.update, 1},
               {"EVP_CipherFinal_ex", &lib.final, 1},
               {"EVP_CIPHER_CTX_ctrl", &lib.ctrl, 1},
               {"EVP_sha256", &lib.sha256, 1},
               {"HMAC", &lib.hmac, 1},
               {"OpenSSL_version", &lib.version, 1}};

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

/* HMAC of test case 1 of RFC 4231. */
static int hashes_right(void) {
    static const uint8_t want[HASH_BYTES] = {0xb0, 0x34, 0x4c, 0x61, 0xd8, 0xdb, 0x38, 0x53,
                                             0x5c, 0xa8, 0xaf, 0xce, 0xaf, 0x0b, 0xf1, 0x2b,
                                             0x88, 0x1d, 0xc2, 0x00, 0xc9, 0x83, 0x3d, 0xa7,
                                             0x26, 0xe9, 0x37, 0x6c, 0x2e, 0x32, 0xcf, 0xf7};
    static const uint8_t data[] = "Hi There";
    uint8_t key[20], out[64];
    unsigned n = 0;
    memset(key, 0x0b, sizeof key);
    return lib.hmac(lib.sha256(), key, sizeof key, data, sizeof data - 1, out, &n) &&
           n == HASH_BYTES && !memcmp(out, want, n);
}

enum { TEST_TEXT = 40, TEST_KNOWN = 20 };

static int opens(lc_aead *aead, const uint8_t *iv, const uint8_t *known, const uint8_t *sealed,
                 const uint8_t *want) {
    uint8_t out[TEST_TEXT];
    struct iovec header = {(void *)(uintptr_t)known, TEST_KNOWN};
    return lc_aead_open_sealed(aead, iv, header, sealed, TEST_TEXT, out, sealed + TEST_TEXT) &&
           !memcmp(out, want, TEST_TEXT);
}

/* Whether a text of several blocks becomes what it must, is opened again, and is not if one bit of
 * it, of its tag or of what is known is another. */
static int seals_right(int cipher) {
    static const uint8_t want[LC_CIPHERS][TEST_TEXT + LC_TAG_BYTES] = {
        [LC_AES_128_GCM] = {0x93, 0x6b, 0xa9, 0xdb, 0x7a, 0x38, 0xdd, 0x65, 0x73, 0xed, 0x27, 0xc7,
                            0x62, 0xf8, 0x12, 0x61, 0xc3, 0x51, 0x64, 0x63, 0xdf, 0x7e, 0x67, 0x57,
                            0x4e, 0x8e, 0x47, 0x90, 0xd0, 0x8f, 0x70, 0xb5, 0x65, 0x43, 0x35, 0x02,
                            0x08, 0x83, 0xbd, 0xf2, 0x81, 0x46, 0xca, 0xa3, 0xd4, 0x6b, 0xc8, 0xe2,
                            0x90, 0x17, 0x6d, 0x41, 0xe8, 0x8d, 0xec, 0x3f},
        [LC_AES_256_GCM] = {0x47, 0x05, 0xd8, 0x0e, 0xd9, 0xc6, 0xe8, 0x2a, 0xb5, 0x7e, 0xd1, 0xc6,
                            0xe5, 0xb2, 0x1a, 0x04, 0xf3, 0xa1, 0xf9, 0xb1, 0x7c, 0xe8, 0xc5, 0xdd,
                            0x90, 0xc8, 0x53, 0x38, 0xd9, 0xa2, 0xd2, 0x6b, 0xe1, 0xf7, 0x40, 0x09,
                            0x53, 0xc2, 0x18, 0x89, 0x4b, 0x4d, 0x2c, 0x45, 0x38, 0x1a, 0xbc, 0x60,
                            0xdf, 0xeb, 0xea, 0x9e, 0x19, 0xea, 0x4c, 0x5e},
        [LC_CHACHA20_POLY1305] = {
            0x89, 0xfc, 0x06, 0x15, 0x35, 0x34, 0x8f, 0x71, 0x8f, 0xbc, 0x79, 0xbe, 0xcc, 0x46,
            0x6c, 0x0a, 0xb9, 0x07, 0xcc, 0x62, 0xdd, 0xe7, 0x37, 0x18, 0x4e, 0x38, 0x99, 0x78,
            0xb1, 0x0b, 0x74, 0xe5, 0x0c, 0x67, 0xc2, 0x06, 0x1a, 0x1d, 0xbb, 0x89, 0x12, 0x96,
            0x5e, 0xd9, 0x8c, 0x17, 0xe4, 0x37, 0x4d, 0x77, 0x6c, 0xd0, 0x6c, 0x4a, 0xe2, 0x97}};
    uint8_t key[LC_SECRET_BYTES], iv[LC_IV_BYTES], known[TEST_KNOWN], text[TEST_TEXT];
    uint8_t sealed[TEST_TEXT + LC_TAG_BYTES];
    for (uint8_t i = 0; i < sizeof key; i++)
        key[i] = i;
    memcpy(iv, key, sizeof iv);
    memcpy(known, key, sizeof known);
    for (uint8_t i = 0; i < sizeof text; i++)
        text[i] = (uint8_t)(7 * i);
    struct iovec header = {known, sizeof known}, piece = {text, sizeof text};
    lc_aead *in = lc_aead_open(cipher, 0, key), *out = lc_aead_open(cipher, 1, key);
    int right = in && out && lc_aead_seal(out, iv, header, &piece, 1, sealed, sealed + TEST_TEXT) &&
                !memcmp(sealed, want[cipher], sizeof sealed) && opens(in, iv, known, sealed, text);
    uint8_t *changed[] = {sealed, sealed + TEST_TEXT - 1, sealed + TEST_TEXT, known, iv};
    for (size_t i = 0; right && i < sizeof changed / sizeof *changed; i++) {
        *changed[i] ^= 1;
        right = !opens(in, iv, known, sealed, text);
        *changed[i] ^= 1;
    }
    right = right && opens(in, iv, known, sealed, text);
    lc_aead_close(in);
    lc_aead_close(out);
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
    for (size_t i = 0; found && i < sizeof symbols / sizeof *symbols; i++) {
        void *at = dlsym(found, symbols[i].name);
        memcpy(symbols[i].to, &at, sizeof at);
        if (!at && symbols[i].needed)
            missing = "libcrypto lacks a function that is needed";
    }
    if (!missing && !hashes_right())
        missing = "libcrypto's HMAC gives wrong results";
    for (int cipher = LC_CIPHER_NONE + 1; cipher < LC_CIPHERS; cipher++)
        right[cipher] = !missing && lib.ciphers[cipher] && seals_right(cipher);
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

int lc_crypto_has(int cipher) {
    return !lc_crypto_load(NULL) && cipher > LC_CIPHER_NONE && cipher < LC_CIPHERS && right[cipher];
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
    if (cipher <= LC_CIPHER_NONE || cipher >= LC_CIPHERS || !lib.ctx_new || !lib.ciphers[cipher])
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
    lc_aead *aead = lc_crypto_has(cipher) ? lc_aead_open(cipher, 1, key) : NULL;
    int done = aead && lc_aead_seal(aead, iv, header, &piece, 1, sealed, sealed + n);
    lc_aead_close(aead);
    return done ? LC_OK : LC_E_CRYPTO;
}

int lc_text_open(int cipher, const uint8_t *key, const uint8_t *iv, const uint8_t *known,
                 size_t n_known, const uint8_t *sealed, size_t n, uint8_t *text) {
    struct iovec header = {(void *)(uintptr_t)known, n_known};
    lc_aead *aead = lc_crypto_has(cipher) ? lc_aead_open(cipher, 0, key) : NULL;
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
