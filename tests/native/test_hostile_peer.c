/* A member that lies, or whose clocks are wrong, in virtual time: about credit, about what came,
 * about when. Honest ranks get each other's data whatever it says, their calls end in bounded time,
 * and the rank that an error names is the liar. */
#include "check.h"
#include "net.h"
#include "state.h"
#include "virtual_net.h"
#include "wire.h"

enum { RANKS = 4, LIAR = 3, PAYLOAD = 1024, SEGMENT = 64 * PAYLOAD / 4, CALLS = 4 };

static const uint64_t WAY_NS = 5000000, DEADLINE_NS = 1000000000, LINK_NS = 3000000000;
static const uint64_t TIMEOUT_NS = 8000000000;
static const double PORT_BYTES_S = 12.5e6;

typedef struct world world;

typedef struct {
    const char *name;
    void (*ack)(world *w, lc_record *r);     /* changes each acknowledgement, or */
    void (*header)(world *w, lc_header *h);  /* each header that it sends, or */
    void (*stamp)(world *w, uint64_t *came); /* when its kernel got a packet; or */
    uint64_t late_ns;                        /* its acknowledgements come so late */
    uint64_t most_ms;                        /* a call takes; 0: its timeout may end it */
} lie;

struct world {
    virtual_net v;
    const lie *lie;
    lc_link_ops ops; /* the liar's, with another receive; */
    const lc_link_ops *usual;
    uint32_t lies; /* told so far */
    lc_record old; /* an acknowledgement of before */
};

static world *the_world; /* for the link's receive */

/* ---- lies ---- */

static void grants_nothing(world *w, lc_record *r) {
    (void)w;
    r->b = 0;
}

static void grants_one(world *w, lc_record *r) {
    (void)w;
    r->b = 1;
}

static void grants_too_much(world *w, lc_record *r) {
    (void)w;
    r->b = UINT32_MAX;
}

static void never_acks(world *w, lc_record *r) {
    (void)w;
    *r = (lc_record){.kind = LC_R_WAIT, .op = UINT32_MAX - 9};
}

static void loses_half(world *w, lc_record *r) {
    if (w->lies % 2)
        never_acks(w, r);
}

/* The sender has credit again for packets that are still under way. */
static void acks_ahead(world *w, lc_record *r) {
    (void)w;
    r->a += 40;
    r->d += 40;
}

static void acks_the_unsent(world *w, lc_record *r) {
    (void)w;
    r->a += 1u << 30;
}

static void acks_behind(world *w, lc_record *r) {
    (void)w;
    r->a -= 64;
    r->d -= 64;
}

static void replays(world *w, lc_record *r) {
    if (w->lies % 50 == 1)
        w->old = *r;
    else if (w->lies % 2)
        *r = w->old;
}

static void took_none(world *w, lc_record *r) {
    (void)w;
    r->d = 0;
}

static void took_half(world *w, lc_record *r) {
    (void)w;
    r->d = r->a / 2;
}

static void took_too_much(world *w, lc_record *r) {
    (void)w;
    r->d = 2 * (uint64_t)r->a;
}

static void took_millions(world *w, lc_record *r) {
    r->d += (uint64_t)(uint32_t)(w->lies << 20);
}

static void gave_back_millions(world *w, lc_record *r) {
    r->d -= (uint64_t)(uint32_t)(w->lies << 20);
}

static void echoes_nothing(world *w, lc_record *r) {
    (void)w;
    r->c = 0;
}

static void echoes_old_times(world *w, lc_record *r) {
    (void)w;
    r->c = (r->c & ~(uint64_t)UINT32_MAX) | (uint32_t)((uint32_t)r->c - 30000000u);
}

static void echoes_the_future(world *w, lc_record *r) {
    (void)w;
    r->c += 9000;
}

static void hears_nobody(world *w, lc_record *r) {
    (void)w;
    r->slot = 0xFFFF;
}

/* ---- wrong clocks ---- */

static const uint32_t LEAP_US = 3000000;

static uint32_t leaps(const world *w) {
    return LEAP_US * (w->lies / 64);
}

static void receiver_leaps(world *w, lc_record *r) {
    r->op += leaps(w);
}

static void receiver_goes_back(world *w, lc_record *r) {
    r->op -= leaps(w);
}

static void receiver_stands(world *w, lc_record *r) {
    (void)w;
    r->op = 77;
}

static void receiver_is_fast(world *w, lc_record *r) {
    (void)w;
    r->op *= 100;
}

static void receiver_is_slow(world *w, lc_record *r) {
    (void)w;
    r->op /= 100;
}

static void sender_leaps(world *w, lc_header *h) {
    h->time_us += leaps(w);
}

static void sender_goes_back(world *w, lc_header *h) {
    h->time_us -= leaps(w);
}

static void sender_stands(world *w, lc_header *h) {
    (void)w;
    h->time_us = 5;
}

static void counts_far(world *w, lc_header *h) {
    (void)w;
    if (h->type != LC_CONTROL)
        h->link_seq += 1u << 30;
}

static void counts_nothing(world *w, lc_header *h) {
    (void)w;
    if (h->type != LC_CONTROL)
        h->link_seq = 3;
}

static void kernel_stands(world *w, uint64_t *came) {
    (void)w;
    *came = SECOND / 1000;
}

static void kernel_goes_back(world *w, uint64_t *came) {
    if (w->lies % 64 > 32)
        *came -= *came > 5 * SECOND ? 5 * SECOND : *came / 2;
}

static const lie lies[] = {
    {"none", .most_ms = 500},
    {"grants nothing", .ack = grants_nothing, .most_ms = 2000},
    {"grants one packet", .ack = grants_one, .most_ms = 2000},
    {"grants too much", .ack = grants_too_much, .most_ms = 500},
    {"never acknowledges", .ack = never_acks},
    {"loses acknowledgements", .ack = loses_half, .most_ms = 500},
    {"late acknowledgements", .late_ns = 2000000000, .most_ms = 7000},
    {"acknowledges what is under way", .ack = acks_ahead, .most_ms = 500},
    {"acknowledges what isn't sent", .ack = acks_the_unsent, .most_ms = 500},
    {"acknowledges too little", .ack = acks_behind},
    {"replays acknowledgements", .ack = replays, .most_ms = 500},
    {"says that all is lost", .ack = took_none, .most_ms = 3000},
    {"says that half is lost", .ack = took_half, .most_ms = 1000},
    {"says that more came", .ack = took_too_much, .most_ms = 500},
    {"says that millions came", .ack = took_millions, .most_ms = 500},
    {"says that millions didn't come", .ack = gave_back_millions, .most_ms = 3000},
    {"echoes no time", .ack = echoes_nothing, .most_ms = 500},
    {"echoes the time of half a minute ago", .ack = echoes_old_times},
    {"echoes the time of the future", .ack = echoes_the_future, .most_ms = 500},
    {"hears nobody", .ack = hears_nobody, .most_ms = 500},
    {"its clock leaps", .ack = receiver_leaps, .most_ms = 500},
    {"its clock goes back", .ack = receiver_goes_back, .most_ms = 500},
    {"its clock stands", .ack = receiver_stands, .most_ms = 500},
    {"its clock is fast", .ack = receiver_is_fast, .most_ms = 500},
    {"its clock is slow", .ack = receiver_is_slow, .most_ms = 500},
    {"its sending clock leaps", .header = sender_leaps, .most_ms = 500},
    {"its sending clock goes back", .header = sender_goes_back, .most_ms = 500},
    {"its sending clock stands", .header = sender_stands, .most_ms = 7000},
    {"its numbers are far ahead", .header = counts_far, .most_ms = 500},
    {"its numbers stand", .header = counts_nothing, .most_ms = 5000},
    {"its kernel's clock stands", .stamp = kernel_stands, .most_ms = 500},
    {"its kernel's clock goes back", .stamp = kernel_goes_back, .most_ms = 500},
};

/* ---- telling them ---- */

static void rewrite(world *w, uint8_t *packet, size_t n) {
    const lc_expect expect = {
        .session = 9, .process = packet[32], .processes = RANKS, .payload_bytes = PAYLOAD};
    uint8_t *records = packet + LC_HEADER_BYTES;
    lc_header h;
    if (!CHECK(lc_wire_get(packet, n, &expect, &h) == LC_GOOD))
        return;
    if (w->lie->header) {
        w->lies++;
        w->lie->header(w, &h);
    }
    for (uint16_t i = 0; h.type == LC_CONTROL && i < h.count; i++, records += LC_RECORD_BYTES) {
        lc_record r;
        if (!CHECK(lc_record_get(records, &r) == LC_GOOD) || r.kind != LC_R_ACK)
            continue;
        w->lies += w->lie->ack || w->lie->late_ns;
        if (w->lie->ack)
            w->lie->ack(w, &r);
        lc_record_put(records, &r);
    }
    if (h.type == LC_CONTROL)
        h.op = lc_records_check(packet + LC_HEADER_BYTES, h.count);
    lc_wire_put(packet, &h);
}

/* What the liar sends vanishes, and comes as it is rewritten. */
static void tap(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    world *w = context;
    uint8_t bytes[LC_HEADER_BYTES + PAYLOAD];
    size_t n = 0;
    if (from != LIAR || !CHECK(iov[0].iov_len + iov[1].iov_len <= sizeof bytes))
        return;
    for (int i = 0; i < 2; n += iov[i++].iov_len)
        memcpy(bytes + n, iov[i].iov_base, iov[i].iov_len);
    size_t first = lc_wire_first(bytes, n);
    int control = (bytes[3] & 7) == LC_CONTROL;
    rewrite(w, bytes, first);
    if (first < n)
        rewrite(w, bytes + first, n - first);
    memory_throw(w->v.net, from, to, bytes, n, WAY_NS + (control ? w->lie->late_ns : 0));
}

static int receive(lc_link *link, lc_arrival *arrivals, int max) {
    int n = the_world->usual->receive(link, arrivals, max);
    for (int i = 0; i < n; i++) {
        the_world->lies++;
        the_world->lie->stamp(the_world, &arrivals[i].came_ns);
    }
    return n;
}

static void open_world(world *w, const lie *lie, int paces_port) {
    const virtual_setup how = {.size = RANKS,
                               .payload = PAYLOAD,
                               .capacity = 400,
                               .eager_bytes = 65536,
                               .delay_ns = WAY_NS,
                               .paced = 1,
                               .paces_port = (uint8_t)paces_port,
                               .group = {.deadline_min_ns = DEADLINE_NS,
                                         .deadline_max_ns = DEADLINE_NS,
                                         .link_ns = LINK_NS,
                                         .met = 1}};
    const memory_port port = {.bytes_per_s = PORT_BYTES_S, .queue_ns = 25 * MS};
    *w = (world){.lie = lie};
    the_world = w;
    virtual_open(&w->v, &how);
    memory_set_now(w->v.net, 20 * SECOND);
    for (uint16_t i = 0; i < RANKS; i++) {
        *memory_port_up(w->v.net, i) = *memory_port_down(w->v.net, i) = port;
        memory_path_of(w->v.net, LIAR, i)->carries = 1;
    }
    memory_set_tap(w->v.net, tap, w);
    lc_link *link = w->v.host[LIAR]->interfaces[0].link;
    w->usual = link->ops;
    w->ops = *link->ops;
    w->ops.receive = receive;
    if (lie->stamp)
        link->ops = &w->ops;
}

static void close_world(world *w) {
    w->v.host[LIAR]->interfaces[0].link->ops = w->usual;
    memory_set_tap(w->v.net, NULL, NULL);
    virtual_close(&w->v);
}

/* ---- what comes of them ---- */

static int is_near(float a, float b) {
    return a - b < NET_NEAR && b - a < NET_NEAR;
}

/* Elements of honest ranks' segments that lack an honest rank's contribution, at one of them. */
static int lacks(const float *data) {
    int n = 0;
    for (int i = 0; i < LIAR * SEGMENT; i++)
        n += !is_near(data[i], mean_of_all(RANKS)) && !is_near(data[i], mean_of_all(LIAR));
    return n;
}

typedef struct {
    int64_t ticket[RANKS];
    int code[RANKS];
    uint16_t peer[RANKS];
    uint64_t took_ns[RANKS];
} call;

static void make_call(world *w, call *c, float data[RANKS][RANKS * SEGMENT], int reliable) {
    const net n = {.size = RANKS, .payload = PAYLOAD, .timeout_ns = TIMEOUT_NS};
    uint64_t begin = memory_now(w->v.net);
    int left = RANKS;
    for (uint16_t i = 0; i < RANKS; i++) {
        fill(data[i], RANKS * SEGMENT, i);
        c->code[i] = LC_PENDING;
        c->ticket[i] = net_submit_to(w->v.group[i], &n, i, 0, SEGMENT, data[i], reliable, 0, 0);
        CHECK(c->ticket[i] > 0);
    }
    while (left && memory_now(w->v.net) - begin < 2 * TIMEOUT_NS) {
        virtual_go_on(&w->v, MS);
        for (uint16_t i = 0; i < RANKS; i++) {
            lc_failure why = {.code = LC_OK};
            lc_report report;
            if (c->code[i] != LC_PENDING)
                continue;
            c->code[i] = lc_group_result(w->v.group[i], c->ticket[i], &report, &why);
            c->peer[i] = why.peer;
            c->took_ns[i] = memory_now(w->v.net) - begin;
            left -= c->code[i] != LC_PENDING;
        }
    }
    for (uint16_t i = 0; i < RANKS; i++)
        if (c->code[i] != LC_PENDING)
            lc_group_release(w->v.group[i], c->ticket[i]);
}

/* Returns whether the group can go on. */
static int check_call(const world *w, const call *c, float data[RANKS][RANKS * SEGMENT],
                      int paces_port) {
    int goes_on = 1;
    for (uint16_t i = 0; i < LIAR; i++) {
        unsigned long ms = (unsigned long)(c->took_ns[i] / MS);
        unsigned long most = (unsigned long)(w->lie->most_ms ? w->lie->most_ms : TIMEOUT_NS / MS);
        CHECK_AT(c->code[i] != LC_PENDING && ms <= most + 5, "%s, port %d: rank %u took %lu ms",
                 w->lie->name, paces_port, i, ms);
        if (c->code[i] == LC_OK) {
            CHECK_AT(lacks(data[i]) == 0, "%s, port %d: rank %u lacks %d elements", w->lie->name,
                     paces_port, i, lacks(data[i]));
            continue;
        }
        goes_on = 0;
        CHECK_AT(!w->lie->most_ms, "%s, port %d: code %d", w->lie->name, paces_port, c->code[i]);
        CHECK_AT((c->code[i] == LC_E_TIMEOUT || c->code[i] == LC_E_LINK) && c->peer[i] == LIAR,
                 "%s, port %d: code %d names %u", w->lie->name, paces_port, c->code[i], c->peer[i]);
    }
    return goes_on && c->code[LIAR] == LC_OK;
}

static void test_lie(const lie *lie, int paces_port, int reliable) {
    static float data[RANKS][RANKS * SEGMENT];
    world w;
    call c;
    open_world(&w, lie, paces_port);
    for (int i = 0; i < CALLS; i++) {
        make_call(&w, &c, data, reliable);
        if (!check_call(&w, &c, data, paces_port))
            break;
    }
    for (uint16_t i = 0; i < LIAR; i++) {
        const lc_port *law = &w.v.host[i]->interfaces[0].exits[LC_NEAR].uplink.law;
        CHECK_AT(law->rate >= 0 && law->rate < 4 * PORT_BYTES_S && law->allowed >= 0,
                 "%s, port %d: rank %u takes its port for one of %.3g bytes/s", lie->name,
                 paces_port, i, law->rate);
    }
    int lies = lie->ack || lie->header || lie->stamp || lie->late_ns;
    CHECK_AT(lies ? w.lies >= 100 : w.lies == 0, "%s: told %u times", lie->name, w.lies);
    close_world(&w);
}

/* -sample: each lie to lossy calls that pace paths, or to reliable ones that pace the port. */
int main(int argc, char **argv) {
    int sample = argc > 1 && !strcmp(argv[1], "-sample");
    for (int i = 0; i < (int)(sizeof lies / sizeof *lies); i++)
        for (int how = sample ? i % 2 * 3 : 0; how < 4; how += sample ? 4 : 1)
            test_lie(&lies[i], how / 2, how % 2);
    return check_result("test_hostile_peer");
}
