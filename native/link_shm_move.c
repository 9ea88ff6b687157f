/* The shared-memory link, moving packets: copied in once by the sender, read where they lie by the
 * receiver. No system call while both ends are awake. */
#include "link_shm.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* ---- sending ---- */

static void place_after(lc_shm *s, uint16_t before, uint16_t buffer) {
    uint16_t after = s->buffer[before].next;
    s->buffer[buffer].prev = before;
    s->buffer[buffer].next = after;
    s->buffer[before].next = s->buffer[after].prev = buffer;
    s->n_idle++;
}

static void leave_buffer(lc_shm *s, uint16_t buffer) {
    lc_shm_buffer *b = &s->buffer[buffer];
    if (--b->users)
        return;
    if (b->to_serve) {
        place_after(s, s->buffer[s->n_buffers].prev, buffer);
    } else {
        place_after(s, s->last_unneeded, buffer);
        s->last_unneeded = buffer;
    }
}

/* One more entry names it. */
static void use_buffer(lc_shm *s, uint16_t buffer) {
    lc_shm_buffer *b = &s->buffer[buffer];
    b->to_serve -= b->to_serve > 0;
    if (b->users++)
        return;
    if (s->last_unneeded == buffer)
        s->last_unneeded = b->prev;
    s->buffer[b->prev].next = b->next;
    s->buffer[b->next].prev = b->prev;
    s->n_idle--;
}

/* Whether packets can go to a peer, and come from it. */
static int is_there(const lc_shm_peer *p) {
    return p && p->memory && !p->broken;
}

static void break_with(lc_shm *s, lc_shm_peer *p) {
    p->broken = 1;
    if (!s->event.kind)
        s->event = (lc_event){.kind = LC_EVENT_LOST, .sys_errno = EPROTO, .peer = p->process};
}

/* Takes back what the peer has taken. It can't have taken more than was sent. */
static void take_back(lc_shm *s, lc_shm_peer *p) {
    uint32_t taken = atomic_load_explicit(&p->in->taken, memory_order_acquire);
    if (taken - p->freed > p->sent - p->freed) {
        break_with(s, p);
        return;
    }
    for (; p->freed != taken; p->freed++) {
        uint16_t buffer = p->buffer_of[p->freed % s->entries];
        if (buffer >= LC_SHM_INSIDE)
            continue;
        p->holds--;
        leave_buffer(s, buffer);
    }
}

/* The buffer with a payload, which is copied in unless one has it for another receiver. */
static uint16_t fill_buffer(lc_shm *s, const lc_run *run, uint32_t k) {
    const struct iovec *payload = &run->iov[2 * k + 1];
    uint64_t content = run->receivers > 1 ? run->contents[k] : 0;
    uint16_t *holder = &s->holder[content & s->holder_mask];
    uint16_t buffer = content ? *holder : (uint16_t)LC_SHM_NONE;
    if (!content || s->buffer[buffer].content != content) {
        if (!s->n_idle)
            return LC_SHM_NONE;
        buffer = s->buffer[s->n_buffers].next;
        memcpy(s->buffers + (size_t)buffer * LC_SHARED_PAYLOAD, payload->iov_base,
               payload->iov_len);
        s->buffer[buffer].content = content;
        s->buffer[buffer].to_serve = run->receivers;
        s->copied++;
        if (content)
            *holder = buffer;
    }
    use_buffer(s, buffer);
    return buffer;
}

/* Returns 0 if there is no room: the peer takes nothing, and what is meant for it is lost. */
static int put(lc_shm *s, lc_shm_peer *p, const lc_run *run, uint32_t k) {
    const struct iovec *iov = &run->iov[2 * k];
    size_t bytes = iov[0].iov_len, rest = iov[1].iov_len;
    lc_shm_entry *entry = &p->out->entries[p->sent % s->entries];
    uint16_t buffer = LC_SHM_NONE;
    if (p->sent - p->freed >= s->entries)
        return 0;
    if (bytes + rest <= LC_SHM_HEAD_MAX) {
        memcpy(entry->head + bytes, iov[1].iov_base, rest);
        entry->rest_bytes = (uint32_t)rest;
        if (rest < LC_SHM_INSIDE_MIN)
            bytes += rest;
        else
            buffer = LC_SHM_INSIDE;
    } else {
        if (bytes > LC_SHM_HEAD_MAX || rest > LC_SHARED_PAYLOAD || p->holds >= s->share)
            return 0;
        buffer = fill_buffer(s, run, k);
        if (buffer == LC_SHM_NONE)
            return 0;
        p->holds++;
        entry->rest_bytes = (uint32_t)rest;
    }
    memcpy(entry->head, iov[0].iov_base, iov[0].iov_len);
    p->buffer_of[p->sent % s->entries] = buffer;
    p->sent++;
    uint64_t word = (uint64_t)buffer << 48 | (uint64_t)bytes << 32 | p->sent;
    atomic_store(&entry->word, word);
    return 1;
}

/* It looks after the packets were written, as a sleeper looks for packets after it has said that it
 * naps. All four are sequentially consistent, so one of both sees what the other did. A nap is
 * ended once. */
static void wake(lc_shm *s, lc_shm_peer *p) {
    const lc_shm_header *there = (const lc_shm_header *)(const void *)p->memory;
    uint32_t naps = atomic_load(&there->naps);
    if (!(naps & 1) || naps == p->woken)
        return;
    s->stats.send_calls++;
    if (write(p->wake_fd, "", 1) > 0 || errno == EAGAIN) /* a full pipe wakes as well */
        p->woken = naps;
}

/* Only when all is there: who is woken may get this core at once, and would find little to take. */
static void wake_all(lc_shm *s, const lc_run *runs, int n_runs) {
    for (int i = 0; i < n_runs; i++) {
        lc_shm_peer *p = lc_shm_peer_of(s, runs[i].peer);
        if (is_there(p))
            wake(s, p);
    }
}

/* It never takes less than all: what finds no room is dropped, so that a peer which takes nothing
 * is in nobody's way. The engine's window keeps data from it. */
int lc_shm_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno) {
    lc_shm *s = lc_shm_of(link);
    int packets = 0;
    (void)sys_errno;
    for (int i = 0; i < n_runs; i++) {
        const lc_run *run = &runs[i];
        lc_shm_peer *p = lc_shm_peer_of(s, run->peer);
        if (is_there(p))
            take_back(s, p);
        for (uint32_t k = 0; k < run->n_packets; k++)
            s->stats.overflow += !is_there(p) || !put(s, p, run, k);
        packets += (int)run->n_packets;
    }
    wake_all(s, runs, n_runs);
    return packets;
}

/* ---- receiving ---- */

static const lc_shm_entry *next_entry(const lc_shm *s, const lc_shm_peer *p, uint64_t *word) {
    if (!is_there(p))
        return NULL;
    const lc_shm_entry *entry = &p->in->entries[p->taken % s->entries];
    *word = atomic_load(&entry->word);
    return (uint32_t)*word == p->taken + 1 ? entry : NULL;
}

/* Heads have room for whole steps, at both ends. */
static void copy_head(uint8_t *to, const uint8_t *from, uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += LC_SHM_COPY)
        memcpy(to + at, from + at, LC_SHM_COPY);
}

/* Where the second piece of so many bytes lies; NULL: there can't be one. */
static const uint8_t *rest_of(const lc_shm *s, const lc_shm_peer *p, const lc_shm_entry *entry,
                              uint32_t head_bytes, uint32_t rest_bytes, uint32_t buffer) {
    if (buffer == LC_SHM_INSIDE)
        return rest_bytes <= LC_SHM_HEAD_MAX - head_bytes ? entry->head + head_bytes : NULL;
    if (buffer >= s->n_buffers || rest_bytes > LC_SHARED_PAYLOAD)
        return NULL;
    return p->memory + (s->buffers - s->memory) + (size_t)buffer * LC_SHARED_PAYLOAD;
}

/* What is read here is read once: the peer can write it meanwhile. An arrival of no bytes says that
 * it made no sense, and the loop counts it. */
static int take(lc_shm *s, lc_shm_peer *p, uint8_t *head, lc_arrival *arrival) {
    uint64_t word;
    const lc_shm_entry *entry = next_entry(s, p, &word);
    if (!entry)
        return 0;
    uint32_t bytes = word >> 32 & 0xFFFF, buffer = (uint32_t)(word >> 48);
    uint32_t rest = *(const volatile uint32_t *)&entry->rest_bytes;
    int good = bytes && bytes <= LC_SHM_HEAD_MAX;
    *arrival = (lc_arrival){.data = head, .from = p};
    if (good && buffer != LC_SHM_NONE && rest) {
        arrival->rest = rest_of(s, p, entry, bytes, rest, buffer);
        arrival->rest_bytes = rest;
        good = arrival->rest != NULL;
    }
    if (!good) {
        break_with(s, p);
        return 1;
    }
    copy_head(head, entry->head, bytes);
    arrival->length = arrival->stride = bytes;
    p->taken++;
    return 1;
}

static void tell_taken(lc_shm *s) {
    for (uint16_t i = 0; i < s->n_peers; i++) {
        lc_shm_peer *p = &s->peers[i];
        if (p->told != p->taken)
            atomic_store_explicit(&p->out->taken, p->taken, memory_order_release);
        p->told = p->taken;
    }
}

static void end_nap(lc_shm *s) {
    if (s->naps & 1)
        atomic_store_explicit(&s->header->naps, ++s->naps, memory_order_relaxed);
}

int lc_shm_receive(lc_link *link, lc_arrival *arrivals, int max) {
    lc_shm *s = lc_shm_of(link);
    int n = 0;
    if (max > LC_RECEIVE_BUFFERS)
        max = LC_RECEIVE_BUFFERS;
    end_nap(s);
    tell_taken(s);
    for (uint16_t i = 0; i < s->n_peers; i++) {
        lc_shm_peer *p = &s->peers[(s->turn + i) % s->n_peers];
        while (n < max && take(s, p, s->heads[n], &arrivals[n]))
            n++;
    }
    s->turn = (uint16_t)((s->turn + 1) % s->n_peers);
    return n;
}

int lc_shm_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer) {
    (void)link;
    return ((const lc_shm_peer *)arrival->from)->process == peer;
}

/* ---- sleeping ---- */

static void drain(lc_shm *s) {
    char drained[2 * LC_SHM_PROCESSES]; /* each peer writes one byte for a nap */
    if (!s->drains)
        return;
    s->stats.receive_calls++;
    (void)!read(s->wake_fds[0], drained, sizeof drained);
}

static int has_come(const lc_shm *s) {
    uint64_t word;
    for (uint16_t i = 0; i < s->n_peers; i++)
        if (next_entry(s, &s->peers[i], &word))
            return 1;
    return 0;
}

/* Every nap has a number of its own, or who has ended one would not end the next. */
int lc_shm_watch(lc_link *link) {
    lc_shm *s = lc_shm_of(link);
    tell_taken(s);
    s->naps += s->naps & 1 ? 2 : 1;
    atomic_store(&s->header->naps, s->naps);
    return has_come(s);
}

int lc_shm_descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns) {
    lc_shm *s = lc_shm_of(link);
    (void)blocked;
    drain(s);
    s->drains = 1;
    if (lc_shm_watch(link))
        *timeout_ns = 0;
    fds[0] = (struct pollfd){s->wake_fds[0], POLLIN, 0};
    return 1;
}
