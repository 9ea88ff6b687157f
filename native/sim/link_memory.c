#include "link_memory.h"

#include <stdlib.h>
#include <string.h>

#include "uplink.h"
#include "wire.h"

enum { ARRIVALS = LC_RECEIVE_BUFFERS, ASKED_MOST = 1000, SMALL_BYTES = 256 };
/* How a packet is sent. */
enum { TOGETHER = 1, FOREIGN = 2 };

static const uint64_t WANDER_NS = 10000000; /* for so long an ordered path's delay goes one way */

static const uint64_t DAY_NS =
    1700000000000000000u; /* what the time of day is ahead of the clock */

typedef struct packet {
    struct packet *next; /* free, or received */
    uint64_t at_ns;
    uint32_t bytes;
    uint32_t kept; /* of those; the others read as zeros */
    uint16_t from, to;
    uint8_t small; /* there is room for SMALL_BYTES only */
    uint8_t far;   /* it has been through its sender's gateway */
    uint8_t how;   /* FOREIGN: its data are a note */
    uint8_t data[];
} packet;

/* What a heap compares stands in it: packets are far apart. */
typedef struct {
    uint64_t at_ns;
    uint64_t order; /* of those that come at the same time */
    packet *packet;
} under_way;

typedef struct {
    under_way *first; /* the next one */
    uint32_t n, room;
} heap;

/* A packet that was handed over: its payload is read when it leaves. */
typedef struct flight {
    struct flight *next;
    uint64_t leaves_ns;
    struct iovec payload;
    uint16_t to;
    size_t header_bytes;
    uint8_t copy[]; /* of the header, and of a payload that can't be waited for */
} flight;

typedef struct {
    lc_link link;
    lc_link_ops ops; /* those of memory, and `completed` where the net reads late */
    memory_net *net;
    uint16_t rank;
    uint64_t full_until_ns;
    int broken;                     /* errno; 0: it works */
    lc_event event;                 /* kind 0: none */
    heap to_port;                   /* under way to this rank's port */
    packet *port_first, *port_last; /* behind the port, in the order in which they come */
    packet *first, *last;           /* in the receive buffer */
    uint32_t n_buffer;
    flight *flights, *last_flight;
    uint64_t completed;
    uint64_t asked_ns; /* when it was last asked for that, and how often at that time */
    uint32_t asked;
    packet *taken[ARRIVALS]; /* by the latest receive */
    int n_taken;
    uint8_t *singly; /* by rank: what goes there doesn't go as one */
    lc_link_stats stats;
} memory_link;

struct memory_net {
    uint64_t now, random, order;
    lc_clock clock;
    const memory_net *time; /* whose time it is: itself, or another */
    uint16_t size, places;
    uint16_t *place; /* by rank */
    uint32_t packet_max, capacity, wire, local_payload;
    uint8_t *zeros; /* in place of payloads; NULL: these are kept */
    int same_host, routed;
    double full;
    uint64_t full_ns;
    uint64_t count_until_ns;
    uint64_t reads_ns; /* payloads are read so much later */
    memory_tap *tap;   /* NULL: none */
    void *tap_context;
    memory_sleep *sleep; /* NULL: none */
    void *sleep_context;
    memory_wake *wake; /* NULL: none */
    void *wake_context;
    uint16_t real; /* who stands for the others; 0: nobody has to */
    memory_rename *rename;
    void *rename_context;
    uint64_t step_ns;
    memory_counts counts;
    packet *free[2];         /* for all, and small ones */
    memory_link **links;     /* by rank */
    lc_uplink_board *boards; /* by rank, where they share memory */
    memory_path *paths;      /* by the place that they are from, and to */
    memory_port *up, *down;  /* by place */
    uint16_t *site;          /* by place; NULL: there is one */
    memory_port *out, *in;   /* gateways, by site */
    heap crossing;           /* under way to a gateway */
    heap foreign;            /* behind the last port */
    memory_hear *hear;
    void *hear_context;
};

static uint64_t time_of(const memory_net *net) {
    return net->time->now;
}

static void *zeros(size_t n, size_t bytes) {
    void *made = calloc(n, bytes);
    if (!made)
        abort();
    return made;
}

/* ---- chance ---- */

static uint64_t draw(memory_net *net) {
    uint64_t x = net->random += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static int happens(memory_net *net, double share) {
    return share > 0 && (double)(draw(net) >> 11) * 0x1p-53 < share;
}

static uint64_t up_to(memory_net *net, uint64_t most) {
    return most ? draw(net) % (most + 1) : 0;
}

static int is_lost(memory_net *net, memory_path *path) {
    if (path->cut)
        return 1;
    if (path->loss <= 0)
        return 0;
    if (path->burst <= 1)
        return happens(net, path->loss);
    double leave = 1 / path->burst;
    double enter = path->loss * leave / (1 - path->loss);
    path->in_burst = path->in_burst ? !happens(net, leave) : happens(net, enter);
    return path->in_burst;
}

/* ---- packets under way: a heap ---- */

static int before(const under_way *a, const under_way *b) {
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void heap_put(memory_net *net, heap *h, packet *p) {
    if (h->n == h->room) {
        h->room = h->room ? 2 * h->room : 64;
        h->first = realloc(h->first, h->room * sizeof *h->first);
        if (!h->first)
            abort();
    }
    const under_way one = {p->at_ns, net->order++, p};
    uint32_t i = h->n++;
    while (i && before(&one, &h->first[(i - 1) / 2])) {
        h->first[i] = h->first[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->first[i] = one;
}

static packet *heap_take(heap *h) {
    packet *top = h->first[0].packet;
    under_way last = h->first[--h->n];
    uint32_t i = 0;
    for (uint32_t child = 1; child < h->n; child = 2 * i + 1) {
        if (child + 1 < h->n && before(&h->first[child + 1], &h->first[child]))
            child++;
        if (!before(&h->first[child], &last))
            break;
        h->first[i] = h->first[child];
        i = child;
    }
    h->first[i] = last;
    return top;
}

static uint64_t next_in(const heap *h) {
    return h->n ? h->first[0].at_ns : UINT64_MAX;
}

static packet *new_packet(memory_net *net, size_t bytes) {
    int small = bytes <= SMALL_BYTES;
    packet *p = net->free[small];
    if (p)
        net->free[small] = p->next;
    else
        p = malloc(sizeof *p + (small ? SMALL_BYTES : net->packet_max));
    if (!p)
        abort();
    p->small = (uint8_t)small;
    return p;
}

static void drop_packet(memory_net *net, packet *p) {
    p->next = net->free[p->small];
    net->free[p->small] = p;
}

/* ---- sending ---- */

/* A payload that need not be kept. What follows a control packet's header alone are its records. */
static int has_payload(const memory_net *net, const struct iovec *iov) {
    const uint8_t *header = iov[0].iov_base;
    return net->zeros && (iov[0].iov_len != LC_HEADER_BYTES || (header[3] & 7) != LC_CONTROL);
}

/* Who is simulated in its place. */
static uint16_t stands_for(const memory_net *net, uint16_t rank) {
    return net->real ? rank % net->real : rank;
}

static packet *new_copy(memory_net *net, uint16_t from, uint16_t to, const struct iovec *iov,
                        uint64_t at_ns) {
    size_t kept = iov[0].iov_len + (has_payload(net, iov) ? 0 : iov[1].iov_len);
    packet *p = new_packet(net, kept);
    memcpy(p->data, iov[0].iov_base, iov[0].iov_len);
    if (kept > iov[0].iov_len)
        memcpy(p->data + iov[0].iov_len, iov[1].iov_base, iov[1].iov_len);
    p->kept = (uint32_t)kept;
    p->bytes = (uint32_t)(iov[0].iov_len + iov[1].iov_len);
    p->at_ns = at_ns;
    p->from = from;
    p->to = to;
    p->far = 0;
    p->how = 0;
    return p;
}

/* On its last way, to its receiver's port. */
static void post(memory_net *net, packet *p) {
    uint16_t stands = stands_for(net, p->to);
    if (stands != p->to) {
        net->rename(net->rename_context, p->to, p->data, p->kept, p->bytes);
        p->from = (uint16_t)((p->from + net->size - (p->to - stands)) % net->size);
        p->to = stands;
    }
    memory_link *l = net->links[p->to];
    int first = !l->first && !l->port_first && p->at_ns < next_in(&l->to_port);
    heap_put(net, &l->to_port, p);
    if (first && net->wake)
        net->wake(net->wake_context, p->to, p->at_ns);
}

/* To a gateway: that of its sender's site, or of its receiver's. */
static void post_to_gateway(memory_net *net, packet *p) {
    int first = p->at_ns < next_in(&net->crossing);
    heap_put(net, &net->crossing, p);
    if (first && net->wake)
        net->wake(net->wake_context, net->size, p->at_ns);
}

/* To whoever hears foreign packets. */
static void post_to_hearer(memory_net *net, packet *p) {
    int first = p->at_ns < next_in(&net->foreign);
    heap_put(net, &net->foreign, p);
    if (first && net->wake)
        net->wake(net->wake_context, net->size, p->at_ns);
}

/* When a packet that comes to a bottleneck leaves it; 0: it is dropped. */
static uint64_t passes(uint64_t at_ns, size_t bytes, double bytes_per_s, uint64_t queue_ns,
                       uint64_t *free_ns) {
    if (bytes_per_s <= 0)
        return at_ns;
    uint64_t begin = *free_ns > at_ns ? *free_ns : at_ns;
    uint64_t leaves = begin + (uint64_t)((double)bytes / bytes_per_s * 1e9);
    if (queue_ns && leaves - at_ns > queue_ns)
        return 0;
    *free_ns = leaves;
    return leaves;
}

/* A token bucket: what finds too few is dropped, and nothing waits. */
static int is_policed(memory_port *port, uint64_t now, size_t bytes) {
    double rate = port->police_bytes_per_s, most = rate * 1e-9 * (double)port->police_ns;
    if (rate <= 0)
        return 0;
    if (port->filled_ns)
        port->tokens += rate * 1e-9 * (double)(now - port->filled_ns);
    if (!port->filled_ns || port->tokens > most)
        port->tokens = most;
    port->filled_ns = now;
    if (port->tokens < (double)bytes)
        return 1;
    port->tokens -= (double)bytes;
    return 0;
}

/* As of a path. 0: it is dropped. */
static uint64_t passes_port(memory_net *net, memory_port *port, uint64_t at_ns, size_t bytes,
                            int how) {
    int counts = !(how & FOREIGN);
    port->packets += (uint64_t)counts;
    port->bytes += counts ? bytes : 0;
    uint64_t leaves = passes(at_ns, bytes, port->bytes_per_s, port->queue_ns, &port->free_ns);
    if (!leaves) {
        port->dropped += (uint64_t)counts;
    } else if (is_policed(port, leaves, bytes)) {
        port->policed += (uint64_t)counts;
        leaves = 0;
    }
    net->counts.dropped += counts && !leaves;
    return leaves;
}

/* Between 0 and jitter_ns, and never so that order changes. */
static uint64_t wanders(memory_net *net, memory_path *path, uint64_t at_ns) {
    if (!path->turn_ns || at_ns >= path->turn_ns + WANDER_NS) {
        path->jitter_from = path->jitter_to;
        path->jitter_to = up_to(net, path->jitter_ns);
        path->turn_ns = at_ns;
    }
    double share = (double)(at_ns - path->turn_ns) / (double)WANDER_NS;
    double from = (double)path->jitter_from, to = (double)path->jitter_to;
    uint64_t at = at_ns + path->delay_ns + (uint64_t)(from + (to - from) * share);
    path->last_ns = at > path->last_ns ? at : path->last_ns;
    return path->last_ns;
}

static int is_far(const memory_net *net, uint16_t from, uint16_t to) {
    return net->site && net->site[net->place[from]] != net->site[net->place[to]];
}

/* Through the link between two places: what leaves the port, or the gateway, at that time. */
static void cross(memory_net *net, uint16_t from, uint16_t to, const struct iovec *iov,
                  uint64_t leaves, int how) {
    memory_path *path = memory_path_of(net, net->place[from], net->place[to]);
    size_t bytes = iov[0].iov_len + iov[1].iov_len + net->wire;
    leaves = passes(leaves, bytes, path->bytes_per_s, path->queue_ns, &path->free_ns);
    int counts = !(how & FOREIGN);
    if (!leaves) {
        net->counts.dropped += (uint64_t)counts;
        return;
    }
    int vanishes = (path->carries && bytes > path->carries) || (path->single && how & TOGETHER);
    if (vanishes || is_lost(net, path) || !net->links[stands_for(net, to)]) {
        net->counts.vanished += (uint64_t)(vanishes && counts);
        net->counts.lost += (uint64_t)counts;
        return;
    }
    int times = counts && happens(net, path->twice) ? 2 : 1;
    net->counts.doubled += (uint64_t)times - 1;
    for (; times; times--) {
        uint64_t at = path->ordered ? wanders(net, path, leaves)
                                    : leaves + path->delay_ns + up_to(net, path->jitter_ns);
        if (happens(net, path->late))
            at += path->late_ns;
        packet *p = new_copy(net, from, to, iov, at);
        p->far = (uint8_t)is_far(net, from, to);
        p->how = (uint8_t)how;
        if (p->far)
            post_to_gateway(net, p);
        else
            post(net, p);
    }
}

static void send_by_port(memory_net *net, uint16_t from, uint16_t to, const struct iovec *iov,
                         int how) {
    size_t bytes = iov[0].iov_len + iov[1].iov_len + net->wire;
    uint64_t leaves = passes_port(net, &net->up[net->place[from]], time_of(net), bytes, how);
    if (leaves && !(how & FOREIGN) && time_of(net) <= net->count_until_ns)
        memory_path_of(net, net->place[from], net->place[to])->bytes += bytes;
    if (leaves && is_far(net, from, to)) {
        packet *p = new_copy(net, from, to, iov, leaves);
        p->how = (uint8_t)how;
        post_to_gateway(net, p);
    } else if (leaves) {
        cross(net, from, to, iov, leaves, how);
    }
}

static void send_packet(memory_net *net, uint16_t from, uint16_t to, const struct iovec *iov,
                        int together) {
    net->counts.sent++;
    if (net->tap)
        net->tap(net->tap_context, from, to, iov);
    send_by_port(net, from, to, iov, together ? TOGETHER : 0);
}

static void pass_gateway(memory_net *net, packet *p) {
    uint16_t site = net->site[net->place[p->far ? p->to : p->from]];
    memory_port *port = p->far ? &net->in[site] : &net->out[site];
    p->at_ns = passes_port(net, port, p->at_ns, p->bytes + net->wire, p->how);
    if (p->at_ns && p->far && net->links[p->to]) {
        post(net, p);
        return;
    }
    if (p->at_ns && !p->far) {
        struct iovec iov[2] = {{p->data, p->kept}, {net->zeros, p->bytes - p->kept}};
        cross(net, p->from, p->to, iov, p->at_ns, p->how & FOREIGN);
    }
    drop_packet(net, p);
}

static memory_link *of(lc_link *link) {
    return (memory_link *)(void *)link;
}

static const memory_link *of_const(const lc_link *link) {
    return (const memory_link *)(const void *)link;
}

/* ---- payloads that are read late ---- */

static void keep_flight(memory_link *l, const lc_run *run, uint32_t k) {
    const struct iovec *iov = &run->iov[2 * k];
    size_t copied = run->copied ? iov[1].iov_len : 0;
    flight *f = malloc(sizeof *f + iov[0].iov_len + copied);
    if (!f)
        abort();
    f->next = NULL;
    f->leaves_ns = time_of(l->net) + l->net->reads_ns;
    f->payload = iov[1];
    f->to = run->peer;
    f->header_bytes = iov[0].iov_len;
    memcpy(f->copy, iov[0].iov_base, f->header_bytes);
    if (copied) {
        f->payload.iov_base = f->copy + f->header_bytes;
        memcpy(f->payload.iov_base, iov[1].iov_base, copied);
    }
    if (l->last_flight)
        l->last_flight->next = f;
    else
        l->flights = f;
    l->last_flight = f;
}

static void drop_flight(memory_link *l) {
    flight *f = l->flights;
    l->flights = f->next;
    if (!l->flights)
        l->last_flight = NULL;
    l->completed++;
    free(f);
}

static void let_leave(memory_link *l, uint64_t now) {
    while (l->flights && l->flights->leaves_ns <= now) {
        flight *f = l->flights;
        struct iovec iov[2] = {{f->copy, f->header_bytes}, f->payload};
        send_packet(l->net, l->rank, f->to, iov, 0);
        drop_flight(l);
    }
}

/* Who asks again and again while time stands still waits for nothing else. */
static uint64_t completed(lc_link *link) {
    memory_link *l = (memory_link *)(void *)link;
    l->asked = l->asked_ns == time_of(l->net) ? l->asked + 1 : 0;
    l->asked_ns = time_of(l->net);
    let_leave(l, l->asked > ASKED_MOST ? UINT64_MAX : time_of(l->net));
    return l->completed;
}

static int send_runs(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno) {
    memory_link *l = of(link);
    memory_net *net = l->net;
    uint64_t most = UINT64_MAX;
    int sent = 0;
    l->stats.send_calls++;
    if (l->broken) {
        while (l->flights)
            drop_flight(l);
        *sys_errno = l->broken;
        return -1;
    }
    if (time_of(net) < l->full_until_ns)
        return 0;
    if (happens(net, net->full)) { /* some of it may go */
        l->full_until_ns = time_of(net) + 1 + up_to(net, net->full_ns);
        most = up_to(net, 8);
        net->counts.refused++;
    }
    for (int i = 0; i < n_runs; i++) {
        int together = runs[i].n_packets > 1 && !l->singly[runs[i].peer];
        for (uint32_t k = 0; k < runs[i].n_packets; k++) {
            if ((uint64_t)sent == most)
                return sent;
            if (net->reads_ns)
                keep_flight(l, &runs[i], k);
            else
                send_packet(net, l->rank, runs[i].peer, &runs[i].iov[2 * k], together);
            sent++;
        }
    }
    return sent;
}

static void go_singly(lc_link *link, uint16_t peer, int on) {
    of(link)->singly[peer] = (uint8_t)on;
}

/* ---- receiving ---- */

static void put_last(packet **first, packet **last, packet *p) {
    p->next = NULL;
    if (*last)
        (*last)->next = p;
    else
        *first = p;
    *last = p;
}

static packet *take_first(packet **first, packet **last) {
    packet *p = *first;
    *first = p->next;
    if (!*first)
        *last = NULL;
    return p;
}

/* What has come to the port by now: it leaves it in this order. */
static void pass_port(memory_link *l) {
    memory_net *net = l->net;
    memory_port *down = &net->down[net->place[l->rank]];
    uint64_t now = time_of(net);
    while (next_in(&l->to_port) <= now) {
        packet *p = heap_take(&l->to_port);
        p->at_ns = passes_port(net, down, p->at_ns, p->bytes + net->wire, p->how);
        if (!p->at_ns)
            drop_packet(net, p);
        else if (p->how & FOREIGN)
            post_to_hearer(net, p);
        else
            put_last(&l->port_first, &l->port_last, p);
    }
}

/* What has come by now is in the receive buffer, or found no room there. */
static void fill_buffer(memory_link *l) {
    uint64_t now = time_of(l->net);
    pass_port(l);
    while (l->port_first && l->port_first->at_ns <= now) {
        packet *p = take_first(&l->port_first, &l->port_last);
        if (l->n_buffer >= l->net->capacity) {
            l->stats.overflow++;
            drop_packet(l->net, p);
            continue;
        }
        put_last(&l->first, &l->last, p);
        l->n_buffer++;
    }
}

static int receive(lc_link *link, lc_arrival *arrivals, int max) {
    memory_link *l = of(link);
    l->stats.receive_calls++;
    while (l->n_taken)
        drop_packet(l->net, l->taken[--l->n_taken]);
    fill_buffer(l);
    while (l->first && l->n_taken < max && l->n_taken < ARRIVALS) {
        packet *p = take_first(&l->first, &l->last);
        l->n_buffer--;
        arrivals[l->n_taken] = (lc_arrival){.data = p->data,
                                            .length = p->kept,
                                            .stride = p->kept,
                                            .rest = p->bytes > p->kept ? l->net->zeros : NULL,
                                            .rest_bytes = p->bytes - p->kept,
                                            .came_ns = p->at_ns,
                                            .from = &p->from};
        l->taken[l->n_taken++] = p;
    }
    return l->n_taken;
}

static int is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer) {
    (void)link;
    return *(const uint16_t *)arrival->from == peer;
}

/* ---- the rest ---- */

static int set_peer(lc_link *link, uint16_t peer, const lc_address *address) {
    (void)address; /* a peer's number is its rank */
    return peer < of(link)->net->size ? LC_OK : LC_E_ARGUMENT;
}

static int is_here(const lc_link *link, uint16_t peer) {
    (void)peer;
    return of_const(link)->net->same_host || link->local;
}

static const lc_uplink_board *board(const lc_link *link, uint16_t peer) {
    const memory_net *net = of_const(link)->net;
    return net->boards ? &net->boards[peer * LC_UPLINKS] : NULL;
}

static void info(const lc_link *link, lc_link_info *info) {
    uint32_t room = link->packet_max - LC_HEADER_BYTES;
    *info = (lc_link_info){.port = (uint16_t)(1 + of_const(link)->rank),
                           .payload_bytes =
                               (uint16_t)(link->payload_bytes ? link->payload_bytes : room)};
}

/* As a socket that gives memory back at once (link_udp.c): some of the room is for control. */
static uint32_t credits(const lc_link *link, uint32_t packet_bytes, uint32_t peers) {
    uint32_t capacity = of_const(link)->net->capacity, control = 9 * peers;
    (void)packet_bytes;
    control = control < capacity / 2 ? control : capacity / 2;
    control = control > capacity / 5 ? control : capacity / 5;
    return (capacity - control) / peers;
}

static int descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns) {
    memory_link *l = of(link);
    (void)blocked;
    (void)fds;
    if (l->net->sleep)
        l->net->sleep(l->net->sleep_context, l->rank, timeout_ns);
    return 0;
}

static int event(lc_link *link, lc_event *event) {
    memory_link *l = of(link);
    *event = l->event;
    l->event.kind = 0;
    return event->kind != 0;
}

static void stats(const lc_link *link, lc_link_stats *stats) {
    *stats = of_const(link)->stats;
}

static void close_memory(lc_link *link) {
    memory_link *l = of(link);
    while (l->flights)
        drop_flight(l);
    while (l->to_port.n)
        drop_packet(l->net, heap_take(&l->to_port));
    while (l->port_first)
        drop_packet(l->net, take_first(&l->port_first, &l->port_last));
    while (l->first)
        drop_packet(l->net, take_first(&l->first, &l->last));
    while (l->n_taken)
        drop_packet(l->net, l->taken[--l->n_taken]);
    l->net->links[l->rank] = NULL;
    free(l->to_port.first);
    free(l->singly);
    free(l);
}

static const lc_link_ops memory_ops = {.name = "memory",
                                       .close = close_memory,
                                       .set_peer = set_peer,
                                       .is_here = is_here,
                                       .go_singly = go_singly,
                                       .board = board,
                                       .info = info,
                                       .credits = credits,
                                       .send = send_runs,
                                       .receive = receive,
                                       .is_from = is_from,
                                       .descriptors = descriptors,
                                       .event = event,
                                       .stats = stats};

lc_link *memory_link_open(memory_net *net, uint16_t rank) {
    memory_link *l = calloc(1, sizeof *l);
    if (!l)
        abort();
    l->ops = memory_ops;
    l->ops.completed = net->reads_ns ? completed : NULL;
    l->link = (lc_link){.ops = &l->ops,
                        .clock = &net->clock,
                        .packet_max = net->packet_max,
                        .routed = net->routed,
                        .aggregates = !net->local_payload,
                        .payload_bytes = net->local_payload,
                        .local = net->local_payload > 0};
    l->link.board = net->boards ? &net->boards[rank * LC_UPLINKS] : NULL;
    l->net = net;
    l->rank = rank;
    l->singly = zeros(net->size, 1);
    net->links[rank] = l;
    return &l->link;
}

static uint64_t now_of(void *context) {
    memory_net *net = context;
    net->now += net->step_ns;
    return time_of(net);
}

static uint64_t day_of(void *context) {
    return DAY_NS + time_of(context);
}

memory_net *memory_net_at(uint16_t size, const uint16_t *places, uint32_t packet_max,
                          uint32_t capacity, uint64_t seed) {
    memory_net *net = zeros(1, sizeof *net);
    net->time = net;
    net->size = size;
    net->place = zeros(size, sizeof *net->place);
    for (uint16_t i = 0; i < size; i++) {
        net->place[i] = places ? places[i] : i;
        net->places = net->place[i] >= net->places ? (uint16_t)(net->place[i] + 1) : net->places;
    }
    net->links = zeros(size, sizeof(memory_link *));
    net->paths = zeros((size_t)net->places * net->places, sizeof *net->paths);
    net->up = zeros(net->places, sizeof *net->up);
    net->down = zeros(net->places, sizeof *net->down);
    net->packet_max = packet_max;
    net->capacity = capacity;
    net->random = seed;
    net->now = 1000000000u;
    net->clock = (lc_clock){now_of, day_of, net};
    return net;
}

memory_net *memory_net_new(uint16_t size, uint32_t packet_max, uint32_t capacity, uint64_t seed) {
    return memory_net_at(size, NULL, packet_max, capacity, seed);
}

void memory_net_free(memory_net *net) {
    while (net->crossing.n)
        drop_packet(net, heap_take(&net->crossing));
    while (net->foreign.n)
        drop_packet(net, heap_take(&net->foreign));
    free(net->crossing.first);
    free(net->foreign.first);
    for (int small = 0; small < 2; small++)
        for (packet *p = net->free[small], *next; p; p = next) {
            next = p->next;
            free(p);
        }
    free(net->zeros);
    free(net->place);
    free(net->links);
    free(net->boards);
    free(net->paths);
    free(net->up);
    free(net->down);
    free(net->site);
    free(net->out);
    free(net->in);
    free(net);
}

memory_path *memory_path_of(memory_net *net, uint16_t from, uint16_t to) {
    return &net->paths[(size_t)from * net->places + to];
}

memory_port *memory_port_up(memory_net *net, uint16_t place) {
    return &net->up[place];
}

memory_port *memory_port_down(memory_net *net, uint16_t place) {
    return &net->down[place];
}

void memory_set_sites(memory_net *net, const uint16_t *sites) {
    net->site = zeros(net->places, sizeof *net->site);
    memcpy(net->site, sites, net->places * sizeof *net->site);
    net->out = zeros(net->places, sizeof *net->out);
    net->in = zeros(net->places, sizeof *net->in);
}

memory_port *memory_gateway_out(memory_net *net, uint16_t site) {
    return &net->out[site];
}

memory_port *memory_gateway_in(memory_net *net, uint16_t site) {
    return &net->in[site];
}

void memory_set_wire(memory_net *net, uint32_t bytes) {
    net->wire = bytes;
}

void memory_set_local(memory_net *net, uint32_t payload_bytes) {
    net->local_payload = payload_bytes;
    net->boards = zeros((size_t)net->size * LC_UPLINKS, sizeof *net->boards);
}

void memory_forget_payloads(memory_net *net) {
    net->zeros = zeros(1, net->packet_max);
}

void memory_set_wake(memory_net *net, memory_wake *wake, void *context) {
    net->wake = wake;
    net->wake_context = context;
}

void memory_set_fold(memory_net *net, uint16_t real, memory_rename *rename, void *context) {
    net->real = real;
    net->rename = rename;
    net->rename_context = context;
}

void memory_follow(memory_net *net, const memory_net *other) {
    net->time = other;
}

void memory_set_full(memory_net *net, double share, uint64_t longest_ns) {
    net->full = share;
    net->full_ns = longest_ns;
}

void memory_set_late(memory_net *net, uint64_t reads_ns) {
    net->reads_ns = reads_ns;
}

void memory_set_tap(memory_net *net, memory_tap *tap, void *context) {
    net->tap = tap;
    net->tap_context = context;
}

void memory_throw(memory_net *net, uint16_t from, uint16_t to, const void *bytes, size_t n,
                  uint64_t way_ns) {
    struct iovec iov[2] = {{(void *)(uintptr_t)bytes, n < net->packet_max ? n : net->packet_max},
                           {(void *)(uintptr_t)bytes, 0}};
    if (net->links[to] && !memory_path_of(net, net->place[from], net->place[to])->cut)
        post(net, new_copy(net, from, to, iov, time_of(net) + way_ns));
}

void memory_set_sleep(memory_net *net, memory_sleep *sleep, void *context) {
    net->sleep = sleep;
    net->sleep_context = context;
}

void memory_set_step(memory_net *net, uint64_t ns) {
    net->step_ns = ns;
}

uint64_t memory_flights(const memory_net *net, uint16_t rank) {
    return net->links[rank]->link.handed - net->links[rank]->completed;
}

void memory_set_same_host(memory_net *net, int same_host) {
    net->same_host = same_host;
}

void memory_set_routed(memory_net *net, int routed) {
    net->routed = routed;
}

void memory_break(memory_net *net, uint16_t rank, int sys_errno) {
    net->links[rank]->broken = sys_errno;
}

void memory_tell(memory_net *net, uint16_t rank, const lc_event *event) {
    net->links[rank]->event = *event;
}

memory_counts memory_counts_of(const memory_net *net) {
    return net->counts;
}

uint64_t memory_overflow(const memory_net *net, uint16_t rank) {
    return net->links[rank] ? net->links[rank]->stats.overflow : 0;
}

const lc_clock *memory_clock(const memory_net *net) {
    return &net->clock;
}

uint64_t memory_now(const memory_net *net) {
    return time_of(net);
}

void memory_set_now(memory_net *net, uint64_t now) {
    net->now = now;
    for (uint16_t i = 0; net->reads_ns && i < net->size; i++)
        if (net->links[i])
            let_leave(net->links[i], now);
}

void memory_advance(memory_net *net, uint16_t rank) {
    pass_port(net->links[rank]);
}

void memory_pass_gateways(memory_net *net) {
    while (next_in(&net->crossing) <= time_of(net))
        pass_gateway(net, heap_take(&net->crossing));
    while (next_in(&net->foreign) <= time_of(net)) {
        packet *p = heap_take(&net->foreign);
        net->hear(net->hear_context, p->data);
        drop_packet(net, p);
    }
}

uint64_t memory_next_at_gateways(const memory_net *net) {
    uint64_t crossing = next_in(&net->crossing), foreign = next_in(&net->foreign);
    return crossing < foreign ? crossing : foreign;
}

void memory_set_hear(memory_net *net, memory_hear *hear, void *context) {
    net->hear = hear;
    net->hear_context = context;
}

/* The first rank of a place: what comes for it comes to the place's port. */
static uint16_t first_of(const memory_net *net, uint16_t place) {
    uint16_t rank = 0;
    while (net->place[rank] != place)
        rank++;
    return rank;
}

void memory_send_foreign(memory_net *net, uint16_t from, uint16_t to, size_t bytes,
                         const void *note, size_t n) {
    struct iovec iov[2] = {{(void *)(uintptr_t)note, n}, {net->zeros, bytes - n}};
    send_by_port(net, first_of(net, from), first_of(net, to), iov, FOREIGN);
}

void memory_count_until(memory_net *net, uint64_t at_ns) {
    net->count_until_ns = at_ns;
}

uint64_t memory_next(const memory_net *net, uint16_t rank) {
    const memory_link *l = net->links[rank];
    uint64_t next = UINT64_MAX;
    if (l && l->broken)
        return next;
    if (l && l->first)
        next = time_of(net);
    else if (l && l->port_first)
        next = l->port_first->at_ns;
    if (l && next_in(&l->to_port) < next)
        next = next_in(&l->to_port);
    if (l && l->flights && l->flights->leaves_ns < next)
        next = l->flights->leaves_ns;
    if (l && l->full_until_ns > time_of(net) && l->full_until_ns < next)
        next = l->full_until_ns;
    return next;
}
