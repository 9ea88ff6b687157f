/* A host's port that it doesn't have for itself, in virtual time: another lossy job on the same
 * hosts, another program that sends UDP at a fixed rate, and a port that is a hundred times slower
 * in one direction. */
#include "check.h"
#include "net.h"
#include "virtual_net.h"

#include <string.h>

enum { HOSTS = 3, JOBS = 2, PROCESSES = HOSTS * JOBS, PAYLOAD = 1424, WIRE = 28 };

static const uint64_t WAY_NS = 5000000;

typedef struct {
    double up, down;   /* bytes/s of each host's port */
    double other;      /* share of it that another program sends */
    uint64_t queue_ns; /* of each port */
    int jobs, paces_port, reliable;
    size_t bytes;   /* of an all-reduce, */
    double seconds; /* which are repeated for so long; the second half counts */
} setting;

typedef struct {
    lc_host *host[HOSTS];
    lc_group *group[HOSTS];
    int64_t ticket[HOSTS];
    float *data[HOSTS];
    int going;
    double calls; /* that ended in the second half, */
    double lost;  /* packets that were given up in them, of */
    double packets;
} job;

typedef struct {
    setting s;
    memory_net *net;
    job jobs[JOBS];
    uint64_t other_ns; /* until when the other program has sent, */
    double other_sent, other_lost;
} world;

static void open_host(world *w, int j, uint16_t at) {
    const uint16_t process = (uint16_t)(at * JOBS + j);
    const uint16_t members[] = {(uint16_t)j, (uint16_t)(JOBS + j), (uint16_t)(2 * JOBS + j)};
    lc_host_config c = {.address = "memory",
                        .process = process,
                        .processes = PROCESSES,
                        .payload_bytes = PAYLOAD,
                        .eager_bytes = 1 << 20,
                        .paces_port = (uint8_t)w->s.paces_port};
    lc_group_config g = {.number = (uint32_t)j + 1,
                         .rank = at,
                         .size = HOSTS,
                         .members = members,
                         .deadline_min_ns = SECOND,
                         .deadline_max_ns = 10 * SECOND,
                         .link_ns = 60 * SECOND,
                         .met = 1};
    lc_address all[PROCESSES];
    for (uint16_t k = 0; k < PROCESSES; k++)
        all[k] = (lc_address){.absent = k % JOBS != j};
    lc_link *link = memory_link_open(w->net, process);
    lc_setting setting = {memory_clock(w->net), &link, 1};
    lc_failure failure;
    job *one = &w->jobs[j];
    one->host[at] = lc_host_open_in(&c, &setting, &failure);
    if (!one->host[at] || lc_host_start(one->host[at], 9, all) != LC_OK)
        abort();
    one->group[at] = lc_group_open(one->host[at], &g, &failure);
    one->data[at] = calloc(1, w->s.bytes);
    if (!one->group[at] || !one->data[at])
        abort();
}

static void open_world(world *w, const setting *s) {
    static const uint16_t places[PROCESSES] = {0, 0, 1, 1, 2, 2};
    *w = (world){.s = *s};
    w->net = memory_net_at(PROCESSES, places, LC_HEADER_BYTES + PAYLOAD, 4000, 7);
    memory_set_wire(w->net, WIRE);
    for (uint16_t i = 0; i < HOSTS; i++) {
        *memory_port_up(w->net, i) = (memory_port){.bytes_per_s = s->up, .queue_ns = s->queue_ns};
        *memory_port_down(w->net, i) =
            (memory_port){.bytes_per_s = s->down, .queue_ns = s->queue_ns};
        for (uint16_t k = 0; k < HOSTS; k++)
            memory_path_of(w->net, i, k)->delay_ns = WAY_NS;
    }
    for (int j = 0; j < s->jobs; j++)
        for (uint16_t i = 0; i < HOSTS; i++)
            open_host(w, j, i);
    w->other_ns = memory_now(w->net);
}

static void close_world(world *w) {
    for (int j = 0; j < w->s.jobs; j++)
        for (uint16_t i = 0; i < HOSTS; i++) {
            lc_host_close(w->jobs[j].host[i]);
            free(w->jobs[j].data[i]);
        }
    memory_net_free(w->net);
}

static void submit(const world *w, job *j) {
    const net n = {.size = HOSTS, .payload = PAYLOAD};
    uint32_t segment = (uint32_t)(w->s.bytes / 4 / HOSTS);
    for (uint16_t i = 0; i < HOSTS; i++)
        j->ticket[i] =
            net_submit_to(j->group[i], &n, i, 0, segment, j->data[i], w->s.reliable, 0, 0);
    j->going = 1;
}

/* Begins the next call when all ranks have ended one. */
static void take_ended(const world *w, job *j, int counts) {
    lc_report reports[HOSTS];
    lc_failure failure;
    for (uint16_t i = 0; i < HOSTS; i++) {
        int code = lc_group_result(j->group[i], j->ticket[i], &reports[i], &failure);
        if (code == LC_PENDING)
            return;
        CHECK(code == LC_OK);
    }
    for (uint16_t i = 0; i < HOSTS; i++) {
        lc_group_release(j->group[i], j->ticket[i]);
        j->lost += counts ? (double)reports[i].packets_missing : 0;
        j->packets +=
            counts ? (double)(reports[i].packets_missing + reports[i].packets_received) : 0;
    }
    j->calls += counts;
    submit(w, j);
}

/* Packets of another program, each of which the port sends, queues or drops. */
static void send_others(world *w) {
    const uint64_t now = memory_now(w->net), each = (uint64_t)(1e9 * 1500 / (w->s.up * w->s.other));
    for (; w->other_ns + each <= now; w->other_ns += each)
        for (uint16_t i = 0; i < HOSTS; i++) {
            memory_port *port = memory_port_up(w->net, i);
            uint64_t free_ns = port->free_ns > w->other_ns ? port->free_ns : w->other_ns;
            w->other_sent++;
            if (free_ns - w->other_ns > w->s.queue_ns)
                w->other_lost++;
            else
                port->free_ns = free_ns + (uint64_t)(1500e9 / w->s.up);
        }
}

static void go_on(world *w, uint64_t until) {
    for (int j = 0; j < w->s.jobs; j++)
        for (uint16_t i = 0; i < HOSTS; i++)
            while (lc_host_turn(w->jobs[j].host[i])) {
            }
    uint64_t now = memory_now(w->net), next = until;
    for (int j = 0; j < w->s.jobs; j++)
        for (uint16_t i = 0; i < HOSTS; i++) {
            uint64_t idle = lc_host_idle_ns(w->jobs[j].host[i]);
            uint64_t comes = memory_next(w->net, (uint16_t)(i * JOBS + j));
            uint64_t wakes = idle < until - now ? now + idle : until;
            next = wakes < next ? wakes : next;
            next = comes < next ? comes : next;
        }
    if (w->s.other > 0 && next > now + MS / 4)
        next = now + MS / 4;
    memory_set_now(w->net, next > now ? next : now);
    if (w->s.other > 0)
        send_others(w);
}

static void run(world *w, const setting *s) {
    open_world(w, s);
    uint64_t begin = memory_now(w->net), end = begin + (uint64_t)(1e9 * s->seconds);
    for (int j = 0; j < s->jobs; j++)
        submit(w, &w->jobs[j]);
    while (memory_now(w->net) < end) {
        go_on(w, end);
        for (int j = 0; j < s->jobs; j++)
            take_ended(w, &w->jobs[j], memory_now(w->net) - begin > (end - begin) / 2);
    }
    close_world(w);
}

/* Share of the port's bytes that a job's calls brought across it in the second half. */
static double share_of(const world *w, int j) {
    double sent = 2.0 * (HOSTS - 1) / HOSTS * (double)w->s.bytes;
    double rate = w->s.up * PAYLOAD / (PAYLOAD + LC_HEADER_BYTES + WIRE);
    return w->jobs[j].calls * sent / (rate * w->s.seconds / 2);
}

static double missing_of(const world *w, int j) {
    return w->jobs[j].packets > 0 ? w->jobs[j].lost / w->jobs[j].packets : 0;
}

enum { SLOW = 2500000 }; /* 20 Mbit/s */

/* Two jobs on the same hosts leave each other a part, and fill the port together. */
static void test_two_jobs(int paces_port, double rate, double seconds) {
    const setting s = {.up = rate,
                       .down = rate,
                       .queue_ns = 25 * MS,
                       .jobs = 2,
                       .paces_port = paces_port,
                       .bytes = 1 << 20,
                       .seconds = seconds};
    world w;
    run(&w, &s);
    for (int j = 0; j < 2; j++) {
        CHECK_AT(share_of(&w, j) > 0.35, "port %d, job %d: %.2f", paces_port, j, share_of(&w, j));
        CHECK_AT(missing_of(&w, j) < 0.06, "port %d: missing %.3f", paces_port, missing_of(&w, j));
    }
    double a = share_of(&w, 0), b = share_of(&w, 1), ratio = a > b ? a / b : b / a;
    /* A short run ends too few calls to tell. */
    CHECK_AT(seconds < 8 || ratio < 1.25, "port %d: %.2f and %.2f", paces_port, a, b);
    double both = share_of(&w, 0) + share_of(&w, 1);
    CHECK_AT(both > 0.8 && both < 1.15, "port %d: %.2f", paces_port, both);
}

/* Half of the port is another program's, which never yields: a job uses what is left, and neither
 * loses much. */
static void test_beside_udp(int paces_port, int reliable) {
    const setting s = {.up = SLOW,
                       .down = SLOW,
                       .other = 0.5,
                       .queue_ns = 25 * MS,
                       .jobs = 1,
                       .paces_port = paces_port,
                       .reliable = reliable,
                       .bytes = 1 << 20,
                       .seconds = 20};
    world w;
    run(&w, &s);
    CHECK(w.other_sent > 10000);
    CHECK_AT(share_of(&w, 0) > 0.38 && share_of(&w, 0) < 0.58, "port %d, reliable %d: %.2f",
             paces_port, reliable, share_of(&w, 0));
    CHECK_AT(missing_of(&w, 0) < (reliable ? 1e-9 : 0.02), "port %d: missing %.4f", paces_port,
             missing_of(&w, 0));
    CHECK_AT(w.other_lost < 0.04 * w.other_sent, "port %d: the other lost %.0f of %.0f", paces_port,
             w.other_lost, w.other_sent);
}

/* Up a hundredth of down: acknowledgements of what comes take little of it. */
static void test_asymmetric(int paces_port, int reliable) {
    const setting s = {.up = 1.25e5,
                       .down = 1.25e7,
                       .queue_ns = 300 * MS,
                       .jobs = 1,
                       .paces_port = paces_port,
                       .reliable = reliable,
                       .bytes = 1 << 18,
                       .seconds = 60};
    world w;
    run(&w, &s);
    CHECK_AT(share_of(&w, 0) > 0.7, "port %d, reliable %d: %.2f", paces_port, reliable,
             share_of(&w, 0));
    CHECK_AT(missing_of(&w, 0) < (reliable ? 1e-9 : 0.06), "port %d: missing %.4f", paces_port,
             missing_of(&w, 0));
}

int main(int argc, char **argv) {
    int sample = argc > 1 && !strcmp(argv[1], "-sample");
    for (int paces_port = sample; paces_port < 2; paces_port++)
        for (int reliable = 0; reliable < 2 - sample; reliable++) {
            test_beside_udp(paces_port, reliable);
            test_asymmetric(paces_port, reliable);
        }
    for (int paces_port = 0; paces_port < 2 && !sample; paces_port++)
        test_two_jobs(paces_port, SLOW, 30);
    test_two_jobs(1, 5 * SLOW, sample ? 3 : 8);
    return check_result("test_shared_port");
}
