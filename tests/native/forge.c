#include "forge.h"

#include <string.h>

#include "mailbox.h"

enum { RARELY = 100 };

uint32_t forge_below(forger *f, uint32_t limit) {
    f->random = f->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((f->random >> 32) * limit >> 32);
}

/* ---- numbers ---- */

static uint32_t any(forger *f) {
    static const uint32_t likely[] = {
        0, 1, 2, 3, 63, 64, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    return forge_below(f, 3) ? likely[forge_below(f, sizeof likely / sizeof likely[0])]
                             : forge_below(f, 0xFFFFFFFF);
}

static uint32_t near(forger *f, uint32_t v) {
    switch (forge_below(f, 4)) {
    case 0:
        return any(f);
    case 1:
        return v + forge_below(f, 5) - 2;
    case 2:
        return v ^ 1u << forge_below(f, 32);
    default:
        return v;
    }
}

static uint64_t near_wide(forger *f, uint64_t v) {
    return (uint64_t)near(f, (uint32_t)v) | (uint64_t)near(f, (uint32_t)(v >> 32)) << 32;
}

/* ---- copies that are changed ---- */

/* A call that is another one ends a group, rightly, and with it the test of it; so does a message
 * that its receive doesn't expect. Now and then will do. */
static int ends_group(forger *f, const lc_record *r) {
    int call = r->kind == LC_R_WANT || r->kind == LC_R_MISMATCH || r->kind == LC_R_MESSAGE ||
               (r->kind == LC_R_READY && r->slot != LC_SLOT_MESSAGE);
    return call && forge_below(f, RARELY);
}

static void change_record(forger *f, lc_header *h, uint8_t *at) {
    lc_record r, was;
    if (lc_record_get(at, &r) != LC_GOOD)
        return;
    was = r;
    if (forge_below(f, 3) == 0)
        r.kind = (uint8_t)(1 + forge_below(f, LC_R_LAST));
    if (forge_below(f, 16) == 0)
        r.slot = LC_SLOT_MESSAGE;
    else if (forge_below(f, 2))
        r.slot = (uint16_t)near(f, r.slot);
    r.a = near(f, r.a);
    r.b = near(f, r.b);
    r.c = near_wide(f, r.c);
    r.d = near_wide(f, r.d);
    if (ends_group(f, &r))
        r = was;
    r.op = near(f, r.op);
    r.round = (uint8_t)near(f, r.round);
    f->rule(f->context, h, &r);
    lc_record_put(at, &r);
}

static void change_data(forger *f, lc_header *h, uint8_t *payload) {
    if (forge_below(f, 8) == 0)
        h->type = forge_below(f, 2) ? LC_DATA : LC_PARITY;
    if (forge_below(f, 8) == 0)
        h->eager = !h->eager;
    h->packet = near(f, h->packet);
    if (h->slot != LC_SLOT_MESSAGE || forge_below(f, 8) == 0)
        h->slot = (uint16_t)near(f, h->slot);
    h->round = (uint8_t)near(f, h->round);
    h->count = (uint16_t)near(f, h->count);
    h->format = (uint8_t)near(f, h->format) & 7;
    h->code = (uint16_t)near(f, h->code) & 0xFFF;
    h->encoding = (uint8_t)near(f, h->encoding) & 15;
    if (forge_below(f, 3) == 0)
        h->length = (uint16_t)forge_below(f, f->payload_bytes + 1u);
    lc_record r;
    if (h->slot == LC_SLOT_MESSAGE && h->length >= LC_RECORD_BYTES &&
        lc_record_get(payload, &r) == LC_GOOD && r.kind == LC_R_MESSAGE && forge_below(f, 2)) {
        r.op = forge_below(f, 8) ? h->op : r.op;
        r.b = forge_below(f, 8) ? r.b : near(f, r.b);
        r.c = forge_below(f, 8) ? r.c : near_wide(f, r.c);
        r.d = forge_below(f, 8) ? r.d : near_wide(f, r.d);
        f->rule(f->context, h, &r);
        lc_record_put(payload, &r);
    }
}

static void change_control(forger *f, lc_header *h, forged *p) {
    uint8_t *payload = p->bytes + LC_HEADER_BYTES;
    if (forge_below(f, 8) == 0) {
        h->count = (uint16_t)(1 + forge_below(f, f->payload_bytes / LC_RECORD_BYTES));
        h->length = (uint16_t)(h->count * LC_RECORD_BYTES);
        for (size_t i = p->size; i < LC_HEADER_BYTES + (size_t)h->length; i++)
            p->bytes[i] = (uint8_t)any(f);
    }
    for (uint16_t i = 0; i < h->count; i++)
        change_record(f, h, payload + (size_t)i * LC_RECORD_BYTES);
}

static void put_check(lc_header *h, const uint8_t *payload) {
    if (h->type == LC_CONTROL && (size_t)h->count * LC_RECORD_BYTES == h->length)
        h->op = lc_records_check(payload, h->count);
}

static void put(forger *f, lc_header *h, forged *p) {
    put_check(h, p->bytes + LC_HEADER_BYTES);
    if (forge_below(f, 20) == 0)
        h->length = (uint16_t)any(f);
    lc_wire_put(p->bytes, h);
    p->size = LC_HEADER_BYTES + (size_t)h->length;
    if (p->size > LC_HEADER_BYTES + (size_t)f->payload_bytes)
        p->size = LC_HEADER_BYTES + (size_t)f->payload_bytes;
}

static int change(forger *f, forged *p) {
    lc_expect expect = {.session = f->session,
                        .process = p->to,
                        .processes = f->processes,
                        .payload_bytes = f->payload_bytes};
    lc_header h;
    if (lc_wire_get(p->bytes, p->size, &expect, &h) != LC_GOOD)
        return 0;
    h.op = near(f, h.op);
    h.link_seq = near(f, h.link_seq);
    h.time_us = near(f, h.time_us);
    if (forge_below(f, 20) == 0)
        h.group = forge_below(f, 2) ? near(f, h.group) : f->first_group + forge_below(f, f->groups);
    f->rule(f->context, &h, NULL);
    if (h.type == LC_CONTROL)
        change_control(f, &h, p);
    else
        change_data(f, &h, p->bytes + LC_HEADER_BYTES);
    f->rule(f->context, &h, NULL);
    put(f, &h, p);
    return 1;
}

/* ---- what is made from nothing ---- */

/* Sizes at which something changes. */
static uint64_t some_bytes(forger *f) {
    const uint64_t special[] = {0,
                                1,
                                f->payload_bytes - LC_RECORD_BYTES,
                                f->payload_bytes,
                                LC_MAIL_SMALL - 1,
                                LC_MAIL_SMALL,
                                LC_MAIL_SMALL + 1,
                                LC_MAIL_CREDIT,
                                UINT64_MAX / 2};
    if (forge_below(f, 2))
        return forge_below(f, 3000);
    return special[forge_below(f, sizeof special / sizeof special[0])];
}

static lc_record some_message(forger *f, uint32_t op) {
    static const uint32_t marks[] = {0, 1 << 16, 1 << 17, 1 << 17 | 2 << 24, 3 << 16, 1 << 24};
    return (lc_record){.kind = LC_R_MESSAGE,
                       .op = op,
                       .slot = LC_SLOT_MESSAGE,
                       .a = 3,
                       .b = 1u | marks[forge_below(f, sizeof marks / sizeof *marks)],
                       .c = forge_below(f, 8) ? f->tags + forge_below(f, 4) + 1
                                              : forge_below(f, f->tags + 1),
                       .d = some_bytes(f)};
}

static lc_record some_record(forger *f) {
    uint32_t op = forge_below(f, 8) ? forge_below(f, 24) : near(f, LC_MAIL_AHEAD);
    if (forge_below(f, 6) == 0)
        return some_message(f, op);
    lc_record r = {.kind = (uint8_t)(1 + forge_below(f, LC_R_LAST)),
                   .op = op,
                   .slot = (uint16_t)(forge_below(f, 2) ? LC_SLOT_MESSAGE : forge_below(f, 16)),
                   .round = (uint8_t)forge_below(f, 4)};
    if (forge_below(f, 8) == 0)
        r.slot = 0xFFFF;
    if (ends_group(f, &r))
        r.kind = LC_R_MAIL;
    switch (r.kind) {
    case LC_R_NACK:
    case LC_R_LOST:
        r.a = 128 * forge_below(f, 2);
        r.b = r.a + 1 + forge_below(f, 200);
        r.c = forge_below(f, 2) ? UINT64_MAX : forge_below(f, 0xFFFFFFFF);
        r.d = forge_below(f, 2) ? UINT64_MAX : 0;
        break;
    case LC_R_MAIL:
        r.a = forge_below(f, 2);
        r.c = forge_below(f, 2) ? some_bytes(f) : 0;
        break;
    default:
        r.a = near(f, forge_below(f, 40));
        r.b = near(f, forge_below(f, 40));
        break;
    }
    return r;
}

/* A packet of a small message that nobody sends. */
static void make_data(forger *f, lc_header *h, uint8_t *payload) {
    lc_record r = some_message(f, forge_below(f, 24));
    uint32_t room = f->payload_bytes - (uint32_t)LC_RECORD_BYTES;
    uint64_t bytes = r.d <= LC_MAIL_SMALL ? r.d : 0;
    uint32_t n = bytes ? (uint32_t)((bytes + room - 1) / room) : 1;
    h->type = forge_below(f, 8) ? LC_DATA : LC_PARITY;
    h->slot = LC_SLOT_MESSAGE;
    h->op = r.op;
    h->packet = forge_below(f, n);
    h->count = 1;
    h->format = 4;
    h->code = forge_below(f, 2) ? 0 : (uint16_t)forge_below(f, 0x1000);
    uint64_t left = bytes - (uint64_t)h->packet * room;
    h->length = (uint16_t)(LC_RECORD_BYTES + (left < room ? left : room));
    r.b |= 1u << 16;
    f->rule(f->context, h, NULL);
    f->rule(f->context, h, &r);
    memset(payload, 0x77, h->length);
    lc_record_put(payload, &r);
}

static void draw_ends(forger *f, forged *p) {
    p->from = (uint16_t)forge_below(f, f->processes);
    p->to = (uint16_t)((p->from + 1 + forge_below(f, f->processes - 1u)) % f->processes);
}

static void make(forger *f, forged *p) {
    draw_ends(f, p);
    lc_header h = {.session = f->session,
                   .group = f->first_group + forge_below(f, f->groups),
                   .type = LC_CONTROL,
                   .sender = p->from,
                   .receiver = p->to};
    uint8_t *payload = p->bytes + LC_HEADER_BYTES;
    if (forge_below(f, 3) == 0) {
        make_data(f, &h, payload);
    } else {
        f->rule(f->context, &h, NULL);
        h.count = (uint16_t)(1 + forge_below(f, 2));
        for (uint16_t i = 0; i < h.count; i++) {
            lc_record r = some_record(f);
            f->rule(f->context, &h, &r);
            lc_record_put(payload + (size_t)i * LC_RECORD_BYTES, &r);
        }
        h.length = (uint16_t)(h.count * LC_RECORD_BYTES);
    }
    put_check(&h, payload);
    lc_wire_put(p->bytes, &h);
    p->size = LC_HEADER_BYTES + (size_t)h.length;
}

/* ---- what is thrown ---- */

void forge_see(forger *f, uint16_t from, uint16_t to, const uint8_t *bytes, size_t size) {
    size_t first = lc_wire_first(bytes, size);
    int second = first < size && forge_below(f, 2);
    size_t n = second ? size - first : first;
    forged *p = &f->kept[forge_below(f, FORGE_KEPT)];
    if (n > sizeof p->bytes)
        return;
    memcpy(p->bytes, bytes + (second ? first : 0), n);
    p->size = n;
    p->from = from;
    p->to = to;
}

/* A control packet with one behind it, to the same process. */
static void put_behind(forger *f, forged *p) {
    const forged *other = &f->kept[forge_below(f, FORGE_KEPT)];
    if (!other->size || other->to != p->to || other->from != p->from ||
        p->size + other->size > LC_HEADER_BYTES + (size_t)f->payload_bytes)
        return;
    memcpy(p->bytes + p->size, other->bytes, other->size);
    p->size += other->size;
}

int forge_next(forger *f, forged *out) {
    if (forge_below(f, 4) == 0) {
        make(f, out);
    } else {
        *out = f->kept[forge_below(f, FORGE_KEPT)];
        if (!out->size)
            return 0;
        if (forge_below(f, 8) && !change(f, out)) /* else as it was, once more */
            return 0;
    }
    if (forge_below(f, 4) == 0)
        put_behind(f, out);
    return 1;
}

/* ---- sealed ---- */

void forge_see_sealed(forger *f, uint16_t from, uint16_t to, const uint8_t *bytes, size_t size) {
    forged *p = &f->kept[forge_below(f, FORGE_KEPT)];
    if (size > sizeof p->bytes)
        return;
    memcpy(p->bytes, bytes, size);
    p->size = size;
    p->from = from;
    p->to = to;
}

/* From and to whom the header says that it is, too, now and then. */
static void turn(forger *f, forged *p) {
    draw_ends(f, p);
    if (forge_below(f, 4)) {
        p->bytes[30] = (uint8_t)p->from;
        p->bytes[32] = (uint8_t)p->to;
    }
}

int forge_sealed(forger *f, forged *out) {
    uint32_t what = forge_below(f, 8);
    if (what == 0) {
        make(f, out);
        return 1;
    }
    *out = f->kept[forge_below(f, FORGE_KEPT)];
    if (!out->size)
        return 0;
    if (what == 1) /* as it was, once more */
        return 1;
    if (what == 2)
        turn(f, out);
    else if (what == 3)
        out->size = forge_below(f, (uint32_t)out->size + 1);
    else if (what == 4) /* the number, which is then new */
        out->bytes[8 + forge_below(f, 8)] ^= (uint8_t)(1 + forge_below(f, 255));
    else if (what == 5) /* the epoch */
        out->bytes[6 + forge_below(f, 2)] ^= (uint8_t)(1 + forge_below(f, 255));
    for (uint32_t n = what > 5 ? 1 + forge_below(f, 3) : 0; n; n--)
        out->bytes[forge_below(f, (uint32_t)out->size)] ^= (uint8_t)(1u << forge_below(f, 8));
    return 1;
}
