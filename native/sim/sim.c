#include "sim.h"

#include <stdlib.h>

#include "fold.h"
#include "link_memory.h"
#include "step.h"
#include "tcp.h"
#include "wire.h"

/* A rank that says that it moved so often in a row is never done. */
enum { TURNS_MOST = 1000000, LOCAL_CAPACITY = 1 << 20, LOOKS_AGAIN = 5, AWAITED_MOST = 256 };
/* Bytes of headers, Ethernet's not counted: of TCP with timestamps, and of a datagram. */
enum { TCP_IP_BYTES = 52, UDP_IP_BYTES = 28 };

typedef int turn_function(lc_host *host);
typedef uint64_t idle_function(lc_host *host);
typedef int wait_function(lc_group *group, int64_t ticket, uint64_t timeout_ns);

typedef struct {
    lc_host *host;     /* NULL: not yet */
    uint64_t timer_ns; /* when it has something to do by itself, */
    uint64_t rests_ns; /* and it rests until then */
    uint64_t wakes_ns; /* the key of the heap */
    uint32_t at;       /* where it is in it */
    int stopped;       /* for good */
    struct {
        lc_group *group;
        int64_t ticket;
    } awaited[AWAITED_MOST];
    int n_awaited;
    uint64_t ended_ns;
    int code; /* the first that wasn't 0 */
} sim_rank;

struct lc_sim {
    lc_sim_config config;
    turn_function *turn;
    idle_function *idle_ns;
    wait_function *wait;
    memory_net *net;
    memory_net *local; /* NULL: no memory is shared */
    lc_link *links[2];
    lc_setting setting;
    lc_fold fold;
    tcp_flows *tcp;  /* NULL: none */
    sim_rank *ranks; /* and behind the last one, what wakes for gateways and TCP */
    uint16_t *heap;  /* of these: who wakes next is first */
    uint16_t places;
    int has_sites;
    uint32_t awaited;
    uint64_t turns;
};

/* ---- who wakes next ---- */

static void put_at(lc_sim *sim, uint32_t at, uint16_t rank) {
    sim->heap[at] = rank;
    sim->ranks[rank].at = at;
}

static int before(const lc_sim *sim, uint16_t a, uint16_t b) {
    uint64_t first = sim->ranks[a].wakes_ns, second = sim->ranks[b].wakes_ns;
    return first != second ? first < second : a < b;
}

static void move_up(lc_sim *sim, uint16_t rank) {
    uint32_t at = sim->ranks[rank].at;
    while (at && before(sim, rank, sim->heap[(at - 1) / 2])) {
        put_at(sim, at, sim->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    put_at(sim, at, rank);
}

static void move_down(lc_sim *sim, uint16_t rank) {
    uint32_t at = sim->ranks[rank].at, n = sim->config.ranks + 1u;
    for (uint32_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && before(sim, sim->heap[child + 1], sim->heap[child]))
            child++;
        if (!before(sim, sim->heap[child], rank))
            break;
        put_at(sim, at, sim->heap[child]);
        at = child;
    }
    put_at(sim, at, rank);
}

static void set_wakes(lc_sim *sim, uint16_t rank, uint64_t ns) {
    sim_rank *r = &sim->ranks[rank];
    uint64_t was = r->wakes_ns;
    r->wakes_ns = r->stopped ? UINT64_MAX : ns > r->rests_ns ? ns : r->rests_ns;
    if (r->wakes_ns < was)
        move_up(sim, rank);
    else if (r->wakes_ns > was)
        move_down(sim, rank);
}

static void packet_comes(void *context, uint16_t rank, uint64_t at_ns) {
    lc_sim *sim = context;
    if (at_ns < sim->ranks[rank].wakes_ns)
        set_wakes(sim, rank, at_ns);
}

/* ---- opening and closing ---- */

static memory_net *local_net(const lc_sim_config *config, lc_sim *sim) {
    uint32_t bytes = LC_HEADER_BYTES + config->local_payload;
    memory_net *net =
        memory_net_at(config->ranks, config->places, bytes, LOCAL_CAPACITY, config->seed + 1);
    memory_set_local(net, config->local_payload);
    memory_forget_payloads(net);
    memory_follow(net, sim->net);
    memory_set_wake(net, packet_comes, sim);
    return net;
}

static int are_places(const lc_sim_config *config) {
    uint16_t next = 0;
    for (uint16_t i = 0; i < config->ranks; i++) {
        if (config->places[i] > next)
            return 0;
        next = config->places[i] == next ? (uint16_t)(next + 1) : next;
    }
    return config->ranks > 0;
}

lc_sim *lc_sim_open(const lc_sim_config *config, const lc_sim_engine *engine) {
    lc_sim *sim = are_places(config) ? calloc(1, sizeof *sim) : NULL;
    if (!sim)
        return NULL;
    uint32_t bytes = LC_HEADER_BYTES + config->payload_bytes;
    bytes += config->sealed ? LC_TAG_BYTES : 0;
    sim->config = *config;
    sim->turn = (turn_function *)engine->turn;
    sim->idle_ns = (idle_function *)engine->idle_ns;
    sim->wait = (wait_function *)engine->wait;
    sim->net = memory_net_at(config->ranks, config->places, bytes, config->capacity, config->seed);
    memory_set_wire(sim->net, config->wire_bytes);
    if (!config->sealed) /* zeros wouldn't pass for what was sealed */
        memory_forget_payloads(sim->net);
    memory_set_wake(sim->net, packet_comes, sim);
    sim->local = config->local_payload ? local_net(config, sim) : NULL;
    sim->ranks = calloc(config->ranks + 1u, sizeof *sim->ranks);
    sim->heap = calloc(config->ranks + 1u, sizeof *sim->heap);
    if (!sim->ranks || !sim->heap) {
        lc_sim_close(sim);
        return NULL;
    }
    sim->config.places = NULL; /* the caller's */
    for (uint16_t i = 0; i < config->ranks; i++)
        sim->places =
            config->places[i] >= sim->places ? (uint16_t)(config->places[i] + 1) : sim->places;
    for (uint32_t i = 0; i <= config->ranks; i++) {
        sim->ranks[i].wakes_ns = UINT64_MAX;
        put_at(sim, i, (uint16_t)i);
    }
    return sim;
}

void lc_sim_close(lc_sim *sim) {
    if (sim->local)
        memory_net_free(sim->local);
    memory_net_free(sim->net);
    tcp_flows_free(sim->tcp);
    free(sim->ranks);
    free(sim->heap);
    free(sim);
}

static void rename_datagram(void *context, uint16_t to, uint8_t *data, size_t kept, size_t n) {
    const lc_sim *sim = context;
    lc_fold_rename(&sim->fold, to, data, kept, n);
}

void lc_sim_fold(lc_sim *sim, uint16_t real, uint64_t session, uint16_t fixed, uint16_t block) {
    sim->fold = (lc_fold){.ranks = sim->config.ranks,
                          .real = real,
                          .fixed = fixed,
                          .block = block,
                          .session = session};
    memory_set_fold(sim->net, real, rename_datagram, sim);
}

void lc_sim_fold_step(lc_sim *sim, uint32_t op, uint16_t step) {
    sim->fold.steps[op % LC_FOLD_OPS] = step;
}

void *lc_sim_setting(lc_sim *sim, uint16_t rank) {
    sim->links[0] = memory_link_open(sim->net, rank);
    sim->links[0]->payload_bytes = sim->config.payload_bytes; /* tags take no part of it */
    sim->links[1] = sim->local ? memory_link_open(sim->local, rank) : NULL;
    sim->setting = (lc_setting){memory_clock(sim->net), sim->links, (uint16_t)(sim->local ? 2 : 1)};
    return &sim->setting;
}

void lc_sim_take(lc_sim *sim, uint16_t rank, void *host) {
    sim->ranks[rank].host = host;
    set_wakes(sim, rank, lc_sim_now(sim));
}

/* ---- the network ---- */

static uint64_t ns_of(double ns) {
    return (uint64_t)(ns + 0.5);
}

/* What a queue or a bucket holds, in time. */
static uint64_t room_of(const lab_rate *rate) {
    return rate->bytes_per_s > 0 ? ns_of(rate->queue_bytes / rate->bytes_per_s * 1e9) : 0;
}

static void set_port(memory_port *to, const lab_rate *rate) {
    to->bytes_per_s = rate->polices ? 0 : rate->bytes_per_s;
    to->queue_ns = rate->polices ? 0 : room_of(rate);
    to->police_bytes_per_s = rate->polices ? rate->bytes_per_s : 0;
    to->police_ns = rate->polices ? room_of(rate) : 0;
}

void lc_sim_set_port(lc_sim *sim, uint16_t place, int up, const lab_rate *rate) {
    set_port(up ? memory_port_up(sim->net, place) : memory_port_down(sim->net, place), rate);
}

void lc_sim_set_sites(lc_sim *sim, const uint16_t *sites) {
    memory_set_sites(sim->net, sites);
    sim->has_sites = 1;
}

void lc_sim_set_gateway(lc_sim *sim, uint16_t site, int up, const lab_rate *rate) {
    set_port(up ? memory_gateway_out(sim->net, site) : memory_gateway_in(sim->net, site), rate);
}

void lc_sim_set_path(lc_sim *sim, uint16_t from, uint16_t to, const lab_link *link) {
    memory_path *p = memory_path_of(sim->net, from, to);
    int alone = link->begin == link->go_on; /* losses, each by itself */
    double end = 1 - link->go_on;
    p->loss = alone ? link->begin : link->begin / (link->begin + end);
    p->burst = alone ? 1 : 1 / end;
    p->cut = p->loss >= 1;
    p->ordered = link->jitter_ns > 0;
    p->delay_ns = ns_of(link->delay_ns - link->jitter_ns);
    p->jitter_ns = ns_of(p->ordered ? 2 * link->jitter_ns : link->spread_ns);
    p->late = link->reorder;
    p->late_ns = ns_of(link->hold_ns);
    p->twice = link->double_;
    p->bytes_per_s = link->rate.bytes_per_s;
    p->queue_ns = room_of(&link->rate);
}

void lc_sim_set_memory(lc_sim *sim, uint16_t place, uint64_t delay_ns, double bytes_per_s) {
    if (!sim->local)
        return;
    memory_path_of(sim->local, place, place)->delay_ns = delay_ns;
    memory_port_up(sim->local, place)->bytes_per_s = bytes_per_s;
}

int lc_sim_add_tcp(lc_sim *sim, uint16_t from, uint16_t to, int kind, double share) {
    const uint32_t more = TCP_IP_BYTES - UDP_IP_BYTES;
    uint32_t packet = LC_HEADER_BYTES + sim->config.payload_bytes;
    if (!sim->tcp)
        sim->tcp = tcp_flows_new(sim->net, packet, more, packet - more);
    int flow = sim->tcp ? tcp_flows_add(sim->tcp, from, to, kind, share) : -1;
    set_wakes(sim, sim->config.ranks, lc_sim_now(sim));
    return flow;
}

void lc_sim_tcp_took(const lc_sim *sim, int flow, uint64_t *bytes, uint64_t *resent) {
    tcp_flows_took(sim->tcp, flow, bytes, resent);
}

/* ---- time ---- */

static uint64_t next_of(const lc_sim *sim, uint16_t rank) {
    uint64_t next = sim->ranks[rank].timer_ns, arrives = memory_next(sim->net, rank);
    next = arrives < next ? arrives : next;
    if (sim->local) {
        arrives = memory_next(sim->local, rank);
        next = arrives < next ? arrives : next;
    }
    return next;
}

static void note_ends(lc_sim *sim, sim_rank *r) {
    int was = r->n_awaited;
    for (int i = r->n_awaited; i--;) {
        int code = sim->wait(r->awaited[i].group, r->awaited[i].ticket, 0);
        if (code == LC_PENDING)
            continue;
        r->code = r->code ? r->code : code;
        r->awaited[i] = r->awaited[--r->n_awaited];
    }
    if (was && !r->n_awaited) {
        r->ended_ns = memory_now(sim->net);
        sim->awaited--;
    }
}

/* A rank that has moved may have more to do, and looks again soon. */
static void take_turns(lc_sim *sim, uint16_t rank) {
    sim_rank *r = &sim->ranks[rank];
    uint64_t now = memory_now(sim->net), next;
    int turns = 0, moved;
    do {
        moved = sim->turn(r->host);
        uint64_t idle = sim->idle_ns(r->host);
        r->timer_ns = idle < UINT64_MAX - now ? now + idle : UINT64_MAX;
        next = next_of(sim, rank);
    } while (++turns < TURNS_MOST && moved && next <= now);
    sim->turns += (uint64_t)turns;
    note_ends(sim, r);
    if (moved && next > now + sim->config.grain_ns * LOOKS_AGAIN)
        r->timer_ns = now + sim->config.grain_ns * LOOKS_AGAIN;
    r->rests_ns = now + sim->config.grain_ns;
    set_wakes(sim, rank, next_of(sim, rank));
}

/* What no rank waits for: gateways, and TCP. */
static void pass_others(lc_sim *sim) {
    memory_pass_gateways(sim->net);
    if (sim->tcp)
        tcp_flows_turn(sim->tcp);
    uint64_t next = memory_next_at_gateways(sim->net);
    uint64_t timer = sim->tcp ? tcp_flows_next(sim->tcp) : UINT64_MAX;
    set_wakes(sim, sim->config.ranks, next < timer ? next : timer);
}

int lc_sim_run(lc_sim *sim, uint64_t until_ns) {
    while (sim->awaited || until_ns < UINT64_MAX) {
        uint16_t rank = sim->heap[0];
        sim_rank *r = &sim->ranks[rank];
        uint64_t now = memory_now(sim->net);
        if (r->wakes_ns >= until_ns) {
            memory_set_now(sim->net, until_ns > now ? until_ns : now);
            break;
        }
        if (r->wakes_ns > now)
            memory_set_now(sim->net, now = r->wakes_ns);
        if (rank == sim->config.ranks) {
            pass_others(sim);
            continue;
        }
        memory_advance(sim->net, rank);
        uint64_t next = next_of(sim, rank);
        if (next > now)
            set_wakes(sim, rank, next); /* what came to its port is still behind it */
        else
            take_turns(sim, rank);
        if (!sim->awaited && until_ns == UINT64_MAX)
            break;
    }
    return (int)sim->awaited;
}

uint64_t lc_sim_now(const lc_sim *sim) {
    return memory_now(sim->net);
}

int lc_sim_await(lc_sim *sim, uint16_t rank, void *group, int64_t ticket) {
    sim_rank *r = &sim->ranks[rank];
    if (r->n_awaited == AWAITED_MOST)
        return 0;
    if (!r->n_awaited) {
        sim->awaited++;
        r->code = 0;
    }
    r->awaited[r->n_awaited].group = group;
    r->awaited[r->n_awaited++].ticket = ticket;
    r->ended_ns = 0;
    r->timer_ns = lc_sim_now(sim);
    r->rests_ns = 0;
    set_wakes(sim, rank, r->timer_ns);
    return 1;
}

uint64_t lc_sim_ended(const lc_sim *sim, uint16_t rank, int *code) {
    const sim_rank *r = &sim->ranks[rank];
    *code = r->n_awaited ? LC_PENDING : r->code;
    return r->ended_ns;
}

void lc_sim_stop(lc_sim *sim, uint16_t rank) {
    sim_rank *r = &sim->ranks[rank];
    r->stopped = 1;
    sim->awaited -= r->n_awaited > 0;
    r->n_awaited = 0;
    set_wakes(sim, rank, UINT64_MAX);
}

void lc_sim_counted(const lc_sim *sim, lc_sim_counts *counts) {
    memory_counts found = memory_counts_of(sim->net);
    *counts = (lc_sim_counts){.packets = found.sent, .lost = found.lost, .turns = sim->turns};
    for (uint16_t i = 0; i < sim->places; i++) {
        const memory_port *up = memory_port_up(sim->net, i), *down = memory_port_down(sim->net, i);
        counts->bytes += up->bytes;
        counts->dropped_up += up->dropped;
        counts->dropped_down += down->dropped;
        counts->policed += up->policed + down->policed;
    }
    for (uint16_t i = 0; sim->has_sites && i < sim->places; i++) {
        const memory_port *out = memory_gateway_out(sim->net, i);
        const memory_port *in = memory_gateway_in(sim->net, i);
        counts->site_packets += out->packets;
        counts->site_bytes += out->bytes;
        counts->dropped_gateway += out->dropped + in->dropped;
        counts->policed += out->policed + in->policed;
    }
    counts->dropped_link = found.dropped - counts->dropped_up - counts->dropped_down -
                           counts->dropped_gateway - counts->policed;
    for (uint16_t i = 0; i < sim->config.ranks; i++)
        counts->overflow += memory_overflow(sim->net, i);
    if (!sim->local)
        return;
    counts->local_packets = memory_counts_of(sim->local).sent;
    for (uint16_t i = 0; i < sim->places; i++)
        counts->local_bytes += memory_port_up(sim->local, i)->bytes;
}

void lc_sim_count_until(lc_sim *sim, uint64_t at_ns) {
    memory_count_until(sim->net, at_ns);
}

void lc_sim_sent(const lc_sim *sim, uint16_t place, uint64_t *bytes) {
    for (uint16_t i = 0; i < sim->places; i++)
        bytes[i] = memory_path_of(sim->net, place, i)->bytes;
}
