/* Packets' bytes; see payload.h. */
#include "payload.h"

#include <string.h>

#include "copy.h"
#include "mix.h"

static size_t place_of(const lc_op_slot *s, uint32_t k) {
    return (size_t)k * s->level->elements_per_packet * s->op->element_bytes;
}

static uint8_t *elements_of(const lc_op_slot *s, uint32_t k) {
    return s->value + place_of(s, k);
}

uint32_t lc_payload_bytes(const lc_op_slot *s, uint32_t k) {
    return (uint32_t)s->out_codec->wire_bytes(s->out_codec, lc_slot_elements(s, k));
}

uint32_t lc_payload_in_bytes(const lc_op_slot *s, uint32_t k) {
    return (uint32_t)s->in_codec->wire_bytes(s->in_codec, lc_slot_elements(s, k));
}

/* Of what is drawn to round a packet's elements; the reference executor has the same. Slots that
 * send the same part of the input, in packets of several sizes perhaps, round it alike. */
static uint64_t rounding_seed(const lc_op_slot *s, uint32_t k) {
    int is_input = s->desc.combine == LC_COPY && s->desc.own == LC_OWN_INPUT;
    uint64_t seed = lc_mix(s->op->rounding ^ (is_input ? 0 : s->desc.number + 1u));
    uint64_t begin = is_input ? s->desc.own_offset : 0;
    /* The lower half counts elements. */
    return (seed >> 32 << 32) + begin + (uint64_t)k * s->level->elements_per_packet;
}

/* Replicas are equal to the bit only if who sends a part of the result keeps what it has sent. A
 * partial sum is no part of it. */
static void encode(lc_op_slot *s, uint32_t k) {
    const lc_codec *c = s->out_codec;
    uint8_t *bytes = s->encoded + (size_t)k * s->packet_bytes;
    uint8_t *elements = elements_of(s, k);
    uint32_t n = lc_slot_elements(s, k);
    int partial = lc_is_partial(s);
    double factor = partial ? 1.0 / lc_partial_divisor(c, s->count[k]) : 1.0;
    uint64_t seed = c->low.stochastic ? rounding_seed(s, k) : 0;
    s->op->report.nan_groups += c->encode(c, bytes, elements, n, factor, seed);
    if (s->desc.target == LC_TARGET_OUT && !partial && !s->op->call.keeps_sums)
        c->decode(c, elements, bytes, n);
}

const uint8_t *lc_payload(lc_op_slot *s, uint32_t k) {
    if (!s->encoded)
        return s->sent + place_of(s, k);
    while (s->at_once && s->n_encoded <= k)
        encode(s, s->n_encoded++);
    return s->encoded + (size_t)k * s->packet_bytes;
}

void lc_payload_store(lc_op_slot *s, uint32_t k, const uint8_t *payload) {
    const lc_codec *c = s->in_codec; /* which is what it is sent on by */
    if (s->op->is_large && c->same && !s->desc.n_dests)
        lc_copy_past_caches(elements_of(s, k), payload, lc_payload_in_bytes(s, k));
    else
        c->decode(c, elements_of(s, k), payload, lc_slot_elements(s, k));
    if (s->encoded)
        memcpy(s->encoded + (size_t)k * s->packet_bytes, payload, lc_payload_bytes(s, k));
}

void lc_payload_finish(lc_op_slot *s, uint32_t k) {
    if (s->encoded)
        encode(s, k);
}
