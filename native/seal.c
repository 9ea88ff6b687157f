/* Keys by epochs, numbers, and the two directions of a path. */
#include "seal.h"

#include <stdlib.h>
#include <string.h>

enum { EPOCH_INFO = 16 };

static const size_t AFTER_HEADER = LC_HEADER_BYTES + LC_TAG_BYTES;

/* ---- keys ---- */

static int derive(const lc_sealing *how, const uint8_t *secret, uint64_t epoch, int seals,
                  lc_epoch_key *key) {
    /* what both ends must be agreed on */
    uint8_t info[EPOCH_INFO] = {'e', 'p', 'o', 'c', 'h', how->cipher, how->clear, LC_WIRE_VERSION};
    uint8_t out[LC_SECRET_BYTES + LC_IV_BYTES];
    for (int i = 0; i < 8; i++)
        info[8 + i] = (uint8_t)(epoch >> 8 * i);
    key->known = 0;
    if (!lc_hkdf_expand(secret, info, sizeof info, out, sizeof out))
        return 0;
    if (!key->aead)
        key->aead = lc_aead_open(how->cipher, seals, out);
    else if (!lc_aead_set_key(key->aead, out))
        return 0;
    memcpy(key->iv, out + LC_SECRET_BYTES, LC_IV_BYTES);
    key->epoch = epoch;
    key->known = key->aead != NULL;
    return key->known;
}

/* The number is added to the IV, so that no two packets under one key have the same. */
static void iv_of(const lc_epoch_key *key, uint64_t number, uint8_t iv[LC_IV_BYTES]) {
    memcpy(iv, key->iv, LC_IV_BYTES);
    for (int i = 0; i < 8; i++)
        iv[LC_IV_BYTES - 8 + i] ^= (uint8_t)(number >> 8 * i);
}

/* ---- out ---- */

static int is_worn(const lc_seal *seal, uint64_t now) {
    const lc_sealing *how = seal->how;
    return seal->out_number - seal->out_first >= LC_EPOCH_PACKETS ||
           seal->out_rekeys != atomic_load_explicit(&how->rekeys, memory_order_relaxed) ||
           (how->rekey_ns && now - seal->out_since_ns >= how->rekey_ns && seal->out_since_ns);
}

static int renew(lc_seal *seal, uint64_t now) {
    seal->out_rekeys = atomic_load_explicit(&seal->how->rekeys, memory_order_relaxed);
    seal->out_first = seal->out_number;
    seal->out_since_ns = now;
    return derive(seal->how, seal->secrets, seal->out.epoch + 1, 1, &seal->out);
}

uint32_t lc_seal_put(lc_seal *seal, const struct iovec pieces[2], uint64_t now, uint8_t *to) {
    uint8_t iv[LC_IV_BYTES];
    uint8_t *sealed = to + AFTER_HEADER, *tag = to + LC_HEADER_BYTES;
    struct iovec rest[2] = {pieces[0], pieces[1]};
    rest[0].iov_base = (uint8_t *)rest[0].iov_base + LC_HEADER_BYTES;
    rest[0].iov_len -= LC_HEADER_BYTES;
    uint32_t n = (uint32_t)(AFTER_HEADER + rest[0].iov_len + rest[1].iov_len);
    if (!seal->out_since_ns)
        seal->out_since_ns = now;
    int can = (!is_worn(seal, now) && seal->out.known) || renew(seal, now);
    memcpy(to, pieces[0].iov_base, LC_HEADER_BYTES);
    lc_wire_seal(to, seal->how->filter, (uint16_t)seal->out.epoch, seal->out_number);
    iv_of(&seal->out, seal->out_number, iv);
    seal->out_number++;
    struct iovec header = {to, LC_HEADER_BYTES};
    int clear = seal->how->clear;
    if (clear) {
        memcpy(sealed, rest[0].iov_base, rest[0].iov_len);
        memcpy(sealed + rest[0].iov_len, rest[1].iov_base, rest[1].iov_len);
    }
    can = can && lc_aead_seal(seal->out.aead, iv, header, rest, 2, clear ? NULL : sealed, tag);
    if (!can)
        memset(to, 0, n);
    return n;
}

/* ---- in ---- */

static uint64_t oldest_epoch(const lc_seal *seal) {
    return seal->in_epoch > LC_EPOCHS_BACK ? seal->in_epoch - LC_EPOCHS_BACK : 0;
}

/* The epoch of which a packet has the low bits: one of those before the newest, or any later one.
 */
static uint64_t epoch_of(const lc_seal *seal, uint16_t low) {
    uint64_t first = oldest_epoch(seal);
    return first + (uint16_t)(low - (uint16_t)first);
}

static lc_epoch_key *find_key(lc_seal *seal, uint64_t epoch) {
    for (int i = 0; i < LC_OPEN_KEYS; i++)
        if (seal->in[i].known && seal->in[i].epoch == epoch)
            return &seal->in[i];
    return NULL;
}

/* The key of an epoch, in the place of one that isn't needed; or NULL. */
static lc_epoch_key *make_key(lc_seal *seal, uint64_t epoch) {
    lc_epoch_key *place = NULL;
    for (int i = 0; i < LC_OPEN_KEYS; i++) {
        lc_epoch_key *key = &seal->in[i];
        int needed =
            key->known && key->epoch >= oldest_epoch(seal) && key->epoch <= seal->in_epoch + 1;
        if (!needed && (!place || !key->known))
            place = key;
    }
    const uint8_t *secret = seal->secrets + LC_SECRET_BYTES;
    return place && derive(seal->how, secret, epoch, 0, place) ? place : NULL;
}

/* NULL: there is none now. One that a packet claims was true if the packet opens. */
static lc_epoch_key *key_of(lc_seal *seal, uint64_t epoch, uint64_t now) {
    lc_epoch_key *key = find_key(seal, epoch);
    if (key || now < seal->claim_again_ns)
        return key;
    seal->claim_again_ns = now + LC_CLAIM_NS;
    return make_key(seal, epoch);
}

static void begin_epoch(lc_seal *seal, uint64_t epoch) {
    seal->in_epoch = epoch;
    seal->claim_again_ns = 0;
    if (!find_key(seal, epoch + 1))
        make_key(seal, epoch + 1);
}

enum lc_verdict lc_seal_take(lc_seal *seal, const uint8_t *from, uint32_t n, uint64_t session,
                             uint64_t now, uint8_t *to) {
    uint8_t iv[LC_IV_BYTES];
    uint16_t low;
    uint64_t number = lc_wire_number(from, &low);
    if (!lc_replay_is_new(&seal->replay, number))
        return LC_REPLAYED;
    lc_epoch_key *key = key_of(seal, epoch_of(seal, low), now);
    if (!key)
        return LC_FORGED;
    iv_of(key, number, iv);
    struct iovec header = {(void *)(uintptr_t)from, LC_HEADER_BYTES};
    const uint8_t *sealed = from + AFTER_HEADER;
    size_t bytes = n - AFTER_HEADER;
    int clear = seal->how->clear;
    if (!lc_aead_open_sealed(key->aead, iv, header, sealed, bytes,
                             clear ? NULL : to + LC_HEADER_BYTES, from + LC_HEADER_BYTES))
        return LC_FORGED;
    if (clear)
        memcpy(to + LC_HEADER_BYTES, sealed, bytes);
    memcpy(to, from, LC_HEADER_BYTES);
    lc_wire_unseal(to, session);
    lc_replay_note(&seal->replay, number);
    if (key->epoch > seal->in_epoch)
        begin_epoch(seal, key->epoch);
    return LC_GOOD;
}

/* ---- a path's ---- */

lc_seal *lc_seal_open(lc_sealing *how, const uint8_t *secrets) {
    lc_seal *seal = calloc(1, sizeof *seal);
    if (!seal)
        return NULL;
    seal->how = how;
    memcpy(seal->secrets, secrets, sizeof seal->secrets);
    if (derive(how, seal->secrets, 0, 1, &seal->out) && make_key(seal, 0) && make_key(seal, 1))
        return seal;
    lc_seal_close(seal);
    return NULL;
}

void lc_seal_close(lc_seal *seal) {
    if (!seal)
        return;
    lc_aead_close(seal->out.aead);
    for (int i = 0; i < LC_OPEN_KEYS; i++)
        lc_aead_close(seal->in[i].aead);
    /* what lies in freed memory may be read some day */
    volatile uint8_t *secrets = seal->secrets;
    for (size_t i = 0; i < sizeof seal->secrets; i++)
        secrets[i] = 0;
    free(seal);
}
