/* Throws changed copies of real datagrams, with the right session, address and checksum, and some
 * that are made up (forge.h), at engines that work: with sockets and threads. test_sim does the
 * same in virtual time. A relay stands between them: it passes on all that they send, and throws
 * besides.
 *
 * In the first group, what is thrown names only odd operations, and messages from rank 0. So even
 * operations must end as means over some of the ranks, and messages from rank 1 come as they were
 * sent, whatever else happens; or they end with an error. A changed READY may end the group with a
 * mismatch: then the next pair begins. The other groups suffer everything, and are closed at any
 * time. Nothing may crash, hang or touch memory that is not its own; the sanitizers see to that. */
#define _DEFAULT_SOURCE
#include "forge.h"
#include "net.h"
#include "sets.h"
#include "wire.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 2, SEGMENT = 1500, DEEP = 6, OPERATIONS = 60, TAGS = 3, WILD_GROUPS = 2 };

static forger hostile;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* Who sends the messages that a record is about. */
static uint16_t sender_of(const lc_header *h, const lc_record *r) {
    int by_sender = r->kind == LC_R_MESSAGE || r->kind == LC_R_FIN || r->kind == LC_R_WAIT;
    return by_sender ? h->sender : h->receiver;
}

static void spare(void *context, lc_header *h, lc_record *r) {
    (void)context;
    if (h->group != NET_GROUP || (!r && h->type == LC_CONTROL))
        return;
    if (!r) {
        if (h->slot == LC_SLOT_MESSAGE && h->sender)
            h->slot = 0;
        if (h->slot != LC_SLOT_MESSAGE)
            h->op |= 1;
        return;
    }
    if (forge_is_message(r) && sender_of(h, r))
        *r = (lc_record){.kind = LC_R_WAIT, .op = r->op};
    if (!forge_is_message(r))
        r->op |= 1;
}

/* ---- the relay ---- */

typedef struct {
    int fd[RANKS];
    struct sockaddr_in real[RANKS];
    uint16_t real_port[RANKS];
    int stop;
    pthread_t thread;
} relay;

static unsigned long thrown, passed;

static void give(const relay *r, uint16_t to, const uint8_t *bytes, size_t n) {
    (void)!sendto(r->fd[1 - to], bytes, n, 0, (const struct sockaddr *)&r->real[to],
                  sizeof r->real[to]);
}

static void *pass_on(void *argument) {
    relay *r = argument;
    struct pollfd fds[RANKS];
    for (int i = 0; i < RANKS; i++)
        fds[i] = (struct pollfd){r->fd[i], POLLIN, 0};
    while (!__atomic_load_n(&r->stop, __ATOMIC_RELAXED)) {
        if (poll(fds, RANKS, 20) <= 0)
            continue;
        for (uint16_t to = 0; to < RANKS; to++) {
            uint8_t bytes[FORGE_MOST];
            ssize_t got;
            while ((got = recv(r->fd[to], bytes, sizeof bytes, 0)) >= 0) {
                give(r, to, bytes, (size_t)got);
                passed++;
                forge_see(&hostile, 1 - to, to, bytes, (size_t)got);
                for (uint32_t k = forge_below(&hostile, 3); k; k--) {
                    forged f;
                    if (!forge_next(&hostile, &f))
                        continue;
                    give(r, f.to, f.bytes, f.size);
                    thrown++;
                }
            }
        }
    }
    return NULL;
}

static void relay_open(relay *r) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < RANKS; i++) {
        struct sockaddr_in here = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof here;
        r->fd[i] = socket(AF_INET, SOCK_DGRAM, 0);
        if (r->fd[i] < 0 || bind(r->fd[i], (struct sockaddr *)&here, sizeof here) != 0 ||
            getsockname(r->fd[i], (struct sockaddr *)&here, &n) != 0)
            abort();
        (void)fcntl(r->fd[i], F_SETFL, O_NONBLOCK);
        r->real_port[i] = ntohs(here.sin_port);
    }
}

static void relay_close(relay *r) {
    __atomic_store_n(&r->stop, 1, __ATOMIC_RELAXED);
    pthread_join(r->thread, NULL);
    for (int i = 0; i < RANKS; i++)
        close(r->fd[i]);
}

/* ---- what the engines do meanwhile ---- */

/* What a rank does with one number: an operation, a send and a receive. */
typedef struct {
    int number;
    int64_t operation, send, receive;
    float *data;
    uint8_t *sent, *room;
} task;

typedef struct {
    const net *n;
    uint16_t rank;
    int ended, talked, failed;
    lc_group *wild;
    uint32_t wild_number;
    float *wild_data[OPERATIONS];
    int n_wild;
} user;

/* Failures that spoiled packets may bring about: calls and messages that seem to differ, the
 * others' end after that, and what is asked for in vain. */
static int is_forgeable(int code) {
    return code == LC_E_MISMATCH || code == LC_E_ABORTED || code == LC_E_TIMEOUT ||
           code == LC_E_MESSAGE || code == LC_E_MESSAGE_LATE;
}

static size_t bytes_of(int number) {
    static const size_t bytes[] = {0, 40, 700, 5000, 70000};
    return bytes[number % 5];
}

static uint8_t byte_of(uint16_t sender, int number) {
    return (uint8_t)(1 + 2 * number + sender);
}

static int64_t post(const user *u, lc_group *group, void *data, int number, int receive) {
    lc_message m = {.data = data,
                    .elements = bytes_of(number),
                    .tag = (uint64_t)(number % TAGS),
                    .timeout_ns = u->n->timeout_ns,
                    .type = 3,
                    .element_bytes = 1,
                    .peer = 1 - u->rank,
                    .receive = (uint8_t)receive};
    return lc_group_post(group, &m);
}

/* Which kind an operation is, is decided by its number, so that the ranks agree. */
static void begin(const user *u, task *t, int number) {
    lc_group *g = u->n->group[u->rank];
    t->number = number;
    memset(t->sent, byte_of(u->rank, number), bytes_of(number));
    fill(t->data, RANKS * SEGMENT, u->rank);
    t->operation =
        net_submit(u->n, u->rank, number / 2 % 2, SEGMENT, t->data, number % 8 == 6, number % 3, 0);
    t->receive = post(u, g, t->room, number, 1);
    t->send = post(u, g, t->sent, number, 0);
    CHECK_AT(t->operation > 0 || is_forgeable((int)t->operation), "operation %d at rank %d: %d",
             number, u->rank, (int)t->operation);
    CHECK_AT(t->receive > 0 || is_forgeable((int)t->receive), "receive %d at rank %d: %d", number,
             u->rank, (int)t->receive);
    CHECK_AT(t->send >= 0 || is_forgeable((int)t->send), "send %d at rank %d: %d", number, u->rank,
             (int)t->send);
}

/* Returns whether it ended well. */
static int end_one(user *u, const task *t, int64_t ticket, const char *what) {
    lc_group *g = u->n->group[u->rank];
    lc_report report;
    lc_failure failure;
    if (ticket <= 0)
        return 0;
    int code = lc_group_wait(g, ticket, 40 * SECOND);
    CHECK_AT(code != LC_PENDING, "%s %d hangs at rank %d", what, t->number, u->rank);
    CHECK(lc_group_result(g, ticket, &report, &failure) == code);
    lc_group_release(g, ticket);
    CHECK_AT(code == LC_OK || is_forgeable(code), "%s %d at rank %d: code %d", what, t->number,
             u->rank, code);
    u->failed += code != LC_OK;
    return code == LC_OK;
}

static void end(user *u, const task *t) {
    int good = 1;
    int ended = end_one(u, t, t->operation, "operation");
    for (size_t i = 0; ended && t->number % 2 == 0 && i < RANKS * SEGMENT; i++)
        good &= is_mean_of_some(t->data[i], RANKS);
    CHECK_AT(good, "operation %d at rank %d", t->number, u->rank);
    u->ended += ended;
    int came = end_one(u, t, t->receive, "receive");
    for (size_t i = 0; came && u->rank == 0 && i < bytes_of(t->number); i++)
        good &= t->room[i] == byte_of(1 - u->rank, t->number);
    CHECK_AT(good, "message %d at rank %d", t->number, u->rank);
    u->talked += came;
    end_one(u, t, t->send, "send");
}

/* ---- groups that suffer everything ---- */

static void open_wild(user *u) {
    lc_failure failure;
    lc_group_config c = {.number = NET_GROUP + ++u->wild_number,
                         .rank = u->rank,
                         .size = RANKS,
                         .deadline_min_ns = SECOND / 5,
                         .deadline_max_ns = SECOND / 5};
    u->wild = lc_group_open(u->n->host[u->rank], &c, &failure);
    if (!CHECK(u->wild != NULL))
        abort();
}

/* What it does in there nobody waits for: closing it ends it. */
static void use_wild(user *u, int number) {
    if (!u->wild)
        return;
    float *data = malloc(RANKS * SEGMENT * sizeof *data + bytes_of(4));
    u->wild_data[u->n_wild++] = data;
    fill(data, RANKS * SEGMENT, u->rank);
    void *bytes = data + RANKS * SEGMENT;
    (void)net_submit_to(u->wild, u->n, u->rank, number % 2, SEGMENT, data, number % 3 == 0, 0, 0);
    (void)post(u, u->wild, bytes, number, (number + u->rank) % 2);
}

static void close_wild(user *u) {
    if (u->wild)
        lc_group_close(u->wild);
    u->wild = NULL;
    while (u->n_wild)
        free(u->wild_data[--u->n_wild]);
}

/* The ranks do it at different times. */
static void turn_wild(user *u, int number) {
    int each = OPERATIONS / WILD_GROUPS;
    if (number % each == 0)
        open_wild(u);
    use_wild(u, number);
    if (number % each == each / 2 + 5 * u->rank)
        close_wild(u);
}

static void *use(void *argument) {
    user *u = argument;
    task tasks[DEEP];
    for (int i = 0; i < DEEP; i++)
        tasks[i] = (task){.data = malloc(RANKS * SEGMENT * sizeof(float)),
                          .sent = malloc(bytes_of(4)),
                          .room = malloc(bytes_of(4))};
    for (int i = 0; i < OPERATIONS + DEEP; i++) {
        task *t = &tasks[i % DEEP];
        if (i >= DEEP)
            end(u, t);
        if (i >= OPERATIONS)
            continue;
        begin(u, t, i);
        turn_wild(u, i);
    }
    close_wild(u);
    for (int i = 0; i < DEEP; i++) {
        free(tasks[i].data);
        free(tasks[i].sent);
        free(tasks[i].room);
    }
    return NULL;
}

typedef struct {
    int failed, ended, talked; /* pairs, operations, messages */
} sums;

/* The pair's number decides whether operations are encoded, linger, and have parity or leave that
 * to the loss; nothing is lost here but by what is thrown. */
static void session(int number, sums *s) {
    net n;
    relay r;
    user users[RANKS];
    pthread_t threads[RANKS];
    int failed = 0;
    relay_open(&r);
    memset(hostile.kept, 0, sizeof hostile.kept);
    net_open_at(&n, RANKS, (lc_inject){.loss = 0}, SECOND / 5, r.real_port, 6 * SECOND);
    n.code = number % 3 == 1 ? lc_code(8, 3) : 0;
    n.most = number % 3 == 2 ? 64 : 0;
    static const uint8_t encodings[][2] = {
        {LC_ENCODING_SAME},
        {LC_ENCODING_BF16},
        {LC_ENCODING_INT4 | LC_ENCODING_GROUP_32 | LC_ENCODING_SPIKES | LC_ENCODING_STOCHASTIC},
        {LC_ENCODING_INT8, LC_ENCODING_INT3}};
    n.encoding = encodings[number % 4][0];
    n.gather_encoding = encodings[number % 4][1];
    n.lingers = (uint8_t)(number / 2 % 2);
    for (int i = 0; i < RANKS; i++)
        r.real[i] = (struct sockaddr_in){.sin_family = AF_INET,
                                         .sin_port = htons(n.port[i]),
                                         .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    pthread_create(&r.thread, NULL, pass_on, &r);
    for (uint16_t i = 0; i < RANKS; i++) {
        users[i] = (user){.n = &n, .rank = i};
        pthread_create(&threads[i], NULL, use, &users[i]);
    }
    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
        failed += users[i].failed > 0;
        s->ended += users[i].ended;
        s->talked += users[i].talked;
    }
    net_close(&n);
    relay_close(&r);
    s->failed += failed > 0;
}

static long long option(int argc, char **argv, const char *name, long long otherwise) {
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], name, strlen(name)) == 0)
            return strtoll(argv[i] + strlen(name), NULL, 10);
    return otherwise;
}

static int is_enough(const sums *s) {
    return thrown > 100 && s->ended > 10 && s->talked > 10;
}

int main(int argc, char **argv) {
    uint64_t until = now_ns() + (uint64_t)option(argc, argv, "-max_total_time=", 10) * SECOND;
    hostile = (forger){.random = (uint64_t)option(argc, argv, "-seed=", 1),
                       .session = NET_SESSION,
                       .processes = RANKS,
                       .payload_bytes = NET_PAYLOAD,
                       .first_group = NET_GROUP,
                       .groups = 1 + WILD_GROUPS,
                       .tags = TAGS - 1,
                       .rule = spare};
    sums s = {.failed = 0};
    int sessions = 0;
    uint64_t longest = 0;
    do {
        uint64_t begin = now_ns();
        session(sessions++, &s);
        if (now_ns() - begin > longest)
            longest = now_ns() - begin;
        /* A slow machine goes on until the check below means something. */
    } while (now_ns() < until || (!is_enough(&s) && sessions < 100));
    printf("fuzz_engine: %lu datagrams passed, %lu thrown; %d pairs, %d of them failed, longest "
           "%.1f s; %d operations ended well, %d messages came\n",
           passed, thrown, sessions, s.failed, (double)longest * 1e-9, s.ended, s.talked);
    CHECK(is_enough(&s));
    return check_result("fuzz_engine");
}
