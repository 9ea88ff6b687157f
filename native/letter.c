#include "letter.h"

#include <stdlib.h>
#include <string.h>

enum { ELEMENT_MOST = 64, EAGER = 1 << 16, LOSSY = 1 << 17, ROUNDS = 1 << 24 };

/* ---- records: a type, b bytes of an element and what follows, c tag, d elements ---- */

static uint32_t terms_of(const lc_letter *letter) {
    uint32_t lossy = letter->lossy ? LOSSY + (uint32_t)letter->repair * ROUNDS : 0;
    return letter->element_bytes | (letter->eager ? EAGER : 0) | lossy;
}

/* Whether terms_of may have written it. */
static int terms_ok(uint32_t b) {
    uint32_t size = b % EAGER, marks = b % ROUNDS - size;
    return size >= 1 && size <= ELEMENT_MOST &&
           (marks == LOSSY || (b < ROUNDS && (marks == 0 || marks == EAGER)));
}

lc_record lc_letter_record(const lc_letter *letter) {
    return (lc_record){.kind = LC_R_MESSAGE,
                       .op = letter->number,
                       .slot = LC_SLOT_MESSAGE,
                       .a = letter->type,
                       .b = terms_of(letter),
                       .c = letter->tag,
                       .d = letter->elements};
}

int lc_letter_read(lc_letter *letter, const lc_record *r) {
    uint32_t size = r->b % EAGER;
    if (r->kind != LC_R_MESSAGE || r->slot != LC_SLOT_MESSAGE || r->round || !terms_ok(r->b) ||
        r->d > (UINT64_MAX >> 1) / size)
        return 0;
    *letter = (lc_letter){.kind = LC_LETTER_ARRIVAL,
                          .number = r->op,
                          .tag = r->c,
                          .elements = r->d,
                          .bytes = r->d * size,
                          .type = r->a,
                          .element_bytes = (uint16_t)size,
                          .eager = (r->b & EAGER) != 0,
                          .lossy = (r->b & LOSSY) != 0,
                          .repair = (uint8_t)(r->b / ROUNDS)};
    return lc_letter_is_small(letter) ? !letter->lossy : !letter->eager;
}

/* ---- packets of small messages ---- */

/* Of a receive from any rank whose message isn't known yet: what all links carry. */
static uint32_t payload_of(const lc_group *g, const lc_letter *letter) {
    if (letter->peer >= 0)
        return g->members[letter->peer].path->interface->payload_bytes;
    uint32_t least = UINT32_MAX;
    for (uint16_t i = 0; i < g->config.size; i++) {
        const lc_path *p = g->members[i].path;
        if (p && p->interface->payload_bytes < least)
            least = p->interface->payload_bytes;
    }
    return least;
}

/* Nothing is lost in memory. */
static int has_parity(const lc_group *g, const lc_letter *letter) {
    return letter->peer < 0 || !g->members[letter->peer].path->interface->link->local;
}

static uint32_t packets_of(const lc_letter *letter, uint32_t room) {
    uint64_t n = (letter->bytes + room - 1) / room;
    return n ? (uint32_t)n : 1;
}

static uint32_t bytes_in(const lc_letter *letter, uint32_t room, uint32_t k) {
    uint64_t left = letter->bytes - (uint64_t)k * room;
    return left < room ? (uint32_t)left : room;
}

static void pack(const lc_group *g, const lc_letter *letter, const uint8_t *data) {
    uint32_t room = payload_of(g, letter) - LC_RECORD_BYTES;
    uint8_t *to = letter->op->slots[0].value;
    for (uint32_t k = 0, n = packets_of(letter, room); k < n && letter->bytes; k++) {
        memcpy(to + LC_RECORD_BYTES, data + (size_t)k * room, bytes_in(letter, room, k));
        to += room + LC_RECORD_BYTES;
    }
}

void lc_letter_seal(const lc_group *g, lc_letter *letter) {
    uint8_t *to = letter->op->slots[0].value;
    uint8_t record[LC_RECORD_BYTES];
    lc_record r = lc_letter_record(letter);
    letter->op->number = letter->number;
    letter->op->quiet = letter->eager;
    if (!lc_letter_is_small(letter))
        return;
    lc_record_put(record, &r);
    uint32_t payload = payload_of(g, letter);
    for (uint32_t k = 0, n = packets_of(letter, payload - LC_RECORD_BYTES); k < n; k++)
        memcpy(to + (size_t)k * payload, record, LC_RECORD_BYTES);
}

void lc_letter_open(const lc_letter *arrival, uint8_t *data) {
    uint32_t room = payload_of(arrival->op->group, arrival) - LC_RECORD_BYTES;
    const uint8_t *from = arrival->op->slots[0].value;
    for (uint32_t k = 0, n = packets_of(arrival, room); k < n && arrival->bytes; k++) {
        memcpy(data + (size_t)k * room, from + LC_RECORD_BYTES, bytes_in(arrival, room, k));
        from += room + LC_RECORD_BYTES;
    }
}

/* ---- operations ---- */

/* One slot, or none for a small receive, which is filled out of what has arrived. */
static void describe(const lc_group *g, const lc_letter *letter, void *data, lc_call *call,
                     lc_slot_desc *slot, lc_edge *edge) {
    int sends = letter->kind == LC_LETTER_SEND;
    int small = lc_letter_is_small(letter);
    uint64_t length = letter->bytes;
    uint32_t payload = payload_of(g, letter);
    if (small)
        length += (uint64_t)packets_of(letter, payload - LC_RECORD_BYTES) * LC_RECORD_BYTES;
    uint16_t other = g->config.rank ? 0 : 1; /* of a receive from any rank: it is set later */
    edge->peer = letter->peer < 0 ? other : (uint16_t)letter->peer;
    edge->slot = LC_SLOT_MESSAGE;
    slot->length = length;
    slot->n_sources = !sends;
    slot->n_dests = sends;
    slot->combine = LC_COPY;
    slot->own = sends ? LC_OWN_INPUT : LC_OWN_NONE;
    slot->target = small ? LC_TARGET_SCRATCH : sends ? LC_TARGET_NONE : LC_TARGET_OUT;
    call->slots = slot;
    call->edges = edge;
    call->n_slots = small && letter->kind == LC_LETTER_RECEIVE ? 0 : 1;
    call->n_edges = 1;
    call->in = call->out = data;
    call->in_elements = call->out_elements = length;
    call->scratch_elements = small ? length : 0;
    call->levels[0] = (lc_level){.elements_per_packet = payload, .reliable = 1};
    if (has_parity(g, letter)) {
        call->levels[0].choose = LC_CHOOSE_PARITY;
        call->levels[0].most = LC_MAIL_PARITY;
        call->levels[0].max_missing = -1;
    }
    call->dtype = LC_BYTES;
    call->scale = 1;
}

lc_letter *lc_letter_note(const lc_letter *like) {
    lc_letter *letter = malloc(sizeof *letter);
    if (letter)
        *letter = *like;
    return letter;
}

lc_letter *lc_letter_make(lc_group *g, const lc_letter *like, void *data, int *code) {
    lc_host *h = g->host;
    lc_call call = {.n_slots = 0};
    lc_slot_desc slot = {.number = 0};
    lc_edge edge;
    int small = lc_letter_is_small(like);
    describe(g, like, data, &call, &slot, &edge);
    if (small)
        call.in = call.out = &slot; /* a place; the bytes are in the operation's own memory */
    *code = LC_E_MEMORY;
    lc_letter *letter = lc_letter_note(like);
    lc_op *op = letter ? lc_op_build(&call, g->config.rank, g->config.size, 1, g->inject_active,
                                     &h->pool, &h->pool_lock, code)
                       : NULL;
    if (!op) {
        free(letter);
        return NULL;
    }
    op->group = g;
    op->letter = letter;
    op->quiet = like->eager;
    op->number = like->number;
    letter->op = op;
    letter->data = data;
    if (op->n_slots)
        op->slots[0].desc.number = LC_SLOT_MESSAGE;
    if (small)
        op->call.in = op->call.out = NULL;
    if (small && like->kind == LC_LETTER_SEND) {
        op->slots[0].own = op->slots[0].value;
        pack(g, letter, data);
    }
    *code = LC_OK;
    return letter;
}

/* It was laid out for packets of any link, which are no larger: there is room for fewer. */
void lc_letter_cut(const lc_group *g, lc_letter *receive) {
    lc_op_slot *s = &receive->op->slots[0];
    lc_level *level = &receive->op->call.levels[0];
    uint32_t payload = payload_of(g, receive);
    if (!has_parity(g, receive)) {
        level->choose = level->most = 0;
        s->ins[0].decoder = NULL;
    }
    level->elements_per_packet = s->in_bytes = s->packet_bytes = payload;
    s->n_packets = (uint32_t)((receive->bytes + payload - 1) / payload);
}

void lc_letter_loosen(const lc_letter *receive, const lc_letter *message) {
    lc_op_slot *s = &receive->op->slots[0];
    lc_level *level = &receive->op->call.levels[0];
    uint8_t repair = receive->repair > message->repair ? receive->repair : message->repair;
    level->reliable = 0;
    level->repair = s->ins[0].rounds = repair;
    s->desc.missing = receive->missing;
}

void lc_letter_free(lc_group *g, lc_letter *letter) {
    lc_letter_move(letter, NULL);
    if (letter->op)
        lc_op_free(letter->op, &g->host->pool, &g->host->pool_lock);
    else
        free(letter);
}
