#include "tcp.h"

#include <stdlib.h>
#include <string.h>

/* Without an acknowledgement for so long all is taken for lost, after another twice as long. */
static const uint64_t RTO_NS = 200000000u, RTO_FIRST_NS = 1000000000u, SECOND_NS = 1000000000u;
enum { RTO_DOUBLES_MOST = 8, ACK_EVERY = 2 };

typedef struct {
    uint16_t from, to;
    tcp_law law;
    uint32_t next, acked; /* numbers of packets */
    uint32_t acked_taken;
    uint64_t rtt_ns, timer_ns;
    uint64_t sends_ns; /* for so long of each second */
    int rests;         /* until the timer */
    uint32_t timeouts; /* in a row */
    uint64_t resent;
    /* its receiver */
    uint32_t seen; /* the largest number, and one */
    uint32_t unacked;
    uint64_t taken;
} tcp_flow;

/* What a packet says. */
typedef struct {
    uint64_t sent_ns; /* by the flow's sender */
    uint32_t flow, number, taken;
    int is_ack; /* `number` is that of `seen` */
} tcp_note;

struct tcp_flows {
    memory_net *net;
    uint32_t packet, ack, payload;
    tcp_flow *flows;
    uint32_t n;
};

static void set_timer(tcp_flow *f, uint64_t now) {
    uint64_t wait = f->rtt_ns ? RTO_NS + 2 * f->rtt_ns : RTO_FIRST_NS;
    f->timer_ns = now + (wait << f->timeouts);
}

static void send_window(tcp_flows *flows, uint32_t number) {
    tcp_flow *f = &flows->flows[number];
    tcp_note note = {.sent_ns = memory_now(flows->net), .flow = number};
    f->rests = note.sent_ns % SECOND_NS >= f->sends_ns;
    if (f->rests) {
        f->timer_ns = note.sent_ns - note.sent_ns % SECOND_NS + SECOND_NS;
        return;
    }
    while (f->next - f->acked < (uint32_t)f->law.cwnd) {
        note.number = f->next++;
        memory_send_foreign(flows->net, f->from, f->to, flows->packet, &note, sizeof note);
    }
}

static void hear_data(tcp_flows *flows, tcp_flow *f, const tcp_note *note) {
    int in_order = note->number == f->seen;
    f->taken++;
    f->unacked++;
    if ((int32_t)(note->number + 1 - f->seen) > 0)
        f->seen = note->number + 1;
    if (in_order && f->unacked < ACK_EVERY)
        return;
    f->unacked = 0;
    tcp_note ack = {.sent_ns = note->sent_ns,
                    .flow = note->flow,
                    .number = f->seen,
                    .taken = (uint32_t)f->taken,
                    .is_ack = 1};
    memory_send_foreign(flows->net, f->to, f->from, flows->ack, &ack, sizeof ack);
}

static void hear_ack(tcp_flows *flows, tcp_flow *f, const tcp_note *note) {
    uint64_t now = memory_now(flows->net);
    if ((int32_t)(note->number - f->acked) <= 0)
        return;
    uint32_t moved = note->number - f->acked, taken = note->taken - f->acked_taken;
    uint32_t lost = taken < moved ? moved - taken : 0;
    f->rtt_ns = now - note->sent_ns;
    f->acked = note->number;
    f->acked_taken = note->taken;
    f->resent += lost;
    f->timeouts = 0;
    set_timer(f, now);
    tcp_law_acked(&f->law, now, f->rtt_ns, moved, lost);
    send_window(flows, note->flow);
}

static void hear(void *context, const void *bytes) {
    tcp_flows *flows = context;
    tcp_note note; /* bytes in a packet are at any address */
    memcpy(&note, bytes, sizeof note);
    tcp_flow *f = &flows->flows[note.flow];
    if (note.is_ack)
        hear_ack(flows, f, &note);
    else
        hear_data(flows, f, &note);
}

tcp_flows *tcp_flows_new(memory_net *net, uint32_t packet, uint32_t ack, uint32_t payload) {
    tcp_flows *flows = calloc(1, sizeof *flows);
    if (!flows)
        return NULL;
    *flows = (tcp_flows){.net = net, .packet = packet, .ack = ack, .payload = payload};
    memory_set_hear(net, hear, flows);
    return flows;
}

void tcp_flows_free(tcp_flows *flows) {
    if (flows)
        free(flows->flows);
    free(flows);
}

int tcp_flows_add(tcp_flows *flows, uint16_t from, uint16_t to, int kind, double share) {
    tcp_flow *more = realloc(flows->flows, (flows->n + 1) * sizeof *more);
    if (!more)
        return -1;
    flows->flows = more;
    more[flows->n] = (tcp_flow){.from = from,
                                .to = to,
                                .law = tcp_law_new(kind),
                                .sends_ns = (uint64_t)(share * (double)SECOND_NS),
                                .timer_ns = memory_now(flows->net),
                                .rests = 1};
    return (int)flows->n++;
}

void tcp_flows_turn(tcp_flows *flows) {
    uint64_t now = memory_now(flows->net);
    for (uint32_t i = 0; i < flows->n; i++) {
        tcp_flow *f = &flows->flows[i];
        if (f->timer_ns > now)
            continue;
        if (f->next && !f->rests && now % SECOND_NS < f->sends_ns) {
            f->resent += f->next - f->acked;
            f->acked = f->next;
            tcp_law_shrink(&f->law, now, 0.5);
            f->law.cwnd = ACK_EVERY;
            f->timeouts += f->timeouts < RTO_DOUBLES_MOST;
        }
        set_timer(f, now);
        send_window(flows, i);
    }
}

uint64_t tcp_flows_next(const tcp_flows *flows) {
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < flows->n; i++)
        next = flows->flows[i].timer_ns < next ? flows->flows[i].timer_ns : next;
    return next;
}

void tcp_flows_took(const tcp_flows *flows, int number, uint64_t *bytes, uint64_t *resent) {
    const tcp_flow *f = &flows->flows[number];
    *bytes = f->taken * flows->payload;
    *resent = f->resent;
}
