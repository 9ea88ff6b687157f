/* A process that throws forged packets at the others while they work.
 *
 * In the first group it names only operations of odd numbers, and only messages from a process to
 * one of a higher number. So what even operations give, and the messages the other way, must be
 * right, whatever else happens, or end with an error. In the other groups it names everything: all
 * must end, and nothing may be written where it doesn't belong.
 *
 * Where packets are sealed it stands in the middle, and may copy and change what it likes: nothing
 * that it does may have any effect, but that of a full receive buffer. */
#include "sim_run.h"

#include <stdlib.h>
#include <string.h>

#include "forge.h"

enum { THROWN_MOST = 3000, AT_ONCE_MOST = 200, SPARED = 1, TAGS = 5 };

struct sim_forger {
    forger f;
    run *r;
    uint64_t random;
    uint64_t now; /* of the latest throws, */
    int at_once;  /* and how many there were */
};

/* Of the stream that a record is about, or of the messages that it counts. */
static int is_from_sender(const lc_record *r) {
    return r->kind == LC_R_MESSAGE || r->kind == LC_R_FIN || r->kind == LC_R_WAIT;
}

static int goes_down(uint16_t from, uint16_t to) {
    return from > to;
}

static void spare_record(const lc_header *h, lc_record *r) {
    int down =
        is_from_sender(r) ? goes_down(h->sender, h->receiver) : goes_down(h->receiver, h->sender);
    if (forge_is_message(r) && down)
        *r = (lc_record){.kind = LC_R_WAIT, .op = r->op};
    if (!forge_is_message(r))
        r->op |= 1;
}

static void spare(void *context, lc_header *h, lc_record *r) {
    (void)context;
    if (h->group != SPARED)
        return;
    if (r) {
        spare_record(h, r);
    } else if (h->type != LC_CONTROL) {
        if (h->slot == LC_SLOT_MESSAGE && goes_down(h->sender, h->receiver))
            h->slot = 0;
        if (h->slot != LC_SLOT_MESSAGE)
            h->op |= 1;
    }
}

/* What is thrown is answered, and answers are thrown at: as long as time stands still, only so
 * often. */
static int may_throw(sim_forger *me) {
    run *r = me->r;
    uint64_t now = time_of(r);
    me->at_once = now == me->now ? me->at_once + 1 : 0;
    me->now = now;
    return me->at_once < AT_ONCE_MOST && r->out->thrown < THROWN_MOST &&
           sim_happens(&me->random, r->s->forged);
}

static void see(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    sim_forger *me = context;
    run *r = me->r;
    uint8_t bytes[FORGE_MOST];
    size_t n = iov[0].iov_len + iov[1].iov_len;
    if (n > sizeof bytes)
        return;
    memcpy(bytes, iov[0].iov_base, iov[0].iov_len);
    memcpy(bytes + iov[0].iov_len, iov[1].iov_base, iov[1].iov_len);
    if (r->s->sealed)
        forge_see_sealed(&me->f, from, to, bytes, n);
    else
        forge_see(&me->f, from, to, bytes, n);
    forged thrown;
    if (!may_throw(me) || !(r->s->sealed ? forge_sealed : forge_next)(&me->f, &thrown))
        return;
    memory_net *net = r->nets[sim_below(&me->random, r->s->links)];
    memory_throw(net, thrown.from, thrown.to, thrown.bytes, thrown.size,
                 sim_below(&me->random, 2 * r->s->delay * US));
    r->out->thrown++;
}

void sim_start_forging(run *r) {
    if (!r->s->forged)
        return;
    sim_forger *me = calloc(1, sizeof *me);
    if (!me)
        abort();
    me->r = r;
    me->random = sim_mix(r->s->seed + 7);
    me->f.random = sim_mix(r->s->seed + 6);
    me->f.session = SIM_SESSION;
    me->f.processes = (uint16_t)r->s->ranks;
    me->f.payload_bytes = (uint16_t)r->s->payload;
    me->f.first_group = SPARED;
    me->f.groups = (uint32_t)r->s->groups;
    me->f.tags = TAGS;
    me->f.rule = spare;
    r->forger = me;
    for (uint64_t n = 0; n < r->s->links; n++)
        memory_set_tap(r->nets[n], see, me);
}

void sim_stop_forging(run *r) {
    free(r->forger);
    r->forger = NULL;
}

int sim_is_forgeable(int code) {
    return code == LC_E_MISMATCH || code == LC_E_ABORTED || code == LC_E_TIMEOUT ||
           code == LC_E_LINK || code == LC_E_MESSAGE || code == LC_E_MESSAGE_LATE;
}

int sim_spares_op(const run *r, uint32_t group, uint32_t number) {
    return !sim_is_open(r->s) || (group + 1 == SPARED && number % 2 == 0);
}

int sim_spares_messages(const run *r, uint32_t group, uint16_t from, uint16_t to) {
    return !sim_is_open(r->s) || (group + 1 == SPARED && goes_down(from, to));
}
