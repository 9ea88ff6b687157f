/* The laboratory's probe (native/lab/probe.c) between two named network namespaces, as one program:
 * a guest starts no Python for it.
 *
 *     netem_probe flow FROM TO ADDRESS COUNT BYTES SEGMENTS BYTES_PER_S IDLE_MS
 *     netem_probe ping FROM TO ADDRESS COUNT
 *
 * "-" is the namespace that it is started in. Writes one line of JSON. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../native/lab/lab.h"

enum { PORT = 29399, PING_SECONDS = 2 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void enter(const char *name) {
    if (!strcmp(name, "-"))
        return;
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int handle = open(path, O_RDONLY | O_CLOEXEC);
    if (handle < 0 || setns(handle, CLONE_NEWNET))
        fail(path);
    close(handle);
}

static void await(int ready) {
    char byte;
    if (read(ready, &byte, 1) != 1)
        fail("the receiver ended early");
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

/* The other end: a child that ends with its parent, however that ends. */
static pid_t other_end(void) {
    pid_t child = fork();
    if (child < 0 || (!child && prctl(PR_SET_PDEATHSIG, SIGKILL)))
        fail("fork");
    return child;
}

static void receive(uint64_t count, int idle_ms, int ready, int done) {
    lab_probe_counts got;
    if (lab_probe_receive(PORT, count, idle_ms, ready, done, &got))
        fail("receive");
    printf("{\"sent\": %llu, \"received\": %llu, \"lost\": %llu, \"bursts\": %llu, "
           "\"doubled\": %llu, \"late\": %llu, \"overflowed\": %llu, \"seconds\": %.6f, "
           "\"bytes\": %llu}\n",
           (unsigned long long)count, (unsigned long long)got.received,
           (unsigned long long)got.lost, (unsigned long long)got.bursts,
           (unsigned long long)got.doubled, (unsigned long long)got.late,
           (unsigned long long)got.overflowed, got.seconds, (unsigned long long)got.bytes);
}

static void flow(char **word) {
    int ready[2], done[2], status = 0;
    uint64_t count = strtoull(word[3], NULL, 10);
    if (pipe(ready) || pipe(done))
        fail("pipe");
    pid_t child = other_end();
    if (!child) {
        close(done[1]);
        close(ready[0]);
        enter(word[1]);
        receive(count, atoi(word[7]), ready[1], done[0]);
        exit(0);
    }
    close(ready[1]);
    await(ready[0]);
    enter(word[0]);
    if (lab_probe_send(word[2], PORT, count, (uint32_t)atoi(word[4]), (uint32_t)atoi(word[5]),
                       atof(word[6])))
        fail("send");
    close(done[1]);
    if (waitpid(child, &status, 0) != child || status)
        exit(1);
}

static void echo(int ready) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    int handle = socket(AF_INET, SOCK_DGRAM, 0);
    if (handle < 0 || bind(handle, (struct sockaddr *)&here, sizeof here))
        fail("echo");
    dprintf(ready, "ready\n");
    for (;;) {
        char data[64];
        socklen_t size = sizeof here;
        ssize_t length = recvfrom(handle, data, sizeof data, 0, (struct sockaddr *)&here, &size);
        if (length > 0)
            sendto(handle, data, (size_t)length, 0, (struct sockaddr *)&here, size);
    }
}

static void ping(char **word) {
    int ready[2], count = atoi(word[3]);
    if (pipe(ready))
        fail("pipe");
    pid_t child = other_end();
    if (!child) {
        enter(word[1]);
        echo(ready[1]);
    }
    close(ready[1]);
    await(ready[0]);
    enter(word[0]);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    struct timeval patience = {.tv_sec = PING_SECONDS};
    int handle = socket(AF_INET, SOCK_DGRAM, 0);
    if (handle < 0 || inet_pton(AF_INET, word[2], &to.sin_addr) != 1 ||
        connect(handle, (struct sockaddr *)&to, sizeof to) ||
        setsockopt(handle, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience))
        fail("ping");
    const char *between = "";
    printf("{\"ms\": [");
    for (int number = 0; number < count; number++) {
        int answer = -1;
        double begin = now_ms();
        if (send(handle, &number, sizeof number, 0) < 0)
            continue;
        /* An answer to an earlier question that was given up is no answer. */
        while (answer != number && recv(handle, &answer, sizeof answer, 0) > 0)
            ;
        if (answer != number)
            continue;
        printf("%s%.3f", between, now_ms() - begin);
        between = ", ";
    }
    printf("]}\n");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

int main(int words, char **word) {
    if (words == 10 && !strcmp(word[1], "flow"))
        flow(word + 2);
    else if (words == 6 && !strcmp(word[1], "ping"))
        ping(word + 2);
    else {
        fprintf(stderr, "netem_probe: flow takes eight words, ping four; see the source\n");
        return 2;
    }
    return 0;
}
