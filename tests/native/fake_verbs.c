/* A libibverbs of the tests' own: devices "fake0" and "fake1" whose queue pairs are Unix sockets,
 * between threads and between processes. A thread for each stands for the device: it takes what
 * comes at once, and drops it where no buffer is left, as devices do. What a real device would
 * forgive or damage memory by (a piece outside of what is registered, more requests than the queue
 * holds, a queue of completions that runs over) ends the process.
 *
 * Processes give each other faults by the environment: FAKE_VERBS_LOSS (a share), _LOCK (bytes),
 * _OPEN (an errno), _PORT (a state), _MTU, _CARRIES (bytes), _PARTITION, _ADDRESS (IPv4, of GID 1),
 * _COUNTERS (a folder for the device's counters). */
#define _GNU_SOURCE
#include "fake_verbs.h"

#include "verbs_api.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { DEVICES = 2, PORTS = 1, GIDS = 2, QUEUE_MAX = 8192, BYTES_MAX = 8192, OBJECTS = 64 };
enum { FLUSHED = 5 }; /* IBV_WC_WR_FLUSH_ERR */

fake_verbs_state fake_verbs;

struct vb_device {
    char name[8];
};
static vb_device devices[DEVICES] = {{"fake0"}, {"fake1"}};

struct vb_pd {
    vb_context *context;
    const vb_mr *mrs[OBJECTS];
};
struct vb_ah {
    vb_gid gid;
};
typedef struct {
    vb_wc wc;
    uint32_t covers; /* requests that it ends */
} entry;
struct vb_cq {
    vb_channel *channel;
    pthread_mutex_t lock;
    entry *entries;
    uint32_t room, in, out;
    int armed;
    uint32_t covered; /* requests whose completions were polled */
};
typedef struct {
    vb_channel base;
    vb_cq *told[OBJECTS]; /* events that weren't taken */
    int n_told;
    pthread_mutex_t lock;
} channel;
struct vb_qp {
    vb_qp_head head;
    vb_pd *pd;
    vb_cq *send_cq, *receive_cq;
    vb_qp_cap cap;
    uint32_t key;
    int state, stopped, socket, end;
    uint32_t posted, uncovered;
    uint32_t stuck; /* the queue pair that took nothing for a second; 0: none */
    pthread_mutex_t lock;
    vb_recv_wr buffers[QUEUE_MAX];
    vb_sge pieces[QUEUE_MAX];
    uint32_t in, out;
    pthread_t thread;
    int has_thread;
};
typedef struct {
    vb_context base;
    int pipe[2];
    vb_qp *qp;
    int gid_index;
} context;

/* Before each datagram. */
typedef struct {
    uint32_t source, key;
    vb_gid gid;
} wire_head;

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static context *all[OBJECTS];
static char counters[256];

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "fake libibverbs: %s\n", #condition);                                  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static const char *setting(const char *name) {
    const char *found = getenv(name);
    return found && *found ? found : NULL;
}

__attribute__((constructor)) static void read_environment(void) {
    const char *text;
    if ((text = setting("FAKE_VERBS_LOSS")))
        fake_verbs.loss = atof(text);
    if ((text = setting("FAKE_VERBS_LOCK")))
        fake_verbs.lock_max = strtoull(text, NULL, 10);
    if ((text = setting("FAKE_VERBS_OPEN")))
        fake_verbs.open_errno = atoi(text);
    if ((text = setting("FAKE_VERBS_PORT")))
        fake_verbs.port_state = atoi(text);
    if ((text = setting("FAKE_VERBS_MTU")))
        fake_verbs.mtu = atoi(text);
    if ((text = setting("FAKE_VERBS_PARTITION")))
        fake_verbs.partition = (uint16_t)atoi(text);
    if ((text = setting("FAKE_VERBS_CARRIES")))
        fake_verbs.carries = (uint64_t)atoi(text);
    if ((text = setting("FAKE_VERBS_COUNTERS")))
        snprintf(counters, sizeof counters, "%s", text);
}

static void count(uint64_t *figure) {
    __atomic_fetch_add(figure, 1, __ATOMIC_RELAXED);
}

static void write_counter(const char *name, uint64_t value) {
    char path[300];
    if (!*counters)
        return;
    snprintf(path, sizeof path, "%s/%s", counters, name);
    FILE *file = fopen(path, "w");
    if (file) {
        fprintf(file, "%llu\n", (unsigned long long)value);
        fclose(file);
    }
}

/* ---- devices ---- */

vb_device **ibv_get_device_list(int *n) {
    vb_device **list = calloc(DEVICES + 1, sizeof *list);
    for (int i = 0; i < DEVICES; i++)
        list[i] = &devices[i];
    *n = DEVICES;
    return list;
}

void ibv_free_device_list(vb_device **list) {
    free(list);
}

const char *ibv_get_device_name(vb_device *device) {
    return device->name;
}

static int poll_cq(vb_cq *cq, int max, vb_wc *found);
static int req_notify_cq(vb_cq *cq, int solicited_only);
static int post_send(vb_qp *qp, vb_send_wr *first, vb_send_wr **bad);
static int post_recv(vb_qp *qp, vb_recv_wr *first, vb_recv_wr **bad);

vb_context *ibv_open_device(vb_device *device) {
    errno = fake_verbs.open_errno;
    if (errno)
        return NULL;
    context *c = calloc(1, sizeof *c);
    MUST(c && pipe2(c->pipe, O_CLOEXEC) == 0);
    c->base.device = device;
    c->base.poll_cq = poll_cq;
    c->base.req_notify_cq = req_notify_cq;
    c->base.post_send = post_send;
    c->base.post_recv = post_recv;
    c->base.async_fd = c->pipe[0];
    pthread_mutex_lock(&all_lock);
    int i = 0;
    while (i < OBJECTS && all[i])
        i++;
    MUST(i < OBJECTS);
    all[i] = c;
    pthread_mutex_unlock(&all_lock);
    return &c->base;
}

int ibv_close_device(vb_context *base) {
    context *c = (context *)(void *)base;
    pthread_mutex_lock(&all_lock);
    for (int i = 0; i < OBJECTS; i++)
        if (all[i] == c)
            all[i] = NULL;
    pthread_mutex_unlock(&all_lock);
    MUST(!c->qp);
    close(c->pipe[0]);
    close(c->pipe[1]);
    free(c);
    return 0;
}

int ibv_query_port(vb_context *c, uint8_t port, vb_port_attr *attr) {
    (void)c;
    if (port < 1 || port > PORTS)
        return EINVAL;
    memset(attr, 0, offsetof(vb_port_attr, others));
    attr->state = fake_verbs.port_state ? fake_verbs.port_state : VB_PORT_ACTIVE;
    attr->max_mtu = VB_MTU_4096;
    attr->active_mtu = fake_verbs.mtu ? fake_verbs.mtu : VB_MTU_4096;
    attr->gid_tbl_len = GIDS;
    attr->lid = fake_verbs.infiniband ? (uint16_t)getpid() : 0;
    attr->link_layer = fake_verbs.infiniband ? 1 : VB_LINK_ETHERNET;
    return 0;
}

/* 0: of the link's address, 1: of IPv4's. */
int ibv_query_gid(vb_context *base, uint8_t port, int index, vb_gid *gid) {
    const char *address = setting("FAKE_VERBS_ADDRESS");
    if (port < 1 || port > PORTS || index < 0 || index >= GIDS)
        return -1;
    memset(gid, 0, sizeof *gid);
    if (index == 0) {
        gid->raw[0] = 0xFE;
        gid->raw[1] = 0x80;
        gid->raw[15] = (uint8_t)(base->device == &devices[0] ? 1 : 2);
    } else {
        gid->raw[10] = gid->raw[11] = 0xFF;
        inet_pton(AF_INET, address ? address : "127.0.0.1", gid->raw + 12);
    }
    return 0;
}

int ibv_query_pkey(vb_context *c, uint8_t port, int index, uint16_t *key) {
    (void)c;
    *key = htobe16(fake_verbs.partition ? fake_verbs.partition : 0xFFFF);
    return port < 1 || port > PORTS || index ? -1 : 0;
}

/* ---- memory ---- */

vb_pd *ibv_alloc_pd(vb_context *c) {
    vb_pd *pd = calloc(1, sizeof *pd);
    pd->context = c;
    return pd;
}

int ibv_dealloc_pd(vb_pd *pd) {
    for (int i = 0; i < OBJECTS; i++)
        MUST(!pd->mrs[i]);
    free(pd);
    return 0;
}

vb_mr *ibv_reg_mr(vb_pd *pd, void *addr, size_t bytes, int access) {
    MUST(access == VB_ACCESS_LOCAL_WRITE);
    errno = ENOMEM;
    if (fake_verbs.lock_max && bytes > fake_verbs.lock_max)
        return NULL;
    vb_mr *mr = calloc(1, sizeof *mr);
    int i = 0;
    while (i < OBJECTS && pd->mrs[i])
        i++;
    MUST(i < OBJECTS);
    *mr = (vb_mr){pd->context, pd, addr, bytes, 0, 100u + (uint32_t)i};
    pd->mrs[i] = mr;
    return mr;
}

int ibv_dereg_mr(vb_mr *mr) {
    mr->pd->mrs[mr->lkey - 100] = NULL;
    free(mr);
    return 0;
}

static void must_be_registered(const vb_pd *pd, const vb_sge *piece) {
    const vb_mr *mr = piece->lkey - 100 < OBJECTS ? pd->mrs[piece->lkey - 100] : NULL;
    MUST(mr);
    MUST(piece->addr >= (uintptr_t)mr->addr);
    MUST(piece->addr + piece->length <= (uintptr_t)mr->addr + mr->length);
}

/* ---- completions ---- */

vb_channel *ibv_create_comp_channel(vb_context *c) {
    channel *made = calloc(1, sizeof *made);
    made->base = (vb_channel){c, eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)};
    pthread_mutex_init(&made->lock, NULL);
    return &made->base;
}

int ibv_destroy_comp_channel(vb_channel *base) {
    close(base->fd);
    free(base);
    return 0;
}

vb_cq *ibv_create_cq(vb_context *c, int entries, void *own, vb_channel *base, int vector) {
    vb_cq *cq = calloc(1, sizeof *cq);
    (void)c;
    (void)own;
    MUST(vector == 0 && entries > 0);
    cq->channel = base;
    cq->room = (uint32_t)entries;
    cq->entries = calloc(cq->room, sizeof *cq->entries);
    pthread_mutex_init(&cq->lock, NULL);
    return cq;
}

int ibv_destroy_cq(vb_cq *cq) {
    free(cq->entries);
    free(cq);
    return 0;
}

static void complete(vb_cq *cq, const vb_wc *wc, uint32_t covers) {
    pthread_mutex_lock(&cq->lock);
    MUST(cq->in - cq->out < cq->room);
    cq->entries[cq->in++ % cq->room] = (entry){*wc, covers};
    int tells = cq->armed;
    cq->armed = 0;
    pthread_mutex_unlock(&cq->lock);
    if (!tells)
        return;
    channel *c = (channel *)(void *)cq->channel;
    const uint64_t one = 1;
    pthread_mutex_lock(&c->lock);
    MUST(c->n_told < OBJECTS);
    c->told[c->n_told++] = cq;
    pthread_mutex_unlock(&c->lock);
    count(&fake_verbs.notified);
    MUST(write(c->base.fd, &one, sizeof one) == sizeof one);
}

static int poll_cq(vb_cq *cq, int max, vb_wc *found) {
    int n = 0;
    if (fake_verbs.poll_fails)
        return -1;
    pthread_mutex_lock(&cq->lock);
    for (; n < max && cq->out != cq->in; n++) {
        const entry *e = &cq->entries[cq->out++ % cq->room];
        found[n] = e->wc;
        cq->covered += e->covers;
    }
    pthread_mutex_unlock(&cq->lock);
    return n;
}

static int req_notify_cq(vb_cq *cq, int solicited_only) {
    MUST(!solicited_only);
    if (fake_verbs.notify_fails)
        return EIO;
    pthread_mutex_lock(&cq->lock);
    cq->armed = 1;
    pthread_mutex_unlock(&cq->lock);
    return 0;
}

int ibv_get_cq_event(vb_channel *base, vb_cq **cq, void **own) {
    channel *c = (channel *)(void *)base;
    uint64_t one;
    *own = NULL;
    if (read(base->fd, &one, sizeof one) < 0)
        return -1;
    pthread_mutex_lock(&c->lock);
    *cq = c->told[0];
    memmove(c->told, c->told + 1, (size_t)--c->n_told * sizeof *c->told);
    pthread_mutex_unlock(&c->lock);
    return 0;
}

void ibv_ack_cq_events(vb_cq *cq, unsigned n) {
    (void)cq;
    MUST(n == 1);
}

/* ---- queue pairs ---- */

static socklen_t name_of(uint32_t number, struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    int n = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "lossycoll-verbs-%06x",
                     (unsigned)number);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static void flush_buffers(vb_qp *qp);

/* How a device writes where a datagram comes from: with IPv4's header at the end, or with a GRH. */
static void write_source(uint8_t *grh, const vb_gid *gid) {
    memset(grh, 0, VB_GRH_BYTES);
    if (gid->raw[10] == 0xFF && !gid->raw[0]) {
        grh[20] = 0x45;
        memcpy(grh + 32, gid->raw + 12, 4);
    } else {
        grh[0] = 0x60;
        memcpy(grh + 8, gid->raw, sizeof gid->raw);
    }
}

static void deliver(vb_qp *qp, const uint8_t *data, size_t bytes) {
    wire_head head;
    MUST(bytes >= sizeof head);
    memcpy(&head, data, sizeof head);
    uint32_t n = (uint32_t)(bytes - sizeof head);
    if (head.key != qp->key) {
        count(&fake_verbs.wrong_key);
        return;
    }
    if (__atomic_load_n(&qp->stopped, __ATOMIC_SEQ_CST))
        return;
    pthread_mutex_lock(&qp->lock);
    int has = qp->in != qp->out;
    vb_recv_wr buffer = qp->buffers[qp->out % QUEUE_MAX];
    vb_sge at = qp->pieces[qp->out % QUEUE_MAX];
    qp->out += (uint32_t)has;
    pthread_mutex_unlock(&qp->lock);
    if (!has) {
        count(&fake_verbs.dropped);
        write_counter("out_of_buffer", fake_verbs.dropped);
        return;
    }
    MUST(VB_GRH_BYTES + n <= at.length);
    uint8_t *to = (uint8_t *)(uintptr_t)at.addr;
    write_source(to, &head.gid);
    memcpy(to + VB_GRH_BYTES, data + sizeof head, n);
    int odd = fake_verbs.short_status;
    if (odd > 0)
        __atomic_store_n(&qp->stopped, 1, __ATOMIC_SEQ_CST);
    vb_wc wc = {.wr_id = buffer.wr_id,
                .status = odd > 0 ? odd : VB_WC_SUCCESS,
                .byte_len = odd < 0 ? VB_GRH_BYTES : VB_GRH_BYTES + n,
                .src_qp = head.source,
                .slid = 7,
                .wc_flags = fake_verbs.no_grh ? 0 : VB_WC_GRH};
    complete(qp->receive_cq, &wc, 0);
    if (odd > 0)
        flush_buffers(qp);
}

static void take_datagram(vb_qp *qp, const uint8_t *data, size_t bytes) {
    deliver(qp, data, bytes);
    count(&fake_verbs.arrived); /* last: who waits for it finds all done */
}

static void *device_thread(void *of) {
    vb_qp *qp = of;
    uint8_t data[BYTES_MAX];
    struct pollfd fds[2] = {{qp->socket, POLLIN, 0}, {qp->end, POLLIN, 0}};
    for (;;) {
        MUST(poll(fds, 2, -1) > 0);
        if (fds[1].revents)
            return NULL;
        ssize_t n = recv(qp->socket, data, sizeof data, MSG_DONTWAIT);
        if (n > 0)
            take_datagram(qp, data, (size_t)n);
    }
}

vb_qp *ibv_create_qp(vb_pd *pd, vb_qp_init_attr *attr) {
    struct sockaddr_un name;
    MUST(attr->qp_type == VB_QPT_UD && !attr->sq_sig_all && attr->cap.max_recv_wr <= QUEUE_MAX);
    errno = fake_verbs.create_errno;
    if (!errno && fake_verbs.no_inline && attr->cap.max_inline_data)
        errno = EINVAL;
    if (errno)
        return NULL;
    vb_qp *qp = calloc(1, sizeof *qp);
    qp->head.context = pd->context;
    qp->pd = pd;
    qp->send_cq = attr->send_cq;
    qp->receive_cq = attr->recv_cq;
    qp->cap = attr->cap;
    pthread_mutex_init(&qp->lock, NULL);
    qp->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    qp->end = eventfd(0, EFD_CLOEXEC);
    const struct timeval patience = {.tv_sec = 1};
    (void)setsockopt(qp->socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    unsigned seed = (unsigned)getpid() * 2654435761u + (unsigned)(uintptr_t)qp;
    do
        qp->head.qp_num = (uint32_t)rand_r(&seed) & 0xFFFFFF;
    while (bind(qp->socket, (struct sockaddr *)&name, name_of(qp->head.qp_num, &name)) != 0);
    ((context *)(void *)pd->context)->qp = qp;
    return qp;
}

/* Nothing is posted, and nothing completed. */
static void forget_all(vb_qp *qp) {
    pthread_mutex_lock(&qp->lock);
    qp->out = qp->in;
    __atomic_store_n(&qp->stopped, 0, __ATOMIC_SEQ_CST);
    qp->uncovered = 0;
    pthread_mutex_unlock(&qp->lock);
    vb_cq *queues[2] = {qp->send_cq, qp->receive_cq};
    for (int i = 0; i < 2; i++) {
        pthread_mutex_lock(&queues[i]->lock);
        queues[i]->out = queues[i]->in;
        pthread_mutex_unlock(&queues[i]->lock);
    }
    qp->send_cq->covered = qp->posted;
}

/* What a queue pair does with its buffers after an error: each comes back, and none is filled. */
static void flush_buffers(vb_qp *qp) {
    for (;;) {
        pthread_mutex_lock(&qp->lock);
        int has = qp->in != qp->out;
        vb_wc wc = {.wr_id = qp->buffers[qp->out % QUEUE_MAX].wr_id, .status = FLUSHED};
        qp->out += (uint32_t)has;
        pthread_mutex_unlock(&qp->lock);
        if (!has)
            return;
        complete(qp->receive_cq, &wc, 0);
    }
}

int ibv_modify_qp(vb_qp *qp, vb_qp_attr *attr, int mask) {
    MUST(mask & VB_QP_STATE);
    if (attr->qp_state == VB_QPS_INIT) {
        MUST(mask == (VB_QP_STATE | VB_QP_PKEY_INDEX | VB_QP_PORT | VB_QP_QKEY));
        MUST(qp->state == VB_QPS_RESET);
        qp->key = attr->qkey;
        if (!qp->has_thread)
            MUST(pthread_create(&qp->thread, NULL, device_thread, qp) == 0);
        qp->has_thread = 1;
    } else if (attr->qp_state == VB_QPS_RESET) {
        if (fake_verbs.modify_errno)
            return fake_verbs.modify_errno;
        forget_all(qp);
    } else {
        MUST(attr->qp_state == qp->state + 1);
    }
    qp->state = attr->qp_state;
    return 0;
}

int ibv_destroy_qp(vb_qp *qp) {
    const uint64_t one = 1;
    if (qp->has_thread) {
        MUST(write(qp->end, &one, sizeof one) == sizeof one);
        pthread_join(qp->thread, NULL);
    }
    close(qp->socket);
    close(qp->end);
    ((context *)(void *)qp->head.context)->qp = NULL;
    free(qp);
    return 0;
}

vb_ah *ibv_create_ah(vb_pd *pd, vb_ah_attr *attr) {
    (void)pd;
    MUST(attr->is_global && attr->port_num >= 1 && attr->port_num <= PORTS);
    MUST(attr->grh.sgid_index < GIDS && attr->grh.hop_limit > 1);
    ((context *)(void *)pd->context)->gid_index = attr->grh.sgid_index;
    errno = EHOSTUNREACH;
    if (attr->grh.dgid.raw[15] == 255)
        return NULL;
    vb_ah *ah = calloc(1, sizeof *ah);
    ah->gid = attr->grh.dgid;
    count(&fake_verbs.ways);
    return ah;
}

int ibv_destroy_ah(vb_ah *ah) {
    __atomic_fetch_sub(&fake_verbs.ways, 1, __ATOMIC_RELAXED);
    free(ah);
    return 0;
}

/* ---- moving datagrams ---- */

static int is_lost(void) {
    static unsigned seed = 12345;
    return fake_verbs.loss > 0 && rand_r(&seed) / (RAND_MAX + 1.0) < fake_verbs.loss;
}

/* Where nobody is, it is lost. Where a process is stopped, and its socket has no room, it is too.
 */
static void put_on_the_wire(vb_qp *qp, uint32_t to, const uint8_t *data, size_t n) {
    struct sockaddr_un name;
    socklen_t length = name_of(to, &name);
    int flags = qp->stuck == to ? MSG_DONTWAIT : 0;
    int went = sendto(qp->socket, data, n, flags, (struct sockaddr *)&name, length) >= 0;
    qp->stuck = !went && errno == EAGAIN ? to : 0;
}

static void carry(vb_qp *qp, const vb_send_wr *w) {
    uint8_t data[BYTES_MAX];
    wire_head head = {.source = qp->head.qp_num, .key = w->remote_qkey};
    size_t n = sizeof head;
    int index = ((context *)(void *)qp->head.context)->gid_index;
    ibv_query_gid(qp->head.context, 1, index, &head.gid);
    if (fake_verbs.forged_grh)
        head.gid.raw[15] ^= 1;
    memcpy(data, &head, sizeof head);
    MUST(w->num_sge <= (int)qp->cap.max_send_sge);
    for (int i = 0; i < w->num_sge; i++) {
        const vb_sge *piece = &w->sg_list[i];
        if (!(w->send_flags & VB_SEND_INLINE))
            must_be_registered(qp->pd, piece);
        MUST(n + piece->length <= sizeof data);
        memcpy(data + n, (const void *)(uintptr_t)piece->addr, piece->length);
        n += piece->length;
    }
    vb_port_attr port;
    ibv_query_port(qp->head.context, 1, &port);
    if (w->send_flags & VB_SEND_INLINE) {
        MUST(n - sizeof head <= qp->cap.max_inline_data);
        count(&fake_verbs.inlined);
    }
    count(&fake_verbs.sent);
    if (n - sizeof head > 128u << port.active_mtu)
        count(&fake_verbs.swallowed);
    else if (fake_verbs.carries && n - sizeof head > fake_verbs.carries)
        return;
    else if (!is_lost())
        put_on_the_wire(qp, w->remote_qpn, data, n);
}

static int post_send(vb_qp *qp, vb_send_wr *first, vb_send_wr **bad) {
    int n = 0;
    MUST(qp->state == VB_QPS_RTS);
    for (vb_send_wr *w = first; w; w = w->next, n++) {
        MUST(w->opcode == VB_WR_SEND && w->ah);
        if (fake_verbs.send_errno && n >= fake_verbs.send_takes) {
            *bad = w;
            return fake_verbs.send_errno;
        }
        pthread_mutex_lock(&qp->send_cq->lock);
        uint32_t waiting = qp->posted - qp->send_cq->covered;
        pthread_mutex_unlock(&qp->send_cq->lock);
        MUST(waiting < qp->cap.max_send_wr);
        qp->posted++;
        qp->uncovered++;
        vb_wc wc = {.wr_id = w->wr_id, .status = VB_WC_SUCCESS};
        if (qp->stopped) {
            wc.status = FLUSHED;
        } else if (fake_verbs.failing_status) {
            wc.status = fake_verbs.failing_status;
            fake_verbs.failing_status = 0;
            __atomic_store_n(&qp->stopped, 1, __ATOMIC_SEQ_CST);
            flush_buffers(qp);
        } else {
            carry(qp, w);
        }
        if (wc.status != VB_WC_SUCCESS || w->send_flags & VB_SEND_SIGNALED) {
            complete(qp->send_cq, &wc, qp->uncovered);
            count(&fake_verbs.completed);
            qp->uncovered = 0;
        }
    }
    return 0;
}

static int post_recv(vb_qp *qp, vb_recv_wr *first, vb_recv_wr **bad) {
    int n = 0;
    MUST(qp->state >= VB_QPS_INIT);
    pthread_mutex_lock(&qp->lock);
    for (vb_recv_wr *w = first; w; w = w->next, n++) {
        MUST(w->num_sge == 1);
        must_be_registered(qp->pd, w->sg_list);
        MUST(qp->in - qp->out < qp->cap.max_recv_wr);
        if (fake_verbs.receive_errno && n >= fake_verbs.receive_takes) {
            *bad = w;
            pthread_mutex_unlock(&qp->lock);
            int error = fake_verbs.receive_errno;
            fake_verbs.receive_errno = 0;
            return error;
        }
        qp->buffers[qp->in % QUEUE_MAX] = *w;
        qp->pieces[qp->in++ % QUEUE_MAX] = *w->sg_list;
    }
    pthread_mutex_unlock(&qp->lock);
    return 0;
}

/* ---- asynchronous events ---- */

void fake_verbs_event(int type, int port, int others) {
    pthread_mutex_lock(&all_lock);
    for (int i = 0; i < OBJECTS; i++) {
        if (!all[i])
            continue;
        vb_async_event e = {.event_type = type};
        if (port)
            e.element.port = port;
        else if (others)
            e.element.object = &fake_verbs;
        else if (type == VB_EVENT_CQ_ERR)
            e.element.object = all[i]->qp->receive_cq;
        else
            e.element.object = all[i]->qp;
        MUST(write(all[i]->pipe[1], &e, sizeof e) == sizeof e);
    }
    pthread_mutex_unlock(&all_lock);
}

int ibv_get_async_event(vb_context *c, vb_async_event *event) {
    return read(c->async_fd, event, sizeof *event) == (ssize_t)sizeof *event ? 0 : -1;
}

void ibv_ack_async_event(vb_async_event *event) {
    (void)event;
}

int fake_verbs_sent(void) {
    return (int)__atomic_load_n(&fake_verbs.sent, __ATOMIC_RELAXED);
}

void fake_verbs_lose(double share) {
    fake_verbs.loss = share;
}

int fake_verbs_open(void) {
    int n = 0;
    pthread_mutex_lock(&all_lock);
    for (int i = 0; i < OBJECTS; i++)
        n += all[i] != NULL;
    pthread_mutex_unlock(&all_lock);
    return n;
}

int ibv_fork_init(void) {
    return 0;
}
