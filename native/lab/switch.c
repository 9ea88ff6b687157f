#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "hosts.h"
#include "lab.h"
#include "paths.h"

enum { READS = 32 };                         /* from one device, before the others' turn */
static const int64_t LONGEST_NS = 500000000; /* between looks at whether the parent lives */

static volatile sig_atomic_t told_to_stop;

static void stop(int signal_) {
    (void)signal_;
    told_to_stop = 1;
}

typedef struct {
    lab_paths paths;
    int device[LAB_HOSTS];
    lab_run run[LAB_HOSTS]; /* what is about to be written, per host */
    lab_frame *spare;       /* the next frame is read into this */
    int64_t start;
} lab_switch_state;

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The host that a frame is for; -1 for everybody, or nobody. */
static int destination(const lab_shared *shared, const lab_frame *frame) {
    static const uint8_t ours[5] = {0x02, 'l', 'a', 'b', 0};
    const uint8_t *mac = frame->data + FRAME_VNET;
    if (memcmp(mac, ours, sizeof ours) || mac[5] < 1 || mac[5] > shared->hosts)
        return -1;
    return mac[5] - 1;
}

/* Reads what a host has sent; returns how many frames that were. */
static int take_in(lab_switch_state *self, uint32_t host) {
    lab_paths *paths = &self->paths;
    lab_host_counts *counts = paths->shared->host_counts + host;
    int count = 0;
    for (; count < READS; count++) {
        if (!self->spare && !(self->spare = lab_frame_new(&paths->store, FRAME_MAX)))
            break;
        lab_frame *frame = self->spare;
        ssize_t length = read(self->device[host], frame->data, FRAME_MAX);
        if (length < 0)
            break;
        frame->length = (uint32_t)length;
        counts->packets++;
        int to = lab_frame_read(frame) ? -1 : destination(paths->shared, frame);
        if (to < 0 || to == (int)host) {
            counts->ignored++;
            continue;
        }
        lab_frame *kept = lab_frame_fit(&paths->store, frame);
        self->spare = NULL;
        if (kept != frame && lab_frame_read(kept))
            abort(); /* it was good a moment ago */
        lab_paths_enter(paths, kept, host, (uint32_t)to, clock_ns() - self->start);
    }
    return count;
}

static void flush(lab_switch_state *self, uint32_t host) {
    lab_run *run = self->run + host;
    lab_shared *shared = self->paths.shared;
    if (!run->count)
        return;
    if (lab_run_write(self->device[host], run))
        shared->host_counts[host].refused += run->packets;
    else
        shared->host_counts[host].written++;
    for (uint32_t i = 0; i < run->count; i++)
        lab_frame_drop(&self->paths.store, run->train[i].frame);
    run->count = run->packets = run->bytes = 0;
}

/* Writes what is due, and returns when the next is, or -1. */
static int64_t give_out(lab_switch_state *self) {
    lab_shared *shared = self->paths.shared;
    int64_t now = clock_ns() - self->start, next = -1;
    lab_train train;
    while (lab_paths_due(&self->paths, now, &train, &next)) {
        lab_link_counts *counts = shared->link_counts + train.from * LAB_HOSTS + train.to;
        counts->delivered += train.packets;
        counts->delivered_bytes += lab_wire(train.frame, train.first, train.packets);
        uint64_t late = (uint64_t)(now - train.at);
        if (late > shared->host_counts[train.to].late_max_ns)
            shared->host_counts[train.to].late_max_ns = late;
        if (!lab_run_add(self->run + train.to, &train)) {
            flush(self, train.to);
            lab_run_add(self->run + train.to, &train);
        }
    }
    for (uint32_t host = 0; host < shared->hosts; host++)
        flush(self, host);
    return next;
}

/* Does what was asked for through the lifeline; returns 0 when that is cut. */
static int listen_to(lab_switch_state *self, int lifeline) {
    lab_shared *shared = self->paths.shared;
    char bytes[64];
    if (read(lifeline, bytes, sizeof bytes) <= 0)
        return 0;
    uint64_t wanted = __atomic_load_n(&shared->wanted, __ATOMIC_ACQUIRE);
    lab_paths_change(&self->paths);
    if (shared->devices)
        lab_hosts_overrun(shared);
    __atomic_store_n(&shared->applied, wanted, __ATOMIC_RELEASE);
    return 1;
}

static void serve(lab_switch_state *self, int lifeline) {
    lab_shared *shared = self->paths.shared;
    uint32_t hosts = shared->devices ? shared->hosts : 0;
    struct pollfd on[LAB_HOSTS + 1];
    pid_t parent = getppid();
    for (uint32_t host = 0; host < hosts; host++)
        on[host] = (struct pollfd){.fd = self->device[host], .events = POLLIN};
    on[hosts] = (struct pollfd){.fd = lifeline, .events = POLLIN};
    while (!told_to_stop && getppid() == parent) {
        int64_t next = give_out(self);
        int64_t wait = next < 0 ? LONGEST_NS : next - (clock_ns() - self->start);
        if (wait > LONGEST_NS)
            wait = LONGEST_NS;
        struct timespec timeout = {.tv_nsec = wait > 0 ? wait : 0};
        if (ppoll(on, hosts + 1, &timeout, NULL) <= 0)
            continue;
        for (uint32_t host = 0; host < hosts; host++)
            if (on[host].revents)
                take_in(self, host);
        if (on[hosts].revents && !listen_to(self, lifeline))
            return;
    }
}

/* Packets are to be on time however busy the machine is; without the right to it, less so. */
static void hurry(void) {
    struct sched_param urgent = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &urgent))
        errno = 0;
    prctl(PR_SET_TIMERSLACK, 1);
}

static void close_devices(lab_switch_state *self) {
    for (uint32_t host = 0; host < LAB_HOSTS; host++)
        if (self->device[host] >= 0)
            close(self->device[host]);
}

int lab_switch(int memory, int lifeline) {
    lab_shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    lab_switch_state *self = calloc(1, sizeof *self);
    if (shared == MAP_FAILED || !self || shared->hosts > LAB_HOSTS) {
        free(self);
        return -1;
    }
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    hurry();
    for (uint32_t host = 0; host < LAB_HOSTS; host++)
        self->device[host] = -1;
    int status = lab_hosts_make(shared, self->device);
    shared->error = status ? errno : 0;
    if (!status) {
        lab_paths_init(&self->paths, shared);
        self->start = clock_ns();
    }
    __atomic_store_n(&shared->state, status ? LAB_FAILED : LAB_READY, __ATOMIC_RELEASE);
    if (!status) {
        serve(self, lifeline);
        lab_hosts_reap(shared);
        if (self->spare)
            lab_frame_drop(&self->paths.store, self->spare);
        lab_paths_free(&self->paths);
        __atomic_store_n(&shared->state, LAB_ENDED, __ATOMIC_RELEASE);
    }
    close_devices(self);
    free(self);
    munmap(shared, sizeof *shared);
    return status;
}
