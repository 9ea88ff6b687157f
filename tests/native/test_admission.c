/* Processes that come and go under traffic, for the sanitizers: two engines send each other
 * messages all the time, while a third one starts again and again under the same number. */
#define _DEFAULT_SOURCE
#include "net.h"

#include <pthread.h>
#include <stdatomic.h>

enum { HOSTS = 3, INCARNATIONS = 12, BYTES = 20000, TALKERS = 4711, VISIT = 5000 };

typedef struct {
    lc_host *host[HOSTS];
    uint16_t port[HOSTS];
    uint8_t sealed;
    uint8_t coming; /* of the third one: another has other keys */
} swarm;

static lc_address here(uint16_t port) {
    return (lc_address){.host = "127.0.0.1", .port = port, .memory = -1, .wake = -1};
}

static void start(swarm *s, uint16_t number) {
    lc_host_config c = {.address = "127.0.0.1",
                        .process = number,
                        .processes = NET_MAX,
                        .payload_bytes = NET_PAYLOAD,
                        .socket_buffer = net_socket_buffer,
                        .eager_bytes = 1 << 16};
    lc_failure failure;
    lc_link_info info;
    lc_address at[NET_MAX];
    s->host[number] = lc_host_open(&c, &failure);
    CHECK(s->host[number] != NULL);
    lc_seal_config seal = {.cipher = LC_AES_128_GCM, .filter = 7};
    if (s->sealed)
        CHECK(lc_host_seal(s->host[number], &seal, &failure) == LC_OK);
    lc_host_link(s->host[number], 0, &info);
    s->port[number] = info.port;
    for (int i = 0; i < NET_MAX; i++) {
        at[i] = here(info.port);
        at[i].absent = i != number;
    }
    CHECK(lc_host_start(s->host[number], NET_SESSION, at) == LC_OK);
}

static void keys(const swarm *s, uint16_t from, uint16_t to, uint8_t *key) {
    memset(key, 1 + 16 * from + to, LC_SECRET_BYTES);
    key[0] = from == 2 || to == 2 ? s->coming : 0;
}

static void admit(swarm *s, uint16_t at, uint16_t other) {
    uint8_t secrets[2 * LC_SECRET_BYTES];
    lc_address address = here(s->port[other]);
    keys(s, at, other, secrets);
    keys(s, other, at, secrets + LC_SECRET_BYTES);
    CHECK(lc_host_admit(s->host[at], other, &address, s->sealed ? secrets : NULL) == LC_OK);
}

static lc_group *group(const swarm *s, uint16_t at, uint16_t other, uint32_t number) {
    uint16_t members[2] = {at < other ? at : other, at < other ? other : at};
    lc_group_config c = {.number = number,
                         .rank = at > other,
                         .size = 2,
                         .members = members,
                         .deadline_min_ns = SECOND,
                         .deadline_max_ns = SECOND,
                         .link_ns = 20 * SECOND,
                         .reorder_ns = MS,
                         .met = 1};
    lc_failure failure;
    lc_group *g = lc_group_open(s->host[at], &c, &failure);
    CHECK(g != NULL);
    return g;
}

static int64_t post(lc_group *g, uint8_t *data, uint16_t peer, int receive) {
    lc_message m = {.data = data,
                    .elements = BYTES,
                    .timeout_ns = 60 * SECOND,
                    .element_bytes = 1,
                    .peer = peer,
                    .receive = (uint8_t)receive};
    return lc_group_post(g, &m);
}

static void end(lc_group *g, int64_t ticket) {
    CHECK(ticket >= 0);
    if (ticket <= 0)
        return;
    CHECK(lc_group_wait(g, ticket, 60 * SECOND) == LC_OK);
    lc_group_release(g, ticket);
}

/* Each sends the other what has this value. */
static void exchange(lc_group *g[2], uint8_t value) {
    static _Thread_local uint8_t sent[2][BYTES], got[2][BYTES];
    int64_t receives[2], sends[2];
    for (uint16_t r = 0; r < 2; r++) {
        memset(sent[r], value + r, BYTES);
        memset(got[r], 0, BYTES);
        receives[r] = post(g[r], got[r], 1 - r, 1);
    }
    for (uint16_t r = 0; r < 2; r++)
        sends[r] = post(g[r], sent[r], 1 - r, 0);
    for (uint16_t r = 0; r < 2; r++) {
        end(g[r], receives[r]);
        end(g[r], sends[r]);
        CHECK(got[r][0] == (uint8_t)(value + 1 - r) && got[r][BYTES - 1] == got[r][0]);
    }
}

typedef struct {
    lc_group *g[2];
    atomic_int stop;
    uint32_t rounds;
} talk;

static void *talking(void *argument) {
    talk *t = argument;
    for (; !atomic_load(&t->stop) || t->rounds < 5; t->rounds++)
        exchange(t->g, (uint8_t)(t->rounds * 3 + 1));
    return NULL;
}

static void run(uint8_t sealed) {
    swarm s = {.sealed = sealed};
    talk t = {.rounds = 0};
    pthread_t thread;
    start(&s, 0);
    start(&s, 1);
    admit(&s, 0, 1);
    admit(&s, 1, 0);
    t.g[0] = group(&s, 0, 1, TALKERS);
    t.g[1] = group(&s, 1, 0, TALKERS);
    pthread_create(&thread, NULL, talking, &t);
    for (uint8_t i = 0; i < INCARNATIONS; i++) {
        s.coming = i;
        start(&s, 2);
        admit(&s, 0, 2);
        admit(&s, 2, 0);
        lc_group *g[2] = {group(&s, 0, 2, VISIT + i), group(&s, 2, 0, VISIT + i)};
        for (int k = 0; k < 10; k++)
            exchange(g, (uint8_t)(i * 5 + 2 + k));
        lc_peer_stats seen = {.link_loss = 1};
        lc_group_peer_stats(g[0], 1, &seen);
        CHECK_AT(seen.link_loss < 0.3, "coming %d: %g", i, seen.link_loss);
        CHECK(lc_host_admit(s.host[0], 2, NULL, NULL) == LC_E_ARGUMENT);
        lc_group_close(g[1]);
        lc_host_close(s.host[2]);
        lc_group_close(g[0]);
        if (i % 2)
            CHECK(lc_host_admit(s.host[0], 2, NULL, NULL) == LC_OK);
    }
    atomic_store(&t.stop, 1);
    pthread_join(thread, NULL);
    CHECK(t.rounds >= 5);
    for (int r = 0; r < 2; r++)
        lc_group_close(t.g[r]);
    for (int r = 0; r < 2; r++)
        lc_host_close(s.host[r]);
}

int main(void) {
    run(0);
    if (!lc_crypto_load(NULL))
        run(1);
    return check_result("test_admission");
}
