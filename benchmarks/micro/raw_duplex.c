/* What two processes that both send and receive get out of bare UDP sockets on a wire.
 *
 * Each is one thread, as the engine is: it sends a tensor to the other, and adds what comes from
 * there to a tensor of its own. No packets, no plans, no repair: this is the bound that an
 * all-reduce of two ranks is measured against. The same command is run at both ends, with the two
 * addresses the other way around; each prints one line of JSON. Rates are of floats received,
 * without headers.
 *
 *   raw_duplex --bind ADDRESS:PORT --peer ADDRESS:PORT [--datagram BYTES] [--megabytes N]
 *              [--window BYTES] [--no-gso] [--no-gro] [--no-mmsg] [--no-gather] [--no-simd]
 *              [--wait yield|spin|sleep] [--busy-poll US] [--in-place] [--zerocopy] [--io-uring]
 *              [--pings N]
 */
#define _GNU_SOURCE
#include "raw_ring.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#include <linux/errqueue.h>

enum {
    SOCKET_BUFFER = 32 << 20,
    STALL_MS = 2000,
    HELLO_MS = 1,
    PEER_MS = 20000 /* how long the other end is waited for */
};

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory)
        fail("memory");
    memset(memory, 0, bytes);
    return memory;
}

/* ---- what comes ---- */

/* Returns whether anything was there. */
static int receive(struct end *end) {
    unsigned batch = end->use.mmsg ? BATCH : 1;
    for (unsigned i = 0; i < batch; i++)
        arm(end, i);
    int count;
    if (end->use.mmsg) {
        count = recvmmsg(end->fd, end->in_message, batch, MSG_DONTWAIT, NULL);
    } else {
        ssize_t length = recvmsg(end->fd, &end->in_message[0].msg_hdr, MSG_DONTWAIT);
        end->in_message[0].msg_len = (unsigned)length;
        count = length < 0 ? -1 : 1;
    }
    if (count < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNREFUSED)
        fail("receive");
    end->receive_calls++;
    for (int i = 0; i < count; i++)
        take_message(end, (unsigned)i, end->in_message[i].msg_len);
    return count > 0;
}

/* ---- what goes ---- */

static void send_credit(struct end *end, uint32_t kind) {
    struct header h = {.taken = end->received, .kind = kind};
    if (send(end->fd, &h, sizeof h, 0) < 0 && errno != ECONNREFUSED && errno != EAGAIN)
        fail("credit");
    end->credited = end->received;
}

/* The kernel says which zero-copy sends it is through with, and whether it copied after all. */
static void reap(struct end *end) {
    for (;;) {
        char control[128];
        struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
        if (recvmsg(end->fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
            return;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        struct sock_extended_err e;
        if (!c)
            continue;
        memcpy(&e, CMSG_DATA(c), sizeof e);
        if (e.ee_origin != SO_EE_ORIGIN_ZEROCOPY)
            continue;
        end->zero_copies += e.ee_data - e.ee_info + 1;
        if (e.ee_code & SO_EE_CODE_ZEROCOPY_COPIED)
            end->copied += e.ee_data - e.ee_info + 1;
    }
}

/* Returns whether anything went. */
static int send_some(struct end *end) {
    int flags = end->use.zerocopy ? MSG_ZEROCOPY : 0;
    if (end->use.zerocopy)
        reap(end);
    unsigned n = 0, messages = room_for(end, BATCH);
    while (n < messages && fill(end, n, end->segments))
        n++;
    for (unsigned done = 0; done < n;) {
        int count;
        if (end->use.mmsg)
            count = sendmmsg(end->fd, end->out_message + done, n - done, flags);
        else
            count = sendmsg(end->fd, &end->out_message[done].msg_hdr, flags) < 0 ? -1 : 1;
        if (count < 0 && errno == ENOBUFS && end->use.zerocopy) {
            reap(end);
            continue;
        }
        if (count < 0)
            fail("send");
        done += (unsigned)count;
        end->send_calls++;
    }
    return n > 0;
}

/* ---- the run ---- */

static void wait_more(const struct end *end) {
    struct pollfd fd = {end->fd, POLLIN, 0};
    if (end->wait == SLEEP)
        poll(&fd, 1, STALL_MS);
    else if (end->wait == YIELD)
        sched_yield();
}

static void meet(struct end *end) {
    for (uint64_t begin = now_ns(), greeted = 0; !end->heard;) {
        struct pollfd fd = {end->fd, POLLIN, 0};
        if (now_ns() - greeted > HELLO_MS * 1000000u) {
            send_credit(end, HELLO);
            greeted = now_ns();
        }
        if (now_ns() - begin > PEER_MS * 1000000ull) {
            errno = ETIMEDOUT;
            fail("the other end never came");
        }
        poll(&fd, 1, HELLO_MS);
        receive(end);
    }
    send_credit(end, HELLO); /* it may have opened its socket after the last one */
}

static int is_over(const struct end *end) {
    return end->sent == end->total && end->received >= end->total;
}

/* Returns the seconds until everything was there, or gives up when nothing comes any more. */
static double stream(struct end *end) {
    uint64_t begin = now_ns(), since = begin;
    while (!is_over(end)) {
        int busy = end->use.io_uring ? ring_turn(end) : receive(end);
        if (!end->use.io_uring)
            busy |= send_some(end);
        if (end->received - end->credited >= end->window / 4) {
            send_credit(end, CREDIT);
            busy = 1;
        }
        uint64_t now = now_ns();
        if (busy)
            since = now;
        else if (now - since > STALL_MS * 1000000ull)
            break; /* what is missing was lost */
        else
            wait_more(end);
    }
    return 1e-9 * (double)(now_ns() - begin);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Round trips of one small datagram. The end with the smaller port asks. */
static void ping(struct end *end, unsigned n, int asks) {
    double *us = allocate(n * sizeof *us);
    for (unsigned i = 0; i < n; i++) {
        uint64_t begin = now_ns();
        if (asks)
            send_credit(end, PING);
        while (end->pings <= i) {
            if (!receive(end))
                wait_more(end);
            if (now_ns() - begin > PEER_MS * 1000000ull) {
                errno = ETIMEDOUT;
                fail("ping");
            }
        }
        if (!asks)
            send_credit(end, PING);
        us[i] = 1e-3 * (double)(now_ns() - begin);
    }
    qsort(us, n, sizeof *us, compare);
    printf("{\"p50_us\": %.2f, \"p99_us\": %.2f, \"asks\": %d}\n", us[n / 2], us[n * 99 / 100],
           asks);
}

static void parse_address(const char *text, struct sockaddr_in *out) {
    char host[64] = "";
    const char *colon = strrchr(text, ':');
    *out = (struct sockaddr_in){.sin_family = AF_INET};
    if (colon && (size_t)(colon - text) < sizeof host)
        memcpy(host, text, (size_t)(colon - text));
    if (!colon || inet_pton(AF_INET, host, &out->sin_addr) != 1 || atoi(colon + 1) <= 0) {
        fprintf(stderr, "raw_duplex: %s is not ADDRESS:PORT\n", text);
        exit(2);
    }
    out->sin_port = htons((uint16_t)atoi(colon + 1));
}

static void set(int fd, int level, int option, int value, const char *what) {
    if (setsockopt(fd, level, option, &value, sizeof value) && what)
        fail(what);
}

static void open_end(struct end *end, const char *bind_to, const char *peer, int busy_poll_us) {
    struct sockaddr_in here, there;
    parse_address(bind_to, &here);
    parse_address(peer, &there);
    end->fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (end->fd < 0)
        fail("socket");
    set(end->fd, SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BUFFER, NULL);
    set(end->fd, SOL_SOCKET, SO_SNDBUFFORCE, SOCKET_BUFFER, NULL);
    if (end->use.gro)
        set(end->fd, IPPROTO_UDP, UDP_GRO, 1, "UDP_GRO");
    if (end->use.gso)
        set(end->fd, IPPROTO_UDP, UDP_SEGMENT, (int)end->datagram, "UDP_SEGMENT");
    if (end->use.zerocopy)
        set(end->fd, SOL_SOCKET, SO_ZEROCOPY, 1, "SO_ZEROCOPY");
    if (busy_poll_us)
        set(end->fd, SOL_SOCKET, SO_BUSY_POLL, busy_poll_us, "SO_BUSY_POLL");
    if (bind(end->fd, (struct sockaddr *)&here, sizeof here) ||
        connect(end->fd, (struct sockaddr *)&there, sizeof there))
        fail("bind");
    end->asks = ntohs(here.sin_port) < ntohs(there.sin_port);
}

static void allocate_all(struct end *end) {
    end->in = allocate((size_t)BATCH * AGGREGATE);
    end->packed = allocate((size_t)BATCH * AGGREGATE);
    end->out_vector = allocate(sizeof *end->out_vector * BATCH * 2 * MAX_SEGMENTS);
    end->out_header = allocate(sizeof *end->out_header * BATCH * MAX_SEGMENTS);
    end->source = allocate(TENSOR_BYTES);
    end->sum = allocate(TENSOR_BYTES);
    float *floats = (float *)(void *)end->source;
    for (size_t i = 0; i < TENSOR_BYTES / sizeof(float); i++)
        floats[i] = 1;
}

/* Returns whether the name is a switch. */
static int switched(struct switches *use, const char *name) {
    const struct {
        const char *name;
        bool *field, value;
    } all[] = {
        {"--no-gso", &use->gso, false},       {"--no-gro", &use->gro, false},
        {"--no-mmsg", &use->mmsg, false},     {"--no-gather", &use->gather, false},
        {"--no-simd", &use->simd, false},     {"--in-place", &use->in_place, true},
        {"--zerocopy", &use->zerocopy, true}, {"--io-uring", &use->io_uring, true},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!strcmp(name, all[i].name)) {
            *all[i].field = all[i].value;
            return 1;
        }
    }
    return 0;
}

int main(int count, char **arguments) {
    struct end *end = allocate(sizeof *end);
    end->use =
        (struct switches){.gso = true, .gro = true, .mmsg = true, .gather = true, .simd = true};
    end->datagram = 8948;
    const char *bind_to = NULL, *peer = NULL;
    uint64_t megabytes = 512, window = 2 << 20;
    int busy_poll_us = 0;
    unsigned pings = 0;
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i];
        if (switched(&end->use, name))
            continue;
        const char *value = i + 1 < count ? arguments[++i] : "";
        if (!strcmp(name, "--bind"))
            bind_to = value;
        else if (!strcmp(name, "--peer"))
            peer = value;
        else if (!strcmp(name, "--datagram"))
            end->datagram = strtoul(value, NULL, 10) / 4 * 4;
        else if (!strcmp(name, "--megabytes"))
            megabytes = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--window"))
            window = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--busy-poll"))
            busy_poll_us = atoi(value);
        else if (!strcmp(name, "--pings"))
            pings = (unsigned)atoi(value);
        else if (!strcmp(name, "--wait") && (!strcmp(value, "spin") || !strcmp(value, "sleep")))
            end->wait = value[1] == 'p' ? SPIN : SLEEP;
        else if (strcmp(name, "--wait") || strcmp(value, "yield")) {
            fprintf(stderr, "raw_duplex: %s %s is not known\n", name, value);
            return 2;
        }
    }
    end->use.in_place |= end->use.zerocopy;
    if (!bind_to || !peer || end->datagram < 64 || end->datagram > MAX_SEND || !megabytes) {
        fprintf(stderr,
                "raw_duplex: needs --bind and --peer; --datagram is 64 to %d, --megabytes at "
                "least 1\n",
                MAX_SEND);
        return 2;
    }
    size_t payload = end->datagram - sizeof(struct header);
    end->segments = end->use.gso ? (unsigned)(MAX_SEND / end->datagram) : 1;
    if (end->segments > MAX_SEGMENTS)
        end->segments = MAX_SEGMENTS;
    end->total = (megabytes * 1000000 + payload - 1) / payload;
    end->window = window / end->datagram;
    if (end->window < end->segments)
        end->window = end->segments;
    allocate_all(end);
    open_end(end, bind_to, peer, busy_poll_us);
    meet(end);
    if (pings) {
        ping(end, pings, end->asks);
        return 0;
    }
    if (end->use.io_uring)
        ring_open(end);
    double cpu = cpu_seconds();
    double seconds = stream(end);
    cpu = cpu_seconds() - cpu;
    printf("{\"gb_per_s\": %.4f, \"cpu_s_per_gb\": %.4f, \"seconds\": %.4f, \"sent\": %llu, "
           "\"received\": %llu, \"lost\": %lld, \"sum\": %.0f, \"send_calls\": %llu, "
           "\"receive_calls\": %llu, \"zero_copies\": %llu, \"copied\": %llu}\n",
           1e-9 * (double)end->received_bytes / seconds, cpu / (1e-9 * (double)end->received_bytes),
           seconds, (unsigned long long)end->sent, (unsigned long long)end->received,
           (long long)(end->total - end->received), end->first_sum,
           (unsigned long long)end->send_calls, (unsigned long long)end->receive_calls,
           (unsigned long long)end->zero_copies, (unsigned long long)end->copied);
    return end->received < end->total;
}
