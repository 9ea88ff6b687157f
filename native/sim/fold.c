#include "fold.h"

#include "wire.h"

static uint16_t slot_before(const lc_fold *f, uint32_t images, uint32_t op, uint16_t slot) {
    if (slot < f->fixed || slot >= LC_SLOT_MESSAGE)
        return slot;
    uint32_t at = slot - f->fixed, inside = at % f->block;
    uint32_t by = f->steps[op % LC_FOLD_OPS] * images % f->block;
    return (uint16_t)(slot - inside + (inside + f->block - by) % f->block);
}

/* Of the others, `slot` is no slot's number. */
static int names_slot(const lc_record *r) {
    return r->kind == LC_R_FIN || r->kind == LC_R_NACK || r->kind == LC_R_DONE ||
           r->kind == LC_R_ASK || r->kind == LC_R_WAIT || r->kind == LC_R_LOST;
}

static void rename_records(const lc_fold *f, uint32_t images, lc_header *header, uint8_t *records) {
    for (uint32_t i = 0; i < header->count; i++) {
        uint8_t *at = records + (size_t)i * LC_RECORD_BYTES;
        lc_record r;
        if (lc_record_get(at, &r) != LC_GOOD || !names_slot(&r))
            continue;
        r.slot = slot_before(f, images, r.op, r.slot);
        lc_record_put(at, &r);
    }
    header->op = lc_records_check(records, header->count);
}

void lc_fold_rename(const lc_fold *f, uint16_t to, uint8_t *data, size_t kept, size_t n) {
    uint32_t images = to / f->real, by = images * f->real;
    const lc_expect expect = {
        .session = f->session, .process = to, .processes = f->ranks, .payload_bytes = UINT16_MAX};
    while (kept >= LC_HEADER_BYTES) {
        size_t first = lc_wire_first(data, n);
        lc_header header;
        if (lc_wire_get(data, first, &expect, &header) != LC_GOOD)
            return;
        header.sender = (uint16_t)((header.sender + f->ranks - by) % f->ranks);
        header.receiver = (uint16_t)(header.receiver - by);
        if (header.type == LC_CONTROL)
            rename_records(f, images, &header, data + LC_HEADER_BYTES);
        else if (header.type != LC_PIECE)
            header.slot = slot_before(f, images, header.op, header.slot);
        lc_wire_put(data, &header);
        data += first;
        n -= first;
        kept = kept > first ? kept - first : 0;
    }
}
