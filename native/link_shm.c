/* The shared-memory link: the memory of this process, which it alone writes, and that of its peers,
 * which it reads. */
#include "link_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 16
#endif

static const int SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

/* ---- layout: equal for all processes that share ---- */

static size_t ring_bytes(const lc_shm *s) {
    return sizeof(lc_shm_ring) + s->entries * sizeof(lc_shm_entry);
}

/* The ring in the memory of process `owner` for process `peer`, both by index. */
static size_t ring_at(const lc_shm *s, uint16_t owner, uint16_t peer) {
    size_t i = peer < owner ? peer : peer - 1u;
    return LC_SHM_HEADER_BYTES + i * ring_bytes(s);
}

static size_t buffers_at(const lc_shm *s) {
    return LC_SHM_HEADER_BYTES + s->n_peers * ring_bytes(s);
}

static void lay_out(lc_shm *s) {
    uint32_t share = LC_SHM_BUDGET / LC_SHARED_PAYLOAD / s->n_peers;
    share = share < LC_SHM_BUFFERS ? share : LC_SHM_BUFFERS;
    s->share = (uint16_t)(share < 2 ? 2 : share);
    s->n_buffers = (uint16_t)(s->share * s->n_peers);
    s->entries = LC_SHM_ENTRIES;
    while (s->entries > LC_SHM_ENTRIES_LEAST &&
           (size_t)s->entries * s->n_peers * LC_SHM_ENTRY_BYTES > LC_SHM_ENTRIES_BUDGET)
        s->entries /= 2;
    s->bytes = buffers_at(s) + (size_t)s->n_buffers * LC_SHARED_PAYLOAD;
    s->bytes = (s->bytes + LC_SHM_HEADER_BYTES - 1) / LC_SHM_HEADER_BYTES * LC_SHM_HEADER_BYTES;
}

/* ---- this process's memory ---- */

static int make_file(void) {
    int fd = memfd_create("lossycoll", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* a system before 6.3 */
        fd = memfd_create("lossycoll", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    return fd;
}

/* All of it now: a page that isn't there when a packet is copied in would end the process. */
static int reserve(int fd, size_t bytes) {
    int error;
    do
        error = posix_fallocate(fd, 0, (off_t)bytes);
    while (error == EINTR);
    errno = error;
    return error == 0;
}

static int make_memory(lc_shm *s) {
    s->fd = make_file();
    if (s->fd < 0 || pipe2(s->wake_fds, O_NONBLOCK | O_CLOEXEC) != 0 || !reserve(s->fd, s->bytes))
        return 0;
    s->memory = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
    if (s->memory == MAP_FAILED) {
        s->memory = NULL;
        return 0;
    }
    return fcntl(s->fd, F_ADD_SEALS, SEALS) == 0;
}

static int make_tables(lc_shm *s) {
    s->peer_of = malloc(s->processes * sizeof *s->peer_of);
    s->peers = calloc(s->n_peers, sizeof *s->peers);
    s->buffer = calloc(s->n_buffers + 1u, sizeof *s->buffer);
    while (s->holder_mask < 2u * s->n_buffers)
        s->holder_mask = 2 * s->holder_mask + 1;
    s->holder = calloc(s->holder_mask + 1u, sizeof *s->holder);
    return s->peer_of && s->peers && s->buffer && s->holder;
}

static void number_peers(lc_shm *s, const uint16_t *processes) {
    memset(s->peer_of, 0xFF, s->processes * sizeof *s->peer_of);
    for (uint16_t i = 0; i <= s->n_peers; i++) {
        uint16_t k = (uint16_t)(i < s->own ? i : i - 1);
        if (i == s->own)
            continue;
        s->peer_of[processes[i]] = k;
        s->peers[k].process = processes[i];
        s->peers[k].wake_fd = -1;
        s->peers[k].out = (lc_shm_ring *)(void *)(s->memory + ring_at(s, s->own, i));
    }
    s->n_idle = s->n_buffers;
    uint16_t few = s->n_buffers < LC_SHM_BUFFERS ? s->n_buffers : LC_SHM_BUFFERS;
    s->last_unneeded = (uint16_t)(few - 1);
    for (uint16_t i = 0; i <= s->n_buffers; i++) {
        s->buffer[i].next = i < s->n_buffers ? (uint16_t)(i + 1) : 0;
        s->buffer[i].prev = i ? (uint16_t)(i - 1) : s->n_buffers;
    }
}

static void write_header(lc_shm *s, uint16_t process) {
    s->header = (lc_shm_header *)(void *)s->memory;
    s->header->magic = LC_SHM_MAGIC;
    s->header->version = LC_SHM_VERSION;
    s->header->process = process;
    s->header->processes = (uint16_t)(s->n_peers + 1);
    s->link.board = s->header->uplinks;
    s->buffers = s->memory + buffers_at(s);
}

/* ---- peers ---- */

static void forget(const lc_shm *s, lc_shm_peer *p) {
    if (p->memory)
        munmap((void *)(uintptr_t)p->memory, s->bytes);
    if (p->wake_fd >= 0)
        close(p->wake_fd);
    p->memory = NULL;
    p->in = NULL;
    p->wake_fd = -1;
}

/* Memory that can shrink would end us when we read it. What isn't a pipe of the kernel's own, as
 * ours is, isn't opened: its file system might have the open, or a write, wait. */
static int is_sound(const lc_shm *s, const lc_address *a) {
    struct stat file, own, pipe;
    int seals = fcntl(a->memory, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(a->memory, &file) == 0 &&
           file.st_size == (off_t)s->bytes && fstat(a->wake, &pipe) == 0 &&
           fstat(s->wake_fds[0], &own) == 0 && S_ISFIFO(pipe.st_mode) && pipe.st_dev == own.st_dev;
}

/* Whether a write blocks is a property of what was opened, which all share who have the
 * descriptor: a peer could change it, fill the pipe, and stop us in wake(). So it is opened once
 * more. For reading too, so that no write to a pipe whose owner has gone is a signal. */
static int open_anew(int pipe) {
    char name[sizeof "/proc/self/fd/" + 12];
    snprintf(name, sizeof name, "/proc/self/fd/%d", pipe);
    return open(name, O_RDWR | O_NONBLOCK | O_CLOEXEC);
}

static int is_of(const lc_shm *s, const lc_shm_peer *p) {
    const lc_shm_header *there = (const lc_shm_header *)(const void *)p->memory;
    return there->magic == LC_SHM_MAGIC && there->version == LC_SHM_VERSION &&
           there->process == p->process && there->processes == s->n_peers + 1;
}

static int set_peer(lc_link *link, uint16_t process, const lc_address *address) {
    lc_shm *s = lc_shm_of(link);
    lc_shm_peer *p = lc_shm_peer_of(s, process);
    if (process == s->header->process) /* nothing is sent there */
        return LC_OK;
    if (!p)
        return LC_E_ARGUMENT;
    forget(s, p);
    if (!address)
        return LC_OK;
    if (!is_sound(s, address))
        return LC_E_ARGUMENT;
    void *memory = mmap(NULL, s->bytes, PROT_READ, MAP_SHARED, address->memory, 0);
    if (memory == MAP_FAILED)
        return LC_E_MEMORY;
    p->memory = memory;
    p->wake_fd = open_anew(address->wake);
    uint16_t k = (uint16_t)(p - s->peers);
    uint16_t there = (uint16_t)(k < s->own ? k : k + 1);
    p->in = (const lc_shm_ring *)(const void *)(p->memory + ring_at(s, there, s->own));
    if (p->wake_fd < 0 || !is_of(s, p)) {
        int code = p->wake_fd < 0 ? LC_E_SYSTEM : LC_E_ARGUMENT;
        forget(s, p);
        return code;
    }
    return LC_OK;
}

/* ---- what it tells of itself ---- */

static int is_here(const lc_link *link, uint16_t peer) {
    (void)link;
    (void)peer;
    return 1;
}

static const lc_uplink_board *board(const lc_link *link, uint16_t process) {
    const lc_shm_peer *p = lc_shm_peer_of(lc_shm_of_const(link), process);
    return p && p->memory ? ((const lc_shm_header *)(const void *)p->memory)->uplinks : NULL;
}

static void info(const lc_link *link, lc_link_info *info) {
    *info = (lc_link_info){.payload_bytes = (uint16_t)link->payload_bytes};
}

/* A peer that says what it has seen may not have told yet that it has taken it (lc_shm_receive): so
 * much of its share stays free. */
static uint32_t credits(const lc_link *link, uint32_t packet_bytes, uint32_t peers) {
    const lc_shm *s = lc_shm_of_const(link);
    uint32_t room = s->share;
    if (packet_bytes <= LC_SHM_HEAD_MAX)
        room = s->entries - s->entries / 4u; /* the rest is for control */
    uint32_t unreported = room / 2u < LC_RECEIVE_BUFFERS ? room / 2u : LC_RECEIVE_BUFFERS;
    (void)peers;
    return room - unreported;
}

static int event(lc_link *link, lc_event *event) {
    lc_shm *s = lc_shm_of(link);
    *event = s->event;
    s->event.kind = 0;
    return event->kind != 0;
}

static void stats(const lc_link *link, lc_link_stats *stats) {
    *stats = lc_shm_of_const(link)->stats;
}

/* ---- opening ---- */

static void close_shm(lc_link *link) {
    lc_shm *s = lc_shm_of(link);
    for (uint16_t i = 0; s->peers && i < s->n_peers; i++)
        forget(s, &s->peers[i]);
    if (s->memory)
        munmap(s->memory, s->bytes);
    if (s->fd >= 0)
        close(s->fd);
    for (int i = 0; i < 2; i++)
        if (s->wake_fds[i] >= 0)
            close(s->wake_fds[i]);
    free(s->peer_of);
    free(s->peers);
    free(s->buffer);
    free(s->holder);
    free(s);
}

static const lc_link_ops shm_ops = {.name = "shm",
                                    .close = close_shm,
                                    .set_peer = set_peer,
                                    .is_here = is_here,
                                    .board = board,
                                    .info = info,
                                    .credits = credits,
                                    .send = lc_shm_send,
                                    .receive = lc_shm_receive,
                                    .is_from = lc_shm_is_from,
                                    .descriptors = lc_shm_descriptors,
                                    .watch = lc_shm_watch,
                                    .event = event,
                                    .stats = stats};

/* Ascending, this process among them. Returns its index, or -1. */
static int own_index(const lc_host_config *config, const uint16_t *processes, uint16_t n) {
    int own = -1;
    for (uint16_t i = 0; i < n; i++) {
        if (processes[i] >= config->processes || (i && processes[i] <= processes[i - 1]))
            return -1;
        if (processes[i] == config->process)
            own = i;
    }
    return n >= 2 && n <= LC_SHM_PROCESSES ? own : -1;
}

lc_link *lc_shm_open(const lc_host_config *config, const uint16_t *processes, uint16_t n,
                     const lc_clock *clock, int descriptors[2], lc_failure *failure) {
    int own = own_index(config, processes, n);
    *failure = (lc_failure){.code = own < 0 ? LC_E_ARGUMENT : LC_E_MEMORY, .peer = -1};
    lc_shm *s = own < 0 ? NULL : aligned_alloc(_Alignof(lc_shm), sizeof *s);
    if (!s)
        return NULL;
    memset(s, 0, sizeof *s);
    s->link = (lc_link){.ops = &shm_ops,
                        .clock = clock,
                        .packet_max = LC_SHM_HEAD_MAX + LC_SHARED_PAYLOAD,
                        .payload_bytes = LC_SHARED_PAYLOAD,
                        .head_max = LC_SHM_HEAD_MAX,
                        .small_max = LC_SHM_HEAD_MAX,
                        .local = 1};
    s->fd = s->wake_fds[0] = s->wake_fds[1] = -1;
    s->own = (uint16_t)own;
    s->n_peers = (uint16_t)(n - 1);
    s->processes = config->processes;
    lay_out(s);
    int has_tables = make_tables(s);
    if (has_tables && make_memory(s)) {
        write_header(s, config->process);
        number_peers(s, processes);
        descriptors[0] = s->fd;
        descriptors[1] = s->wake_fds[1];
        failure->code = LC_OK;
        return &s->link;
    }
    failure->code = has_tables ? LC_E_SYSTEM : LC_E_MEMORY;
    failure->sys_errno = errno;
    close_shm(&s->link);
    return NULL;
}
