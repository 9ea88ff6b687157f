/* Sending and receiving by io_uring: all receives stay posted, sends go in batches, and one system
 * call per turn hands both over. */
#define _GNU_SOURCE
#include "raw_ring.h"

#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ENTRIES = 32, SENDS = BATCH /* user_data of a send; below it, of a receive */ };

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    unsigned unsubmitted, sends_open;
} ring;

static void *map(size_t bytes, uint64_t offset) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd,
                    (off_t)offset);
    if (at == MAP_FAILED)
        fail("io_uring memory");
    return at;
}

static void push(uint8_t opcode, int fd, struct msghdr *message, uint64_t user_data) {
    unsigned tail = *ring.sq_tail;
    unsigned at = tail & *ring.sq_mask;
    ring.sqes[at] = (struct io_uring_sqe){.opcode = opcode,
                                          .fd = fd,
                                          .addr = (uint64_t)(uintptr_t)message,
                                          .len = 1,
                                          .user_data = user_data};
    ring.sq_array[at] = at;
    __atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
    ring.unsubmitted++;
}

static void post(struct end *end, unsigned i) {
    arm(end, i);
    push(IORING_OP_RECVMSG, end->fd, &end->in_message[i].msg_hdr, i);
}

void ring_open(struct end *end) {
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    ring.fd = (int)syscall(SYS_io_uring_setup, ENTRIES, &p);
    if (ring.fd < 0)
        fail("io_uring_setup");
    char *sq = map(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char *cq = map(p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.sqes = map(p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring.sq_tail = (unsigned *)(void *)(sq + p.sq_off.tail);
    ring.sq_mask = (unsigned *)(void *)(sq + p.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(void *)(sq + p.sq_off.array);
    ring.cq_head = (unsigned *)(void *)(cq + p.cq_off.head);
    ring.cq_tail = (unsigned *)(void *)(cq + p.cq_off.tail);
    ring.cq_mask = (unsigned *)(void *)(cq + p.cq_off.ring_mask);
    ring.cqes = (struct io_uring_cqe *)(void *)(cq + p.cq_off.cqes);
    for (unsigned i = 0; i < BATCH; i++)
        post(end, i);
}

static void completed(struct end *end, const struct io_uring_cqe *cqe) {
    if (cqe->user_data >= SENDS) {
        ring.sends_open--;
        errno = -cqe->res;
        if (cqe->res < 0)
            fail("send by io_uring");
        return;
    }
    unsigned i = (unsigned)cqe->user_data;
    errno = -cqe->res;
    if (cqe->res >= 0)
        take_message(end, i, (size_t)cqe->res);
    else if (errno != EAGAIN && errno != EINTR && errno != ECONNREFUSED)
        fail("receive by io_uring");
    post(end, i);
}

int ring_turn(struct end *end) {
    unsigned n = 0;
    if (!ring.sends_open) {
        unsigned messages = room_for(end, BATCH);
        for (; n < messages && fill(end, n, end->segments); n++)
            push(IORING_OP_SENDMSG, end->fd, &end->out_message[n].msg_hdr, SENDS + n);
        ring.sends_open = n;
    }
    int submitted = (int)syscall(SYS_io_uring_enter, ring.fd, ring.unsubmitted, 0,
                                 IORING_ENTER_GETEVENTS, NULL, 0);
    if (submitted < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY)
        fail("io_uring_enter");
    if (submitted > 0)
        ring.unsubmitted -= (unsigned)submitted;
    end->send_calls++;
    unsigned head = *ring.cq_head, tail = __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE);
    for (unsigned at = head; at != tail; at++) {
        struct io_uring_cqe cqe = ring.cqes[at & *ring.cq_mask];
        __atomic_store_n(ring.cq_head, at + 1, __ATOMIC_RELEASE);
        completed(end, &cqe);
    }
    return n > 0 || head != tail;
}
