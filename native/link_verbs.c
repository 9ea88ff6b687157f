/* The verbs link: opening a device, its peers, and what it tells of itself. */
#include "link_verbs.h"
#include "table.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum {
    KEY_BITS = 0x7FFFFFFF, /* the highest bit is for privileged keys */
    PARTITION_BITS = 0x7FFF
};

static const uint64_t LOOK_NS = 100000000, COUNT_NS = 1000000000;

/* ---- a device ---- */

static int fail(lc_failure *failure, int step, int error) {
    *failure = (lc_failure){.code = LC_E_SYSTEM, .sys_errno = error, .peer = -1};
    failure->mine[0] = (uint64_t)step;
    return failure->code;
}

static vb_context *open_device(const vb_api *api, const char *name, lc_failure *failure) {
    int n = 0;
    vb_context *context = NULL;
    vb_device **devices = api->get_device_list(&n), *device = NULL;
    for (int i = 0; devices && i < n && !device; i++)
        if (!strcmp(api->get_device_name(devices[i]), name))
            device = devices[i];
    if (!device) {
        fail(failure, LC_VERBS_DEVICE, devices ? ENODEV : errno);
    } else {
        errno = 0;
        context = api->open_device(device);
        if (!context)
            fail(failure, LC_VERBS_OPEN, errno);
    }
    if (devices)
        api->free_device_list(devices);
    return context;
}

static int look(const vb_api *api, vb_context *context, const lc_verbs_config *config,
                lc_verbs_info *info, lc_failure *failure) {
    vb_port_attr port;
    vb_gid gid;
    uint16_t partition = 0;
    memset(&port, 0, sizeof port);
    int error = api->query_port(context, config->port, &port);
    if (error)
        return fail(failure, LC_VERBS_PORT, error);
    if (port.active_mtu < 1 || port.active_mtu > VB_MTU_4096)
        return fail(failure, LC_VERBS_PORT, EPROTO);
    info->mtu = (uint16_t)(128 << port.active_mtu);
    if (port.state != VB_PORT_ACTIVE)
        return fail(failure, LC_VERBS_PORT, ENETDOWN);
    info->ethernet = port.link_layer == VB_LINK_ETHERNET;
    if (api->query_gid(context, config->port, config->gid, &gid) || !(gid.words[0] | gid.words[1]))
        return fail(failure, LC_VERBS_GID, ENOENT);
    if (api->query_pkey(context, config->port, 0, &partition))
        return fail(failure, LC_VERBS_PORT, EPROTO);
    memcpy(info->address.gid, gid.raw, sizeof info->address.gid);
    info->address.lid = port.lid;
    info->address.partition = be16toh(partition); /* as InfiniBand has it */
    return LC_OK;
}

/* ---- memory ---- */

static uint32_t round_up(uint32_t bytes) {
    return (bytes + 63) & ~63u;
}

static int lock_memory(lc_verbs *v, uint32_t queue) {
    v->slot_bytes = round_up(VB_GRH_BYTES + LC_VERBS_LARGEST); /* a sender may have another limit */
    v->payload_stride = round_up(v->mtu);
    size_t slots = (size_t)queue * v->slot_bytes;
    size_t heads = (size_t)LC_VERBS_SENDS * LC_VERBS_HEAD_BYTES;
    v->bytes = slots + heads + (size_t)LC_VERBS_SENDS * v->payload_stride;
    void *memory = mmap(NULL, v->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 0;
    v->memory = memory;
    /* Of pages that a forked child shares, older kernels would give the child those that the device
     * writes to. */
    (void)madvise(memory, v->bytes, MADV_DONTFORK);
    errno = ENOMEM; /* not every version says why */
    v->mr = v->api->reg_mr(v->pd, memory, v->bytes, VB_ACCESS_LOCAL_WRITE);
    if (!v->mr) {
        int error = errno;
        munmap(memory, v->bytes);
        v->memory = NULL;
        errno = error;
        return 0;
    }
    v->slots = v->memory;
    v->heads = v->slots + slots;
    v->payloads = v->heads + heads;
    v->queue = queue;
    return 1;
}

static void unlock_memory(lc_verbs *v) {
    if (v->mr)
        v->api->dereg_mr(v->mr);
    if (v->memory)
        munmap(v->memory, v->bytes);
    free(v->spent);
    v->mr = NULL;
    v->memory = NULL;
    v->spent = NULL;
}

static int make_tables(lc_verbs *v) {
    v->spent = malloc(v->queue * sizeof *v->spent);
    for (uint16_t i = 0; i < LC_VERBS_SENDS; i++) {
        v->free[i] = i;
        v->holder[i] = v->payload_of[i] = LC_VERBS_NONE;
    }
    v->n_free = LC_VERBS_SENDS;
    return v->spent != NULL;
}

/* As many buffers as may be locked, and as the device has places for: queues are locked as well. */
static int make_queues(lc_verbs *v, uint32_t wanted, lc_failure *failure) {
    int step = LC_VERBS_MEMORY, error = ENOMEM;
    for (uint32_t queue = wanted; queue >= LC_VERBS_QUEUE_MIN; queue /= 2) {
        int is_locked = lock_memory(v, queue);
        if (is_locked && make_tables(v) && lc_verbs_make_queues(v))
            return LC_OK;
        step = is_locked ? LC_VERBS_QUEUES : LC_VERBS_MEMORY;
        error = errno;
        lc_verbs_drop_queues(v);
        unlock_memory(v);
    }
    return fail(failure, step, error);
}

static void close_verbs(lc_link *link) {
    lc_verbs *v = lc_verbs_of(link);
    const vb_api *api = v->api;
    lc_verbs_drop_queues(v); /* first: what is still posted names ways and memory */
    for (uint32_t i = 0; i < v->n_peers; i++)
        if (v->peers[i].ah)
            api->destroy_ah(v->peers[i].ah);
    unlock_memory(v);
    if (v->pd)
        api->dealloc_pd(v->pd);
    if (v->context)
        api->close_device(v->context);
    free(v->peers);
    free(v->counters);
    free(v);
}

/* ---- peers ---- */

static int grow(lc_verbs *v, uint32_t n) {
    lc_verbs_peer *peers = lc_table_grown(v->peers, &v->n_peers, n, sizeof *peers);
    if (peers)
        v->peers = peers;
    return peers != NULL;
}

/* The highest bit of a partition's number tells full members from limited ones, of which two can't
 * reach each other. */
static int is_reachable(const lc_verbs *v, const lc_verbs_address *there) {
    const uint16_t own = v->own.partition, other = there->partition;
    return !((own ^ other) & PARTITION_BITS) && ((own | other) & ~PARTITION_BITS);
}

static vb_ah *make_way(lc_verbs *v, const lc_verbs_address *there) {
    vb_ah_attr attr = {.dlid = there->lid, .is_global = 1, .port_num = v->config.port};
    memcpy(attr.grh.dgid.raw, there->gid, sizeof attr.grh.dgid.raw);
    attr.grh.sgid_index = v->config.gid;
    attr.grh.hop_limit = 64;
    return v->api->create_ah(v->pd, &attr);
}

static int set_peer(lc_link *link, uint16_t peer, const lc_address *address) {
    lc_verbs *v = lc_verbs_of(link);
    lc_verbs_peer known = {.ah = NULL};
    if (address) {
        known.address = address->verbs;
        if (address->verbs.queue_pair >> 24 || !is_reachable(v, &address->verbs))
            return LC_E_ARGUMENT;
    }
    if (peer >= v->n_peers && !grow(v, peer + 1u))
        return LC_E_MEMORY;
    /* To find the way may take seconds: it isn't looked for again. */
    if (address && v->peers[peer].ah &&
        !memcmp(&v->peers[peer].address, &known.address, sizeof known.address))
        return LC_OK;
    if (address && !(known.ah = make_way(v, &address->verbs)))
        return LC_E_ARGUMENT;
    if (v->peers[peer].ah)
        v->api->destroy_ah(v->peers[peer].ah);
    v->peers[peer] = known;
    return LC_OK;
}

static int is_here(const lc_link *link, uint16_t peer) {
    const lc_verbs *v = lc_verbs_of_const(link);
    const lc_verbs_peer *p = lc_verbs_peer_of(v, peer);
    return p && !memcmp(p->address.gid, v->own.gid, sizeof v->own.gid);
}

/* ---- what it tells of itself ---- */

static void info(const lc_link *link, lc_link_info *info) {
    const lc_verbs *v = lc_verbs_of_const(link);
    *info = (lc_link_info){.receive_buffer = (int32_t)(v->queue * v->slot_bytes),
                           .send_buffer = (int32_t)(LC_VERBS_SENDS * v->payload_stride),
                           .payload_bytes = 0};
}

/* A buffer is one datagram's, whatever its length. Of those that were taken, some aren't back at
 * the device yet. */
static uint32_t credits(const lc_link *link, uint32_t packet_bytes, uint32_t peers) {
    const lc_verbs *v = lc_verbs_of_const(link);
    uint32_t usable = v->queue - LC_VERBS_RETURN - LC_RECEIVE_BUFFERS;
    uint32_t control = peers * LC_CONTROL_WAITING;
    (void)packet_bytes;
    control = control < usable / 2 ? control : usable / 2;
    return (usable - control) / peers;
}

static uint64_t counter(const lc_verbs *v, const char *name, int *is_there) {
    char path[512], text[32];
    *is_there = 0;
    snprintf(path, sizeof path, "%s/%s", v->counters, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    *is_there = n > 0;
    return strtoull(text, NULL, 10);
}

/* Datagrams that the device dropped because no buffer was left. Some devices count them; of a
 * soft-RoCE they are those that came and were no message. All of the device's users are counted. */
static uint64_t dropped(const lc_verbs *v) {
    int counts, comes, takes;
    uint64_t without = counter(v, "out_of_buffer", &counts);
    if (counts)
        return without;
    uint64_t came = counter(v, "rcvd_pkts", &comes), taken = counter(v, "rdma_recvs", &takes);
    return comes && takes && came > taken ? came - taken : 0;
}

static void stats(const lc_link *link, lc_link_stats *stats) {
    *stats = lc_verbs_of_const(link)->stats;
}

/* Those of other ports of the device, and of what others do with it, are nobody's here. */
static void on_event(lc_verbs *v, const vb_async_event *e) {
    int own_port = e->element.port == v->config.port;
    const void *object = e->element.object;
    uint64_t now = lc_clock_now(v->link.clock);
    lc_event told;
    if (e->event_type == VB_EVENT_PORT_ERR && own_port &&
        lc_trouble_begins(&v->port, ENETDOWN, now, &told))
        lc_verbs_note(v, told);
    else if (e->event_type == VB_EVENT_PORT_ACTIVE && own_port &&
             lc_trouble_ends(&v->port, now, &told))
        lc_verbs_note(v, told);
    else if (e->event_type == VB_EVENT_DEVICE_FATAL ||
             (e->event_type >= VB_EVENT_QP_FATAL && e->event_type <= VB_EVENT_QP_ACCESS_ERR &&
              object == v->qp) ||
             (e->event_type == VB_EVENT_CQ_ERR &&
              (object == v->send_cq || object == v->receive_cq)))
        v->failed_errno = EIO;
}

/* To ask costs a system call, and they are rare. To read a counter may take the device's firmware a
 * while. */
static int event(lc_link *link, lc_event *event) {
    lc_verbs *v = lc_verbs_of(link);
    uint64_t now = lc_clock_now(link->clock);
    vb_async_event found;
    if (now - v->looked_ns >= LOOK_NS) {
        v->looked_ns = now;
        while (!v->api->get_async_event(v->context, &found)) {
            on_event(v, &found);
            v->api->ack_async_event(&found);
        }
    }
    if (v->counters && now - v->counted_ns >= COUNT_NS) {
        uint64_t all = dropped(v);
        v->stats.overflow = all > v->dropped_before ? all - v->dropped_before : 0;
        v->counted_ns = now;
    }
    if (v->events_in == v->events_out)
        return 0;
    *event = v->events[v->events_out++ % LC_VERBS_EVENTS];
    return 1;
}

static const lc_link_ops verbs_ops = {.name = "verbs",
                                      .close = close_verbs,
                                      .set_peer = set_peer,
                                      .is_here = is_here,
                                      .info = info,
                                      .credits = credits,
                                      .send = lc_verbs_send,
                                      .receive = lc_verbs_receive,
                                      .is_from = lc_verbs_is_from,
                                      .descriptors = lc_verbs_descriptors,
                                      .watch = lc_verbs_watch,
                                      .event = event,
                                      .stats = stats};

/* ---- opening ---- */

static int draw_key(lc_verbs *v) {
    if (getrandom(&v->own.key, sizeof v->own.key, 0) != (ssize_t)sizeof v->own.key)
        return 0;
    v->own.key &= KEY_BITS;
    return 1;
}

static int open_all(lc_verbs *v, lc_verbs_info *info, lc_failure *failure) {
    uint32_t wanted = v->config.queue ? v->config.queue : LC_VERBS_QUEUE;
    v->context = open_device(v->api, v->config.device, failure);
    if (!v->context || look(v->api, v->context, &v->config, info, failure) != LC_OK)
        return failure->code;
    v->mtu = v->link.packet_max = info->mtu;
    v->own = info->address;
    v->pd = v->api->alloc_pd(v->context);
    if (!v->pd || !draw_key(v))
        return fail(failure, LC_VERBS_QUEUES, errno);
    if (make_queues(v, wanted, failure) != LC_OK)
        return failure->code;
    info->address = v->own;
    info->queue = v->queue;
    info->queue_of = wanted;
    v->dropped_before = v->counters ? dropped(v) : 0;
    return LC_OK;
}

lc_link *lc_verbs_link(const lc_verbs_config *config, const lc_clock *clock, lc_verbs_info *info,
                       lc_failure *failure) {
    const vb_api *api = lc_verbs_api(config->library);
    *info = (lc_verbs_info){.mtu = 0};
    *failure = (lc_failure){.code = LC_OK, .peer = -1};
    if (!api) {
        fail(failure, LC_VERBS_LIBRARY, ENOENT);
        return NULL;
    }
    if (config->queue && config->queue < LC_VERBS_QUEUE_MIN) {
        failure->code = LC_E_ARGUMENT;
        return NULL;
    }
    lc_verbs *v = calloc(1, sizeof *v);
    char *counters = config->counters ? strdup(config->counters) : NULL;
    if (!v || (config->counters && !counters)) {
        free(v);
        free(counters);
        failure->code = LC_E_MEMORY;
        return NULL;
    }
    v->link = (lc_link){.ops = &verbs_ops, .clock = clock};
    v->api = api;
    v->config = *config;
    v->counters = counters;
    if (open_all(v, info, failure) != LC_OK) {
        close_verbs(&v->link);
        return NULL;
    }
    v->config.library = v->config.device = v->config.counters = NULL; /* the caller's */
    return &v->link;
}
