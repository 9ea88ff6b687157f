/* Which means a path asks for; see recovery_choice.h. */
#include "recovery_choice.h"

/* Reliable streams, messages for one, wait a round trip for what parity doesn't restore: one in so
 * many shall. */
static const double RARELY = 20;
/* Bytes/s that a path is taken to carry while it has never been busy for long enough to tell.
 * Without one its bytes would cost nothing, and parity would be chosen by its arithmetic alone. */
static const double USUAL_RATE = 125e6;

/* What a queue drops is answered by sending less (pace.c), never by sending more: of a path whose
 * queue stands, no more loss is believed than it had at its best, doubled, and a little. */
static double loss_to(const lc_path *p) {
    double loss = lc_loss_share(&p->loss), most = 2 * p->pace.loss + 0.02;
    return p->pace.high_rounds && loss > most ? most : loss;
}

static double reorder_s(const lc_group *g, const lc_path *p) {
    uint64_t floor = g->config.reorder_ns ? g->config.reorder_ns : LC_REORDER_NS;
    return 1e-9 * (double)lc_later(floor, p->late_ns);
}

static float wanted(const lc_op_slot *s) {
    const lc_level *level = s->level;
    return level->reliable ? (float)(1 / (RARELY * s->n_packets)) : level->max_missing;
}

static lc_recovery recovery_of(const lc_out *out) {
    const lc_op_slot *s = out->slot;
    const lc_level *level = s->level;
    lc_path *p = lc_path_to(out);
    lc_recovery_ask ask = {.loss = loss_to(p),
                           .burst = lc_loss_burst(&p->loss),
                           .rtt_s = 1e-9 * (double)p->pace.measure.rtt_ns,
                           .reorder_s = reorder_s(s->op->group, p),
                           .rate = p->rate > 0 ? p->rate : USUAL_RATE,
                           .row_rate = s->op->group->host->row_rate,
                           .packets = s->n_packets,
                           .packet_bytes = lc_wire_bytes(out),
                           .max_missing = wanted(s),
                           .choose = level->choose,
                           .rounds = level->repair,
                           .code = level->code,
                           .most = level->most};
    return lc_recovery_recall(&p->choices, &ask);
}

/* All of a slot's streams have rows of the same sets: as large, and as many rows, as the path wants
 * that wants most parity. */
static uint16_t code_of_slot(const lc_op_slot *s) {
    uint16_t found = 0;
    uint32_t most = 0;
    if (!(s->level->choose & LC_CHOOSE_PARITY))
        return lc_code_fitted(s->level->code, s->n_packets);
    for (uint32_t i = 0; i < s->desc.n_dests; i++) {
        if (s->outs[i].state == LC_OUT_DONE)
            continue;
        uint16_t code = recovery_of(&s->outs[i]).code;
        uint32_t parity = lc_shape_of(code, s->n_packets).parity;
        if (parity > most) {
            found = code;
            most = parity;
        }
    }
    return found;
}

/* Of the slot's rows as many as the path wants; all of them, if it wants sets of another size. */
static uint16_t code_of_rows(const lc_op_slot *s, uint16_t wanted) {
    uint16_t code = s->encoder->code;
    if (!wanted || !code || lc_code_k(wanted) != lc_code_k(code))
        return wanted ? code : 0;
    return lc_code_m(wanted) < lc_code_m(code) ? wanted : code;
}

void lc_choose_recovery(lc_out *out) {
    const lc_op_slot *s = out->slot;
    uint8_t choose = s->level->choose;
    if (s->encoder && !s->encoder->known)
        lc_encoder_begin(s->encoder, code_of_slot(s), s->n_packets);
    lc_recovery wanted = {.code = s->encoder ? s->encoder->code : 0, .rounds = out->rounds};
    if (choose)
        wanted = recovery_of(out);
    if (s->encoder)
        out->code = code_of_rows(s, wanted.code);
    if (choose & LC_CHOOSE_ROUNDS)
        out->rounds = wanted.rounds;
    if (choose && !s->level->reliable && s->level->max_missing >= 0) {
        lc_member *m = &s->op->group->members[out->peer];
        m->recovery = wanted;
        m->recovery.code = out->code;
        m->recovery.rounds = out->rounds;
        m->max_missing = s->level->max_missing;
    }
}
