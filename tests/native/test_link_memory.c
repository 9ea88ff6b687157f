/* The network in memory by itself: ports that ranks share, policers, and delays that wander. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "link_memory.h"
#include "wire.h"

enum { BYTES = 1000, PACKETS = 400 };

static const uint64_t MS = 1000000;

typedef struct {
    memory_net *net;
    lc_link *link[3];
} world;

/* Ranks 0 and 1 share a place; rank 2 has its own. */
static world opened(void) {
    static const uint16_t places[] = {0, 0, 1};
    world w = {.net = memory_net_at(3, places, BYTES, 100000, 5)};
    for (uint16_t i = 0; i < 3; i++)
        w.link[i] = memory_link_open(w.net, i);
    return w;
}

static void closed(world *w) {
    for (int i = 0; i < 3; i++)
        lc_link_close(w->link[i]);
    memory_net_free(w->net);
}

static void send_one(world *w, uint16_t from, uint16_t number) {
    uint8_t data[BYTES] = {(uint8_t)number, (uint8_t)(number >> 8)};
    struct iovec iov[] = {{data, BYTES}, {data, 0}};
    lc_run run = {.iov = iov, .n_packets = 1, .packet_bytes = BYTES, .peer = 2};
    int error;
    CHECK(w->link[from]->ops->send(w->link[from], &run, 1, &error) == 1);
}

typedef struct {
    uint32_t n, overtaken;
    uint64_t first_ns, last_ns;
} seen;

/* All that comes to rank 2 by then. */
static seen receive_all(world *w, uint64_t until_ns) {
    seen s = {.n = 0};
    int last = -1;
    memory_set_now(w->net, until_ns);
    lc_arrival a[LC_RECEIVE_BUFFERS];
    for (int n; (n = w->link[2]->ops->receive(w->link[2], a, LC_RECEIVE_BUFFERS)) > 0;)
        for (int i = 0; i < n; i++) {
            int number = a[i].data[0] | a[i].data[1] << 8;
            s.overtaken += number < last;
            last = number;
            s.first_ns = s.n++ ? s.first_ns : a[i].came_ns;
            CHECK(a[i].came_ns >= s.last_ns);
            s.last_ns = a[i].came_ns;
        }
    return s;
}

/* Two ranks of a place send through its port, which 1 MB/s leave. */
static void test_shared_port(void) {
    world w = opened();
    uint64_t begin = memory_now(w.net);
    memory_port_up(w.net, 0)->bytes_per_s = 1e6;
    for (uint16_t i = 0; i < PACKETS; i++)
        send_one(&w, i % 2, i);
    seen s = receive_all(&w, begin + 10000 * MS);
    CHECK(s.n == PACKETS && !s.overtaken);
    CHECK(s.last_ns - begin == PACKETS * MS); /* a packet takes 1 ms of it */
    CHECK(memory_port_up(w.net, 0)->packets == PACKETS);
    CHECK(memory_port_down(w.net, 1)->bytes == (uint64_t)PACKETS * BYTES);
    closed(&w);
}

/* Two hosts of a site send to another site at 2 MB/s each: what leaves the site is 1 MB/s, and a
 * queue of 50 packets drops the others. What stays at the site passes no gateway. */
static void test_gateways(uint64_t queue_ns) {
    static const uint16_t sites[] = {0, 0, 1};
    world w = {.net = memory_net_new(3, BYTES, 100000, 5)};
    memory_set_sites(w.net, sites);
    for (uint16_t i = 0; i < 3; i++) {
        w.link[i] = memory_link_open(w.net, i);
        memory_port_up(w.net, i)->bytes_per_s = 2e6;
        memory_path_of(w.net, i, 2)->delay_ns = 10 * MS;
    }
    uint64_t begin = memory_now(w.net);
    memory_port *out = memory_gateway_out(w.net, 0);
    out->bytes_per_s = 1e6;
    out->queue_ns = queue_ns;
    for (uint16_t i = 0; i < PACKETS; i++)
        send_one(&w, i % 2, i);
    CHECK(memory_next_at_gateways(w.net) == begin + MS / 2);
    memory_set_now(w.net, begin + 10000 * MS);
    memory_pass_gateways(w.net);
    CHECK(memory_next_at_gateways(w.net) == UINT64_MAX);
    seen s = receive_all(&w, begin + 10000 * MS);
    CHECK(!s.overtaken && s.n + out->dropped == PACKETS);
    CHECK(s.first_ns == begin + MS / 2 + MS + 10 * MS); /* port, gateway, path */
    uint64_t sent_ns = PACKETS / 2 * MS / 2;
    uint64_t kept = queue_ns ? (sent_ns + queue_ns) / MS : PACKETS;
    CHECK_AT(s.n + 1 >= kept && s.n <= kept + 1, "%u of %u", s.n, (unsigned)kept);
    CHECK(out->packets == PACKETS && memory_gateway_in(w.net, 1)->packets == s.n);
    CHECK(memory_counts_of(w.net).dropped == out->dropped);
    struct iovec iov[] = {{(uint8_t[BYTES]){0}, BYTES}, {NULL, 0}};
    lc_run run = {.iov = iov, .n_packets = 1, .packet_bytes = BYTES, .peer = 1};
    int error;
    CHECK(w.link[0]->ops->send(w.link[0], &run, 1, &error) == 1);
    CHECK(out->packets == PACKETS && memory_next(w.net, 1) < UINT64_MAX);
    closed(&w);
}

/* 2 MB/s come to a policer of 1 MB/s with a bucket of 20 packets, and then none for a while. */
static void test_policer(void) {
    world w = opened();
    uint64_t begin = memory_now(w.net);
    memory_port *up = memory_port_up(w.net, 0);
    up->police_bytes_per_s = 1e6;
    up->police_ns = 20 * MS;
    for (uint16_t i = 0; i < PACKETS; i++) {
        memory_set_now(w.net, begin + i * MS / 2);
        send_one(&w, 0, i);
    }
    seen s = receive_all(&w, begin + PACKETS * MS / 2);
    CHECK(s.n >= PACKETS / 2 + 19 && s.n <= PACKETS / 2 + 21);
    CHECK(up->policed == PACKETS - s.n && up->dropped == 0);
    CHECK(memory_counts_of(w.net).dropped == up->policed);
    memory_set_now(w.net, begin + 1000 * MS); /* the bucket is full again, and not fuller */
    for (uint16_t i = 0; i < 30; i++)
        send_one(&w, 0, i);
    CHECK(receive_all(&w, begin + 1001 * MS).n == 20);
    closed(&w);
}

/* Up to 20 ms more than 10: packet by packet they overtake each other; a delay that wanders takes
 * as long, and they don't. */
static void test_jitter(void) {
    for (int ordered = 0; ordered < 2; ordered++) {
        world w = opened();
        uint64_t begin = memory_now(w.net);
        memory_path *path = memory_path_of(w.net, 0, 1);
        path->delay_ns = 10 * MS;
        path->jitter_ns = 20 * MS;
        path->ordered = ordered;
        for (uint16_t i = 0; i < PACKETS; i++) {
            memory_set_now(w.net, begin + i * MS);
            send_one(&w, 0, i);
        }
        seen s = receive_all(&w, begin + 10000 * MS);
        CHECK(s.n == PACKETS);
        CHECK(ordered ? s.overtaken == 0 : s.overtaken > PACKETS / 10);
        CHECK(s.first_ns >= begin + 10 * MS && s.last_ns <= begin + (PACKETS + 30) * MS);
        CHECK(path->last_ns == (ordered ? s.last_ns : 0));
        closed(&w);
    }
}

static uint64_t woken_ns;

static void note_woken(void *context, uint16_t rank, uint64_t at_ns) {
    CHECK(context == &woken_ns && rank == 2);
    woken_ns = at_ns;
}

/* Who waits is told of what comes before all that was under way, and a port is passed without it.
 */
static void test_wake(void) {
    world w = opened();
    uint64_t begin = memory_now(w.net);
    memory_path *path = memory_path_of(w.net, 0, 1);
    memory_set_wake(w.net, note_woken, &woken_ns);
    memory_port_down(w.net, 1)->bytes_per_s = 1e6;
    path->delay_ns = 50 * MS;
    send_one(&w, 0, 0);
    CHECK(woken_ns == begin + 50 * MS);
    path->delay_ns = 20 * MS;
    send_one(&w, 0, 1);
    CHECK(woken_ns == begin + 20 * MS);
    path->delay_ns = 30 * MS;
    send_one(&w, 0, 2);
    CHECK(woken_ns == begin + 20 * MS);
    memory_set_now(w.net, begin + 20 * MS);
    memory_advance(w.net, 2);
    CHECK(memory_next(w.net, 2) == begin + 21 * MS);
    CHECK(receive_all(&w, begin + 100 * MS).n == 3);
    closed(&w);
}

/* Headers and control are kept as they were sent; a payload of data reads as zeros. */
static void test_forgotten_payloads(void) {
    world w = opened();
    memory_forget_payloads(w.net);
    uint8_t header[2][LC_HEADER_BYTES] = {{0}, {0}}, payload[BYTES - LC_HEADER_BYTES];
    header[0][3] = LC_DATA;
    header[1][3] = LC_CONTROL;
    memset(payload, 7, sizeof payload);
    for (int k = 0; k < 2; k++) {
        struct iovec iov[] = {{header[k], LC_HEADER_BYTES}, {payload, sizeof payload}};
        lc_run run = {.iov = iov, .n_packets = 1, .packet_bytes = BYTES, .peer = 2};
        int error;
        CHECK(w.link[0]->ops->send(w.link[0], &run, 1, &error) == 1);
    }
    lc_arrival a[2];
    CHECK(w.link[2]->ops->receive(w.link[2], a, 2) == 2);
    CHECK(a[0].length == LC_HEADER_BYTES && a[0].data[3] == LC_DATA);
    CHECK(a[0].rest_bytes == sizeof payload && !a[0].rest[0] && !a[0].rest[sizeof payload - 1]);
    CHECK(a[1].length == BYTES && !a[1].rest);
    CHECK(!memcmp(a[1].data + LC_HEADER_BYTES, payload, sizeof payload));
    closed(&w);
}

int main(void) {
    test_forgotten_payloads();
    test_shared_port();
    test_gateways(0);
    test_gateways(50 * MS);
    test_policer();
    test_jitter();
    test_wake();
    return check_result("test_link_memory");
}
