/* Out-of-band datagrams, for the sanitizers: two engines carry messages all the time, while
 * strangers and the engines' users throw out-of-band datagrams at them, and a thread of each takes
 * what has come. */
#define _DEFAULT_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SAID = 20000, ELEMENTS = 20000, LONG = LC_OOB_BYTES + 1 };

typedef struct {
    lc_host *host;
    int descriptor;
    uint16_t from; /* the other's port */
    uint32_t heard, last;
    atomic_int stop;
} ear;

static lc_address here(uint16_t port) {
    return (lc_address){.host = "127.0.0.1", .port = port, .memory = -1, .wake = -1};
}

static lc_host *start(uint16_t number, uint16_t ports[2], int *descriptor) {
    lc_host_config c = {.address = "127.0.0.1",
                        .process = number,
                        .processes = 2,
                        .payload_bytes = NET_PAYLOAD,
                        .eager_bytes = 1 << 16};
    lc_failure failure;
    lc_link_info info;
    lc_host *host = lc_host_open(&c, &failure);
    CHECK(host != NULL);
    lc_host_link(host, 0, &info);
    ports[number] = info.port;
    if (!descriptor)
        return host;
    uint8_t early[] = LC_OOB_MARK;
    lc_address to = here(info.port);
    CHECK(lc_host_say(host, &to, early, sizeof early) == LC_E_ARGUMENT);
    *descriptor = lc_host_oob_open(host);
    CHECK(*descriptor >= 0);
    CHECK(lc_host_oob_open(host) == LC_E_ARGUMENT);
    return host;
}

static void introduce(lc_host *host[2], const uint16_t ports[2]) {
    lc_address at[2] = {here(ports[0]), here(ports[1])};
    for (int i = 0; i < 2; i++)
        CHECK(lc_host_start(host[i], NET_SESSION, at) == LC_OK);
    CHECK(lc_host_oob_open(host[0]) == LC_E_ARGUMENT);
}

static void take(ear *e) {
    static const uint8_t loopback[16] = {[10] = 0xFF, 0xFF, 127, 0, 0, 1};
    lc_oob_datagram datagram;
    while (lc_host_heard(e->host, &datagram)) {
        uint32_t number = 0;
        CHECK(!memcmp(datagram.address, loopback, sizeof loopback));
        CHECK(datagram.length >= 8);
        memcpy(&number, datagram.data + 4, sizeof number);
        if (datagram.port != e->from)
            continue; /* a stranger's */
        CHECK(number > e->last);
        CHECK(datagram.length == 9 + number % 119 &&
              datagram.data[datagram.length - 1] == (uint8_t)number);
        e->last = number;
        e->heard++;
    }
}

static void *hearing(void *arg) {
    ear *e = arg;
    while (!atomic_load(&e->stop)) {
        struct pollfd fd = {e->descriptor, POLLIN, 0};
        uint64_t drained;
        if (poll(&fd, 1, 100) > 0)
            (void)!read(e->descriptor, &drained, sizeof drained);
        take(e);
    }
    return NULL;
}

static uint16_t made(uint8_t data[LONG], uint32_t number) {
    static const uint8_t mark[] = LC_OOB_MARK;
    uint16_t n = (uint16_t)(9 + number % 119);
    memset(data, (uint8_t)number, LONG);
    memcpy(data, mark, sizeof mark);
    memcpy(data + 4, &number, sizeof number);
    return n;
}

static lc_group *group(lc_host *host, uint16_t rank) {
    lc_group_config c = {.number = NET_GROUP,
                         .rank = rank,
                         .size = 2,
                         .deadline_min_ns = SECOND,
                         .deadline_max_ns = SECOND,
                         .link_ns = 20 * SECOND,
                         .reorder_ns = MS,
                         .met = 1};
    lc_failure failure;
    lc_group *g = lc_group_open(host, &c, &failure);
    CHECK(g != NULL);
    return g;
}

/* One that is too long, ones that are none, and one of a stranger. */
static void strangers(uint16_t port) {
    uint8_t data[LONG] = {0};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK(sendto(fd, data, sizeof data, 0, (struct sockaddr *)&to, sizeof to) == LONG);
    uint16_t n = made(data, 5);
    CHECK(sendto(fd, data, n, 0, (struct sockaddr *)&to, sizeof to) == n);
    CHECK(sendto(fd, data, LONG, 0, (struct sockaddr *)&to, sizeof to) == LONG);
    CHECK(sendto(fd, data, 3, 0, (struct sockaddr *)&to, sizeof to) == 3);
    close(fd);
}

static void refused(lc_host *host, uint16_t port) {
    uint8_t data[LONG];
    lc_address to = here(port), six = {.host = "::1", .port = port}, none = {.host = "there"};
    uint16_t n = made(data, 3);
    CHECK(lc_host_say(host, &six, data, n) == LC_E_ARGUMENT);
    CHECK(lc_host_say(host, &none, data, n) == LC_E_ARGUMENT);
    CHECK(lc_host_say(host, &to, data, LONG) == LC_E_ARGUMENT);
    data[0] = 'B';
    CHECK(lc_host_say(host, &to, data, n) == LC_E_ARGUMENT);
}

static void end(lc_group *g, int64_t ticket) {
    CHECK(ticket >= 0);
    if (ticket <= 0)
        return;
    CHECK(lc_group_wait(g, ticket, 60 * SECOND) == LC_OK);
    lc_group_release(g, ticket);
}

static void exchange(lc_group *g[2], uint8_t *sent, uint8_t *got) {
    lc_message m = {
        .data = sent, .elements = ELEMENTS, .timeout_ns = 60 * SECOND, .element_bytes = 1};
    m.peer = 1;
    int64_t out = lc_group_post(g[0], &m);
    m.data = got;
    m.peer = 0;
    m.receive = 1;
    int64_t in = lc_group_post(g[1], &m);
    end(g[0], out);
    end(g[1], in);
    CHECK(!memcmp(sent, got, ELEMENTS));
}

static void run(void) {
    uint16_t ports[2];
    ear ears[2] = {{.heard = 0}, {.heard = 0}};
    lc_host *host[2];
    lc_group *g[2];
    pthread_t threads[2];
    uint8_t data[LONG], sent[ELEMENTS], got[ELEMENTS];
    for (uint16_t i = 0; i < 2; i++)
        host[i] = start(i, ports, &ears[i].descriptor);
    introduce(host, ports);
    refused(host[0], ports[1]);
    for (uint16_t i = 0; i < 2; i++) {
        ears[i].host = host[i];
        ears[i].from = ports[1 - i];
        g[i] = group(host[i], i);
        pthread_create(&threads[i], NULL, hearing, &ears[i]);
    }
    for (uint32_t number = 1; number <= SAID; number++) {
        uint16_t n = made(data, number);
        for (int i = 0; i < 2; i++) {
            lc_address to = here(ports[1 - i]);
            CHECK(lc_host_say(host[i], &to, data, n) == LC_OK);
        }
        if (number % 1000 == 0) {
            memset(sent, (int)(number / 1000), sizeof sent);
            exchange(g, sent, got);
            strangers(ports[0]);
        }
    }
    usleep(300000); /* what is on its way arrives: the last ones are heard, without a further one */
    for (int i = 0; i < 2; i++) {
        atomic_store(&ears[i].stop, 1);
        pthread_join(threads[i], NULL);
        CHECK_AT(ears[i].heard > SAID / 100, "heard %u", ears[i].heard);
        lc_group_close(g[i]);
    }
    CHECK(lc_host_oob_dropped(host[0]) >= SAID / 1000);
    for (int i = 0; i < 2; i++)
        lc_host_close(host[i]);
}

/* Nobody takes them: as many are kept as there is room for, and the oldest. */
static void overflow(void) {
    uint16_t ports[2];
    int descriptor;
    uint8_t data[LONG];
    lc_host *host[2] = {start(0, ports, NULL), start(1, ports, &descriptor)};
    lc_oob_datagram datagram;
    uint32_t kept = 0;
    introduce(host, ports);
    lc_address to = here(ports[1]);
    for (uint32_t number = 1; number <= 1000; number++) {
        CHECK(lc_host_say(host[1], &to, data, made(data, number)) == LC_OK);
        usleep(20);
    }
    usleep(200000);
    while (lc_host_heard(host[1], &datagram))
        kept += datagram.port == ports[1];
    CHECK_AT(kept == 256, "kept %u", kept);
    CHECK(lc_host_oob_dropped(host[1]) > 0);
    CHECK(!lc_host_heard(host[0], &datagram) && !lc_host_oob_dropped(host[0]));
    for (int i = 0; i < 2; i++)
        lc_host_close(host[i]);
}

/* What looks like one is malformed where there are none. */
static void none(void) {
    uint16_t ports[2];
    lc_stats stats = {.malformed = 0};
    lc_host *host[2] = {start(0, ports, NULL), start(1, ports, NULL)};
    introduce(host, ports);
    lc_group *g = group(host[0], 0);
    for (int turn = 0; turn < 200 && stats.malformed < 4; turn++) {
        if (!turn)
            strangers(ports[0]);
        usleep(10000);
        lc_group_stats(g, &stats);
    }
    CHECK(stats.malformed == 4);
    lc_group_close(g);
    for (int i = 0; i < 2; i++)
        lc_host_close(host[i]);
}

int main(void) {
    run();
    overflow();
    none();
    return check_result("test_out_of_band");
}
