/* The shared-memory link by itself: several ends in one process, each with a memory of its own. */
#define _GNU_SOURCE
#include "check.h"
#include "link_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ENDS = 3, HEAD = 48, LONGEST_S = 20 };

static const uint16_t PROCESSES[ENDS] = {1, 4, 7}; /* of ten */

typedef struct {
    lc_link *link[ENDS];
    int descriptors[ENDS][2];
    uint16_t n;
} ends;

static uint64_t drawn = 1;

static uint32_t draw(uint32_t below) {
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(drawn >> 33) % below;
}

static lc_link *open_one(uint16_t process, uint16_t n, int descriptors[2]) {
    lc_host_config config = {.process = process, .processes = 10};
    lc_failure failure;
    lc_link *link = lc_shm_open(&config, PROCESSES, n, &lc_system_clock, descriptors, &failure);
    if (!CHECK(link != NULL))
        abort();
    return link;
}

static int introduce(lc_link *to, uint16_t process, const int descriptors[2]) {
    lc_address a = {.memory = descriptors[0], .wake = descriptors[1], .link = 1};
    return lc_link_set_peer(to, process, &a);
}

static void open_ends(ends *e, uint16_t n) {
    e->n = n;
    for (uint16_t i = 0; i < n; i++)
        e->link[i] = open_one(PROCESSES[i], n, e->descriptors[i]);
    for (uint16_t i = 0; i < n; i++)
        for (uint16_t k = 0; k < n; k++)
            if (i != k)
                CHECK(introduce(e->link[i], PROCESSES[k], e->descriptors[k]) == LC_OK);
}

static void close_ends(ends *e) {
    for (uint16_t i = 0; i < e->n; i++)
        lc_link_close(e->link[i]);
}

static lc_shm *shm(const ends *e, int i) {
    return lc_shm_of(e->link[i]);
}

static lc_shm_peer *peer(const ends *e, int i, int k) {
    return lc_shm_peer_of(shm(e, i), PROCESSES[k]);
}

/* ---- packets: their bytes follow from their number ---- */

static void fill(uint8_t *bytes, size_t n, uint32_t number) {
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(number * 31 + i * 7 + (i >> 8));
}

static int holds(const uint8_t *bytes, size_t n, uint32_t number) {
    int good = 1;
    for (size_t i = 0; i < n; i++)
        good &= bytes[i] == (uint8_t)(number * 31 + i * 7 + (i >> 8));
    return good;
}

static uint8_t head_out[HEAD], payload_out[LC_SHARED_PAYLOAD];

/* The payload says what `number` is, and so does the header. */
static void send_one(const ends *e, int from, int to, uint32_t number, size_t payload) {
    struct iovec iov[2] = {{head_out, HEAD}, {payload_out, payload}};
    lc_run run = {.iov = iov,
                  .n_packets = 1,
                  .packet_bytes = (uint32_t)(HEAD + payload),
                  .peer = PROCESSES[to]};
    int error;
    fill(head_out, HEAD, number);
    fill(payload_out, payload, number + 1);
    CHECK(lc_link_send(e->link[from], &run, 1, &error) == 1);
}

static int is_packet(const lc_arrival *a, uint32_t number, size_t payload) {
    if (a->length != (a->rest ? HEAD : HEAD + payload) || a->stride != a->length)
        return 0;
    if (a->rest && a->rest_bytes != payload)
        return 0;
    return holds(a->data, HEAD, number) &&
           holds(a->rest ? a->rest : a->data + HEAD, payload, number + 1);
}

static uint64_t overflow(const ends *e, int i) {
    lc_link_stats stats;
    lc_link_stats_of(e->link[i], &stats);
    return stats.overflow;
}

/* ---- tests ---- */

static size_t size_of(uint32_t number) {
    static const size_t sizes[] = {0,    1,    LC_SHM_INSIDE_MIN - 1,  LC_SHM_INSIDE_MIN,
                                   300,  1424, LC_SHM_HEAD_MAX - HEAD, LC_SHM_HEAD_MAX - HEAD + 1,
                                   4096, 8191, LC_SHARED_PAYLOAD - 1,  LC_SHARED_PAYLOAD};
    return sizes[(number * 2654435761u >> 16) % (sizeof sizes / sizeof *sizes)];
}

/* As many at a time as the credit lets go, so none is lost, however often the ring wraps round. */
static void test_order(void) {
    ends e;
    open_ends(&e, 2);
    uint32_t sent = 0, came = 0, credit = lc_link_credits(e.link[1], LC_SHARED_PAYLOAD, 1);
    CHECK(credit >= 8);
    while (came < 20 * LC_SHM_ENTRIES) {
        for (uint32_t n = draw(credit + 1); n && sent - came < credit; n--, sent++)
            send_one(&e, 0, 1, sent, size_of(sent));
        lc_arrival arrivals[LC_RECEIVE_BUFFERS];
        int n = lc_link_receive(e.link[1], arrivals, 1 + (int)draw(LC_RECEIVE_BUFFERS));
        for (int i = 0; i < n; i++, came++) {
            CHECK_AT(is_packet(&arrivals[i], came, size_of(came)), "packet %u", came);
            CHECK(lc_link_is_from(e.link[1], &arrivals[i], PROCESSES[0]));
            CHECK(!lc_link_is_from(e.link[1], &arrivals[i], PROCESSES[1]));
        }
    }
    CHECK(sent > 10 * LC_SHM_ENTRIES && overflow(&e, 0) == 0);
    close_ends(&e);
}

/* What finds no room is lost and counted; the rest comes, and then there is room again. Another
 * peer has its own. */
static void test_a_peer_that_takes_nothing(void) {
    for (size_t payload = 16; payload <= 4096; payload += 4080) {
        ends e;
        open_ends(&e, ENDS);
        uint32_t room = payload > LC_SHM_HEAD_MAX ? shm(&e, 0)->share : shm(&e, 0)->entries;
        for (uint32_t i = 0; i < room + 10; i++)
            send_one(&e, 0, 1, i, payload);
        CHECK(overflow(&e, 0) == 10);
        lc_arrival a;
        for (uint32_t i = 0; i < 3 * LC_SHM_ENTRIES; i++) {
            send_one(&e, 0, 2, i, payload);
            CHECK(lc_link_receive(e.link[2], &a, 1) == 1 && is_packet(&a, i, payload));
        }
        for (uint32_t i = 0; i < room; i++)
            CHECK(lc_link_receive(e.link[1], &a, 1) == 1 && is_packet(&a, i, payload));
        CHECK(lc_link_receive(e.link[1], &a, 1) == 0);
        send_one(&e, 0, 1, 99, payload);
        CHECK(lc_link_receive(e.link[1], &a, 1) == 1 && is_packet(&a, 99, payload));
        CHECK(overflow(&e, 0) == 10);
        close_ends(&e);
    }
}

enum { SAME_PACKETS = 3, SAME_BYTES = 5000 };

/* A run of packets that several get, with these contents: numbers of payloads. */
static void send_same(const ends *e, int to, const uint64_t *contents, uint32_t n) {
    static uint8_t heads[SAME_PACKETS][HEAD], payloads[SAME_PACKETS][SAME_BYTES];
    struct iovec iov[2 * SAME_PACKETS];
    int error;
    for (uint32_t k = 0; k < n; k++) {
        fill(heads[k], HEAD, (uint32_t)contents[k]);
        fill(payloads[k], SAME_BYTES, (uint32_t)contents[k] + 1);
        iov[2 * k] = (struct iovec){heads[k], HEAD};
        iov[2 * k + 1] = (struct iovec){payloads[k], SAME_BYTES};
    }
    lc_run run = {.iov = iov,
                  .n_packets = n,
                  .packet_bytes = HEAD + SAME_BYTES,
                  .peer = PROCESSES[to],
                  .receivers = ENDS - 1,
                  .contents = contents};
    CHECK(lc_link_send(e->link[0], &run, 1, &error) == (int)n);
}

static void take_same(const ends *e, int at, const uint64_t *contents, uint32_t n) {
    lc_arrival a;
    for (uint32_t k = 0; k < n; k++)
        CHECK(lc_link_receive(e->link[at], &a, 1) == 1 &&
              is_packet(&a, (uint32_t)contents[k], SAME_BYTES));
    CHECK(lc_link_receive(e->link[at], &a, 1) == 0);
}

/* One copy for both; it stays as long as one of them has to read it. */
static void test_one_payload_for_two(void) {
    const uint64_t contents[SAME_PACKETS] = {5, 6, 7};
    ends e;
    open_ends(&e, ENDS);
    uint16_t idle = shm(&e, 0)->n_idle;
    send_same(&e, 1, contents, SAME_PACKETS);
    send_same(&e, 2, contents, SAME_PACKETS);
    CHECK(shm(&e, 0)->copied == SAME_PACKETS && shm(&e, 0)->n_idle == idle - SAME_PACKETS);
    take_same(&e, 1, contents, SAME_PACKETS);
    send_one(&e, 0, 1, 7, SAME_BYTES);
    CHECK(shm(&e, 0)->n_idle == idle - SAME_PACKETS - 1); /* the second peer has taken none */
    take_same(&e, 2, contents, SAME_PACKETS);
    send_one(&e, 0, 2, 8, SAME_BYTES);
    CHECK(shm(&e, 0)->n_idle == idle - 2);
    close_ends(&e);
}

/* The one that was freed last rests: the receiver's core still has it. Nor are more filled than
 * there have to be. */
static void test_buffers_take_turns(void) {
    const uint8_t *place[3 * LC_SHM_BUFFERS];
    lc_arrival a;
    ends e;
    open_ends(&e, ENDS);
    CHECK(shm(&e, 0)->n_buffers > LC_SHM_BUFFERS);
    for (uint32_t i = 0; i < 3 * LC_SHM_BUFFERS; i++) {
        send_one(&e, 0, 1, i, SAME_BYTES);
        CHECK(lc_link_receive(e.link[1], &a, 1) == 1 && is_packet(&a, i, SAME_BYTES));
        place[i] = a.rest;
        CHECK(lc_link_receive(e.link[1], &a, 1) == 0);
        for (uint32_t k = 1; k <= i && k < LC_SHM_BUFFERS; k++)
            CHECK_AT(place[i] != place[i - k], "packet %u, and %u before", i, k);
        if (i >= LC_SHM_BUFFERS)
            CHECK_AT(place[i] == place[i - LC_SHM_BUFFERS], "packet %u", i);
    }
    close_ends(&e);
}

/* What one has taken is kept for the other, as long as there are buffers that nobody needs. */
static void test_a_late_receiver_gets_the_same_copy(void) {
    const uint64_t contents[SAME_PACKETS] = {1000, 1001, 1002};
    lc_arrival a;
    ends e;
    open_ends(&e, ENDS);
    const lc_shm *s = shm(&e, 0);
    send_same(&e, 1, contents, SAME_PACKETS);
    take_same(&e, 1, contents, SAME_PACKETS);
    for (uint32_t i = 0; i < 2u * s->n_buffers; i++) {
        send_one(&e, 0, 1, i, SAME_BYTES);
        CHECK(lc_link_receive(e.link[1], &a, 1) == 1 && is_packet(&a, i, SAME_BYTES));
        CHECK(lc_link_receive(e.link[1], &a, 1) == 0);
    }
    uint64_t before = s->copied;
    send_same(&e, 2, contents, SAME_PACKETS);
    CHECK(s->copied == before);
    take_same(&e, 2, contents, SAME_PACKETS);
    /* Others are filled over it when no other buffer is left, the first that was kept first. */
    for (uint64_t content = 2000; content < 2000u + s->n_buffers; content++) {
        send_same(&e, 1, &content, 1);
        take_same(&e, 1, &content, 1);
    }
    const uint64_t more[2] = {3000, 2000};
    before = s->copied;
    send_same(&e, 1, &more[0], 1); /* over 2000 */
    CHECK(s->copied == before + 1);
    take_same(&e, 1, &more[0], 1);
    send_same(&e, 2, &more[1], 1);
    CHECK(s->copied == before + 2);
    take_same(&e, 2, &more[1], 1);
    close_ends(&e);
}

/* ---- sleeping ---- */

enum { PASSED = 20000 };

typedef struct {
    ends *e;
    uint32_t naps, came;
    atomic_int over;
} sleeper;

/* Sleeps whenever nothing is there. A wake-up that is lost ends in the poll's timeout. */
static void *sleep_and_take(void *argument) {
    sleeper *w = argument;
    lc_link *link = w->e->link[1];
    while (w->came < PASSED) {
        lc_arrival arrivals[LC_RECEIVE_BUFFERS];
        int n = lc_link_receive(link, arrivals, LC_RECEIVE_BUFFERS);
        for (int i = 0; i < n; i++, w->came++)
            CHECK(is_packet(&arrivals[i], 5, 32));
        if (n)
            continue;
        uint64_t timeout_ns = LONGEST_S * 1000000000u;
        struct pollfd fd;
        if (lc_link_descriptors(link, 0, &fd, &timeout_ns) != 1 || !timeout_ns)
            continue;
        w->naps++;
        if (!CHECK(poll(&fd, 1, LONGEST_S * 1000) == 1))
            break;
    }
    atomic_store(&w->over, 1);
    return NULL;
}

static void test_nobody_sleeps_through_a_packet(void) {
    ends e;
    pthread_t thread;
    open_ends(&e, 2);
    sleeper w = {.e = &e};
    pthread_create(&thread, NULL, sleep_and_take, &w);
    for (uint32_t sent = 0; sent < PASSED; sent++) {
        while (sent - atomic_load(&peer(&e, 0, 1)->in->taken) >= 8 && !atomic_load(&w.over))
            usleep(1); /* so it sleeps often */
        for (uint32_t i = draw(300); i; i--)
            __asm__ volatile("");
        send_one(&e, 0, 1, 5, 32);
    }
    pthread_join(thread, NULL);
    lc_link_stats stats;
    lc_link_stats_of(e.link[0], &stats);
    CHECK(w.came == PASSED && w.naps > 0 && stats.send_calls > 0);
    close_ends(&e);
}

/* Who is awake is not woken, and nobody is woken twice from one nap. */
static void test_wakes_once(void) {
    ends e;
    lc_link_stats stats;
    lc_arrival a;
    struct pollfd fd;
    uint64_t timeout_ns = 1;
    open_ends(&e, 2);
    send_one(&e, 0, 1, 0, 32);
    CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && timeout_ns == 0);
    CHECK(lc_link_receive(e.link[1], &a, 1) == 1);
    timeout_ns = 1;
    CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && timeout_ns == 1);
    CHECK(poll(&fd, 1, 0) == 0);
    for (uint32_t i = 0; i < 5; i++)
        send_one(&e, 0, 1, i, 32);
    CHECK(poll(&fd, 1, 0) == 1);
    lc_link_stats_of(e.link[0], &stats);
    CHECK(stats.send_calls == 1);
    for (int i = 0; i < 5; i++)
        CHECK(lc_link_receive(e.link[1], &a, 1) == 1);
    send_one(&e, 0, 1, 0, 32);
    lc_link_stats_of(e.link[0], &stats);
    CHECK(stats.send_calls == 1); /* it is awake */
    CHECK(lc_link_receive(e.link[1], &a, 1) == 1);
    CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && poll(&fd, 1, 0) == 0);
    CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1);
    send_one(&e, 0, 1, 0, 32);
    CHECK(poll(&fd, 1, 0) == 1);
    close_ends(&e);
}

/* Who goes to sleep once more, though it has taken nothing, is woken once more. */
static void test_each_nap_is_ended(void) {
    enum { NAPS = 4 };
    ends e;
    struct pollfd fd;
    open_ends(&e, 2);
    for (uint32_t i = 0; i < NAPS; i++) {
        uint64_t timeout_ns = 1;
        CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && poll(&fd, 1, 0) == 0);
        send_one(&e, 0, 1, i, 32);
        CHECK_AT(poll(&fd, 1, 0) == 1, "nap %u", i);
    }
    for (uint32_t i = 0; i < NAPS; i++) { /* a receiver that looks is awake; its next nap is new */
        lc_arrival a;
        uint64_t timeout_ns = 1;
        CHECK(lc_link_receive(e.link[1], &a, 1) == 1 && is_packet(&a, i, 32));
        CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && poll(&fd, 1, 0) == 0);
        send_one(&e, 0, 1, NAPS + i, 32);
        CHECK_AT(poll(&fd, 1, 0) == 1, "nap %u after a packet", i);
    }
    close_ends(&e);
}

/* Who sleeps has said what it took: its peers have all of their room meanwhile. */
static void test_who_sleeps_has_told_what_it_took(void) {
    for (size_t payload = 16; payload <= 4096; payload += 4080) {
        ends e;
        open_ends(&e, 2);
        uint32_t room = payload > LC_SHM_HEAD_MAX ? shm(&e, 0)->share : shm(&e, 0)->entries;
        struct pollfd fd;
        uint64_t timeout_ns = 1;
        lc_arrival a;
        for (uint32_t i = 0; i < room; i++)
            send_one(&e, 0, 1, i, payload);
        for (uint32_t i = 0; i < room; i++)
            CHECK(lc_link_receive(e.link[1], &a, 1) == 1 && is_packet(&a, i, payload));
        CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && timeout_ns == 1);
        for (uint32_t i = 0; i < room; i++)
            send_one(&e, 0, 1, i, payload);
        CHECK_AT(overflow(&e, 0) == 0, "%zu bytes", payload);
        close_ends(&e);
    }
}

/* All who sleep and get something, each once, whatever the order of the runs. */
static void test_one_call_wakes_all(void) {
    enum { RUNS = 4 };
    static const int to[RUNS] = {1, 2, 2, 1};
    static uint8_t head[HEAD];
    struct iovec iov[2] = {{head, HEAD}, {head, 0}};
    lc_run runs[RUNS];
    lc_link_stats stats;
    lc_arrival arrivals[LC_RECEIVE_BUFFERS];
    struct pollfd fds[ENDS];
    ends e;
    int error;
    open_ends(&e, ENDS);
    fill(head, HEAD, 3);
    for (int i = 0; i < RUNS; i++)
        runs[i] =
            (lc_run){.iov = iov, .n_packets = 1, .packet_bytes = HEAD, .peer = PROCESSES[to[i]]};
    for (int at = 1; at < ENDS; at++) {
        uint64_t timeout_ns = 1;
        CHECK(lc_link_descriptors(e.link[at], 0, &fds[at], &timeout_ns) == 1 && timeout_ns == 1);
    }
    CHECK(lc_link_send(e.link[0], runs, RUNS, &error) == RUNS);
    lc_link_stats_of(e.link[0], &stats);
    CHECK(stats.send_calls == ENDS - 1);
    for (int at = 1; at < ENDS; at++)
        CHECK(poll(&fds[at], 1, 0) == 1 &&
              lc_link_receive(e.link[at], arrivals, LC_RECEIVE_BUFFERS) == 2);
    close_ends(&e);
}

/* ---- memory that holds nonsense ---- */

/* Of the second end, as a packet to the first: it is read no more, the third one is. */
static void check_broken(const ends *e, const char *how) {
    lc_arrival a;
    lc_event event;
    CHECK_AT(lc_link_receive(e->link[0], &a, 1) == 1 && a.length == 0, "%s", how);
    CHECK_AT(lc_link_receive(e->link[0], &a, 1) == 0, "%s", how);
    CHECK(lc_link_event(e->link[0], &event) && event.kind == LC_EVENT_LOST);
    CHECK(event.peer == PROCESSES[1] && event.sys_errno == EPROTO);
    send_one(e, 0, 1, 0, 32);
    CHECK(overflow(e, 0) == 1);
    send_one(e, 2, 0, 1, 32);
    CHECK(lc_link_receive(e->link[0], &a, 1) == 1 && is_packet(&a, 1, 32));
}

static uint64_t word_of(uint32_t number, uint64_t bytes, uint64_t buffer) {
    return buffer << 48 | bytes << 32 | number;
}

static void test_nonsense(void) {
    const struct {
        const char *how;
        uint64_t word;
        uint32_t rest;
    } bad[] = {
        {"no bytes", word_of(1, 0, LC_SHM_NONE), 0},
        {"a long head", word_of(1, LC_SHM_HEAD_MAX + 1, LC_SHM_NONE), 0},
        {"no such buffer", word_of(1, HEAD, 2 * LC_SHM_BUFFERS), 100},
        {"a long payload", word_of(1, HEAD, 0), LC_SHARED_PAYLOAD + 1},
        {"a payload of 4 GiB", word_of(1, HEAD, 0), UINT32_MAX},
        {"a payload beyond the entry", word_of(1, HEAD, LC_SHM_INSIDE), LC_SHM_HEAD_MAX - HEAD + 1},
        {"4 GiB behind the head", word_of(1, HEAD, LC_SHM_INSIDE), UINT32_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ends e;
        open_ends(&e, ENDS);
        lc_shm_entry *entry = &peer(&e, 1, 0)->out->entries[0];
        entry->rest_bytes = bad[i].rest;
        entry->word = bad[i].word;
        check_broken(&e, bad[i].how);
        close_ends(&e);
    }
}

/* Neither more than was sent, nor less than before. */
static void test_what_was_never_sent_is_taken(void) {
    for (uint32_t claim = 2; claim; claim = claim == 2 ? UINT32_MAX : 0) {
        ends e;
        lc_event event;
        open_ends(&e, ENDS);
        send_one(&e, 0, 1, 0, 4096);
        uint16_t idle = shm(&e, 0)->n_idle;
        atomic_store(&peer(&e, 1, 0)->out->taken, claim);
        send_one(&e, 0, 1, 1, 4096);
        CHECK(overflow(&e, 0) == 1 && shm(&e, 0)->n_idle == idle);
        CHECK(lc_link_event(e.link[0], &event) && event.peer == PROCESSES[1]);
        close_ends(&e);
    }
}

/* Who dies before it has written the word has sent nothing. */
static void test_half_a_packet(void) {
    ends e;
    lc_arrival a;
    open_ends(&e, 2);
    lc_shm_entry *entry = &peer(&e, 1, 0)->out->entries[0];
    fill(entry->head, HEAD, 0);
    entry->rest_bytes = 100;
    CHECK(lc_link_receive(e.link[0], &a, 1) == 0);
    send_one(&e, 1, 0, 3, 32);
    lc_link_close(e.link[1]); /* what it has sent can be read when it is gone */
    CHECK(lc_link_receive(e.link[0], &a, 1) == 1 && is_packet(&a, 3, 32));
    send_one(&e, 0, 1, 4, 32);
    lc_link_close(e.link[0]);
}

/* ---- who is believed ---- */

static void test_memory_of_others_is_only_read(void) {
    ends e;
    open_ends(&e, 2);
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, e.descriptors[0][0], 0) ==
          MAP_FAILED);
    CHECK(write(e.descriptors[0][0], "x", 1) < 0 && ftruncate(e.descriptors[0][0], 0) < 0);
    CHECK(ftruncate(e.descriptors[0][0], 1 << 30) < 0);
    close_ends(&e);
}

/* A peer owns what it has given away: it can make it block, and fill it. */
static void test_a_peer_whose_pipe_blocks_and_is_full_stops_nobody(void) {
    static const char filling[4096];
    ends e;
    struct pollfd fd;
    lc_link_stats stats;
    uint64_t timeout_ns = 1;
    open_ends(&e, 2);
    int theirs = e.descriptors[1][1];
    while (write(theirs, filling, sizeof filling) > 0)
        ;
    CHECK(errno == EAGAIN);
    CHECK(fcntl(theirs, F_SETFL, fcntl(theirs, F_GETFL) & ~O_NONBLOCK) == 0);
    atomic_store(&shm(&e, 1)->header->naps, 1);
    alarm(LONGEST_S); /* who waits in wake() would do so for ever */
    send_one(&e, 0, 1, 0, 32);
    alarm(0);
    lc_link_stats_of(e.link[0], &stats);
    CHECK(stats.send_calls == 1);
    struct pollfd room = {theirs, POLLOUT, 0};
    CHECK(poll(&room, 1, 0) == 0); /* it is full, so that a write that may block would have */
    CHECK(!(fcntl(theirs, F_GETFL) & O_NONBLOCK));
    /* What has filled it is read piece by piece, and doesn't hold up who reads. */
    CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && timeout_ns == 0);
    CHECK(poll(&fd, 1, 0) == 1);
    close_ends(&e);
}

/* The end that a process sleeps on is its own: what peers do to theirs doesn't make it wait. */
static void test_an_empty_pipe_that_blocks_stops_nobody(void) {
    ends e;
    struct pollfd fd;
    open_ends(&e, 2);
    int given = e.descriptors[1][1];
    CHECK(fcntl(given, F_SETFL, fcntl(given, F_GETFL) & ~O_NONBLOCK) == 0);
    alarm(LONGEST_S);
    for (int i = 0; i < 3; i++) {
        uint64_t timeout_ns = 1;
        CHECK(lc_link_descriptors(e.link[1], 0, &fd, &timeout_ns) == 1 && timeout_ns == 1);
    }
    alarm(0);
    send_one(&e, 0, 1, 0, 32);
    CHECK(poll(&fd, 1, 0) == 1);
    close_ends(&e);
}

/* Whose owner is gone, so that nobody reads it: no signal, which would end the process. */
static void test_the_pipe_of_a_peer_that_is_gone(void) {
    ends e;
    lc_link_stats stats;
    open_ends(&e, 2);
    lc_shm_header *there = mmap(NULL, 4096, PROT_READ, MAP_SHARED, e.descriptors[1][0], 0);
    CHECK(there != MAP_FAILED);
    atomic_store(&shm(&e, 1)->header->naps, 1);
    lc_link_close(e.link[1]);
    send_one(&e, 0, 1, 0, 32);
    lc_link_stats_of(e.link[0], &stats);
    CHECK(stats.send_calls == 1 && there->naps == 1);
    munmap(there, 4096);
    lc_link_close(e.link[0]);
}

static int memory_like(const lc_shm *s, size_t bytes, int seals) {
    int fd = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(pwrite(fd, s->header, 64, 0) == 64);
    CHECK(fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void test_what_is_no_peer(void) {
    ends e;
    open_ends(&e, 2);
    size_t bytes = shm(&e, 1)->bytes;
    int wake = e.descriptors[1][1], no_pipe = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int like[] = {memory_like(shm(&e, 1), bytes, F_SEAL_SHRINK),
                  memory_like(shm(&e, 1), bytes, F_SEAL_GROW),
                  memory_like(shm(&e, 1), bytes - 4096, F_SEAL_SHRINK),
                  memory_like(shm(&e, 1), bytes + 4096, F_SEAL_SHRINK)};
    int pair[2] = {like[0], wake};
    CHECK(introduce(e.link[0], PROCESSES[1], pair) == LC_OK);
    for (int i = 1; i < 4; i++) {
        pair[0] = like[i];
        CHECK_AT(introduce(e.link[0], PROCESSES[1], pair) == LC_E_ARGUMENT, "memory %d", i);
    }
    pair[0] = like[0];
    pair[1] = no_pipe;
    CHECK(introduce(e.link[0], PROCESSES[1], pair) == LC_E_ARGUMENT);
    pair[1] = -1;
    CHECK(introduce(e.link[0], PROCESSES[1], pair) == LC_E_ARGUMENT);
    CHECK(introduce(e.link[0], PROCESSES[1], e.descriptors[0]) == LC_E_ARGUMENT); /* its own */
    CHECK(introduce(e.link[0], PROCESSES[2], e.descriptors[1]) == LC_E_ARGUMENT); /* not one */
    CHECK(introduce(e.link[0], PROCESSES[1], e.descriptors[1]) == LC_OK);
    CHECK(lc_link_set_peer(e.link[0], PROCESSES[1], NULL) == LC_OK);
    send_one(&e, 0, 1, 0, 32);
    CHECK(overflow(&e, 0) == 1);
    for (int i = 0; i < 4; i++)
        close(like[i]);
    close(no_pipe);
    close_ends(&e);
}

static void test_what_cannot_be_opened(void) {
    static const uint16_t twice[] = {1, 1}, down[] = {4, 1}, beyond[] = {1, 10}, others[] = {4, 7};
    const uint16_t *lists[] = {twice, down, beyond, others};
    const lc_host_config config = {.process = 1, .processes = 10};
    lc_failure failure;
    int descriptors[2];
    for (int i = 0; i < 4; i++)
        CHECK_AT(!lc_shm_open(&config, lists[i], 2, &lc_system_clock, descriptors, &failure) &&
                     failure.code == LC_E_ARGUMENT,
                 "list %d", i);
    CHECK(!lc_shm_open(&config, PROCESSES, 1, &lc_system_clock, descriptors, &failure));
}

int main(void) {
    test_order();
    test_a_peer_that_takes_nothing();
    test_one_payload_for_two();
    test_buffers_take_turns();
    test_a_late_receiver_gets_the_same_copy();
    test_nobody_sleeps_through_a_packet();
    test_wakes_once();
    test_each_nap_is_ended();
    test_who_sleeps_has_told_what_it_took();
    test_one_call_wakes_all();
    test_nonsense();
    test_what_was_never_sent_is_taken();
    test_half_a_packet();
    test_memory_of_others_is_only_read();
    test_a_peer_whose_pipe_blocks_and_is_full_stops_nobody();
    test_an_empty_pipe_that_blocks_stops_nobody();
    test_the_pipe_of_a_peer_that_is_gone();
    test_what_is_no_peer();
    test_what_cannot_be_opened();
    return check_result("test_link_shm");
}
