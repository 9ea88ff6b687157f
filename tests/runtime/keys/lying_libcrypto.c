/* A libcrypto that does as a real one does, but for one lie: LIE says which, REAL where the real
 * one is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static void *real;
static const char *lie = "";

__attribute__((constructor)) static void load(void) {
    real = dlopen(getenv("REAL"), RTLD_NOW | RTLD_LOCAL);
    lie = getenv("LIE") ? getenv("LIE") : "";
}

static void *of(const char *name) {
    return dlsym(real, name);
}

#define GIVES(name)                                                                                \
    const void *name(void) {                                                                       \
        return ((const void *(*)(void))of(#name))();                                               \
    }
GIVES(EVP_aes_128_gcm)
GIVES(EVP_aes_256_gcm)
GIVES(EVP_sha256)
GIVES(EVP_CIPHER_CTX_new)

/* As where a rule of the country, or of FIPS, leaves it out. */
const void *EVP_chacha20_poly1305(void) {
    return strcmp(lie, "no chacha") ? ((const void *(*)(void))of("EVP_chacha20_poly1305"))() : NULL;
}

void EVP_CIPHER_CTX_free(void *ctx) {
    ((void (*)(void *))of("EVP_CIPHER_CTX_free"))(ctx);
}

int EVP_CipherInit_ex(void *ctx, const void *cipher, void *engine, const unsigned char *key,
                      const unsigned char *iv, int encrypts) {
    int (*init)(void *, const void *, void *, const unsigned char *, const unsigned char *, int) =
        of("EVP_CipherInit_ex");
    return init(ctx, cipher, engine, key, iv, encrypts);
}

int EVP_CipherUpdate(void *ctx, unsigned char *out, int *n_out, const unsigned char *in, int n) {
    int (*update)(void *, unsigned char *, int *, const unsigned char *, int) =
        of("EVP_CipherUpdate");
    if (!out && !strcmp(lie, "header ignored"))
        return 1;
    int done = update(ctx, out, n_out, in, n);
    if (out && !strcmp(lie, "text copied"))
        memcpy(out, in, (size_t)n);
    return done;
}

int EVP_CipherFinal_ex(void *ctx, unsigned char *out, int *n_out) {
    int done = ((int (*)(void *, unsigned char *, int *))of("EVP_CipherFinal_ex"))(ctx, out, n_out);
    return strcmp(lie, "tag ignored") ? done : 1;
}

int EVP_CIPHER_CTX_ctrl(void *ctx, int what, int n, void *with) {
    return ((int (*)(void *, int, int, void *))of("EVP_CIPHER_CTX_ctrl"))(ctx, what, n, with);
}

unsigned char *HMAC(const void *md, const void *key, int n_key, const unsigned char *data, size_t n,
                    unsigned char *out, unsigned *n_out) {
    unsigned char *(*hmac)(const void *, const void *, int, const unsigned char *, size_t,
                           unsigned char *, unsigned *) = of("HMAC");
    unsigned char *done = hmac(md, key, n_key, data, n, out, n_out);
    if (!strcmp(lie, "hash"))
        out[31] ^= 1;
    return done;
}

const char *OpenSSL_version(int what) {
    (void)what;
    return "OpenSSL 99.0.0";
}
