/* A host: its interfaces, paths and thread, from opening to freeing; and what it tells of its
 * links. */
#define _GNU_SOURCE
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "forks.h"
#include "loop.h"
#include "mix.h"
#include "page.h"
#include "path.h"

enum {
    SHARED_MEMORY = 1,   /* number of its link */
    CELL_PAYLOAD = 8192, /* of a link whose packets are larger than the host's */
    SENDERS = 127        /* that may all be ahead of this process at once, where some are to come */
};

static const double VIRTUAL_ROW_RATE = 8e9;
/* How long the thread stays awake after a packet while operations run. A neighbour copies for
 * longer than it takes to fall asleep, and where waking up is slow that is most of the time: most
 * of all if it waits for a device. But with a core for each process and no more, others want it. */
static const uint64_t LOCAL_SPIN_NS = 2000000, SPIN_NS = 300000, SHORT_SPIN_NS = 200000;

static int config_ok(const lc_host_config *c) {
    return c->address && c->processes >= 1 && c->process < c->processes && c->payload_bytes >= 64 &&
           c->payload_bytes % 8 == 0 && c->socket_buffer >= 0 && c->pace_bytes_per_s >= 0;
}

/* ---- memory ---- */

static void free_interface(lc_interface *via) {
    lc_link_close(via->link);
    lc_cells_drop(&via->cells);
    free(via->paths);
    free(via->flights);
    free(via->iov);
    free(via->headers);
    free(via->contents);
    free(via->records_out);
    free(via->sealed);
    *via = (lc_interface){.link = NULL};
}

static void stop_thread(lc_host *h) {
    if (!h->running || h->threadless)
        return;
    atomic_store(&h->stop, 1);
    lc_waiter_wake(&h->waiter);
    pthread_join(h->thread, NULL);
}

static void drop_room(lc_path *p) {
    const lc_room none = {.records = NULL};
    if (!p->records) /* its memory, if it was never begun, has never been touched */
        return;
    lc_room had = lc_path_exchange(p, &none);
    lc_room_free(&had);
}

void lc_host_free(lc_host *h) {
    stop_thread(h);
    lc_pool_clear(&h->pool);
    for (uint16_t i = 0; i < LC_LINKS; i++)
        free_interface(&h->interfaces[i]);
    lc_waiter_close(&h->waiter);
    lc_waiter_close(&h->caller_waiter);
    for (uint16_t i = 0; h->paths && i < h->config.processes; i++) {
        drop_room(&h->paths[i]);
        lc_seal_close(h->paths[i].seal);
    }
    lc_page_close(h);
    free(h->paths);
    free(h->late_fins);
    free(h->restorer);
    free(h->unsealed);
    free(h->uplink_ranks);
    lc_oob_close(h->oob);
    pthread_mutex_destroy(&h->driving);
    pthread_mutex_destroy(&h->lock);
    pthread_mutex_destroy(&h->pool_lock);
    pthread_cond_destroy(&h->admitted);
    free(h);
}

/* Large packets are worth a copy less than the time that it takes to hear of the peer. */
static int make_cells(const lc_host *h, lc_interface *via) {
    via->cell_payload = via->payload_bytes;
    if (via->payload_bytes > h->config.payload_bytes && via->cell_payload > CELL_PAYLOAD)
        via->cell_payload = CELL_PAYLOAD;
    if (h->config.processes < 2)
        return 1;
    return lc_cells_make(&via->cells, h->config.eager_bytes, (uint16_t)via->cell_payload);
}

static int make_interface(const lc_host *h, lc_interface *via, const lc_link *link) {
    size_t packets = (size_t)LC_BATCH_RUNS * LC_RUN_PACKETS;
    via->payload_bytes = h->config.payload_bytes;
    if (link && link->payload_bytes)
        via->payload_bytes = link->payload_bytes;
    via->control_bytes = via->payload_bytes;
    if (link && link->head_max && lc_control_room(via) > link->head_max)
        via->control_bytes = link->head_max - 2 * LC_HEADER_BYTES;
    via->paths = calloc(h->config.processes, sizeof(lc_path *));
    via->flights = calloc(LC_FLIGHTS, sizeof *via->flights);
    via->iov = calloc(2 * packets, sizeof *via->iov);
    via->headers = calloc(packets, LC_HEADER_BYTES);
    via->contents = calloc(packets, sizeof *via->contents);
    via->records_out = calloc(LC_BATCH_RUNS, lc_control_room(via));
    return via->paths && via->flights && via->iov && via->headers && via->contents &&
           via->records_out && make_cells(h, via);
}

static int make_interfaces(lc_host *h, const lc_setting *setting) {
    h->n_interfaces = setting->n_links ? setting->n_links : 1;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        if (!make_interface(h, &h->interfaces[i], setting->n_links ? setting->links[i] : NULL))
            return 0;
    h->late_fins = calloc(LC_LATE_FINS, sizeof *h->late_fins);
    h->restorer = calloc(1, sizeof *h->restorer);
    return h->late_fins && h->restorer;
}

/* ---- opening ---- */

static void refuse(lc_failure *failure, int code) {
    *failure = (lc_failure){.code = code, .peer = -1};
}

/* Whether a link carries the packets that are meant for it. */
static int fits(const lc_host *h, const lc_link *link, uint16_t number, lc_failure *failure) {
    uint32_t bytes = lc_wire_bytes_max(&h->interfaces[number]);
    if (bytes <= link->packet_max)
        return 1;
    refuse(failure, LC_E_ARGUMENT);
    failure->mine[0] = bytes;
    failure->theirs[0] = link->packet_max;
    failure->theirs[1] = number;
    return 0;
}

/* The links that are given belong to the host if all of them can be used. */
static void take_links(lc_host *h, const lc_setting *setting, lc_failure *failure) {
    for (uint16_t i = 0; i < setting->n_links; i++)
        if (!fits(h, setting->links[i], i, failure))
            return;
    for (uint16_t i = 0; i < setting->n_links; i++)
        h->interfaces[i].link = setting->links[i];
}

/* Sets failure->code to LC_OK if it could. */
static void open_links(lc_host *h, const lc_host_config *config, const lc_setting *setting,
                       lc_failure *failure) {
    refuse(failure, LC_E_SYSTEM);
    if (!lc_waiter_open(&h->waiter) || !lc_waiter_open(&h->caller_waiter)) {
        failure->sys_errno = errno;
        return;
    }
    refuse(failure, LC_OK);
    if (setting->n_links) {
        take_links(h, setting, failure);
        return;
    }
    h->interfaces[0].link = lc_link_open(config, h->clock, failure);
    if (h->interfaces[0].link)
        fits(h, h->interfaces[0].link, 0, failure);
}

static uint64_t key_of_text(const char *text) {
    uint64_t key = 0;
    for (; *text; text++)
        key = lc_mix(key ^ (uint8_t)*text);
    return key;
}

/* Before any other process looks there. */
static void put_key(const lc_host *h, const lc_interface *via) {
    for (int i = 0; i < LC_UPLINKS && via->link->board; i++)
        atomic_store(&via->link->board[i].key, h->address_key);
}

lc_host *lc_host_open_in(const lc_host_config *config, const lc_setting *setting,
                         lc_failure *failure) {
    refuse(failure, LC_E_ARGUMENT);
    if (!config_ok(config) || setting->n_links > LC_LINKS)
        return NULL;
    refuse(failure, LC_E_MEMORY);
    lc_host *h = calloc(1, sizeof *h);
    if (!h)
        return NULL;
    h->config = *config;
    h->waiter.wake_fd = h->caller_waiter.wake_fd = -1;
    h->clock = setting->clock;
    h->forks = lc_forks();
    h->threadless = setting->n_links > 0;
    pthread_mutex_init(&h->driving, NULL);
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->pool_lock, NULL);
    pthread_cond_init(&h->admitted, NULL);
    lc_rate_init(&h->rate, config->pace_bytes_per_s, lc_clock_now(h->clock));
    h->paths = calloc(config->processes, sizeof *h->paths);
    if (make_interfaces(h, setting) && h->paths)
        open_links(h, config, setting, failure);
    if (failure->code != LC_OK) {
        lc_host_free(h);
        return NULL;
    }
    h->address_key = key_of_text(config->address);
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        put_key(h, &h->interfaces[i]);
    h->config.address = NULL; /* what the caller points to is not kept */
    return h;
}

lc_host *lc_host_open(const lc_host_config *config, lc_failure *failure) {
    const lc_setting real = {.clock = &lc_system_clock};
    return lc_host_open_in(config, &real, failure);
}

int lc_host_share(lc_host *h, const uint16_t *processes, uint16_t n, int descriptors[2],
                  lc_failure *failure) {
    refuse(failure, LC_E_ARGUMENT);
    if (h->running || h->threadless || h->n_interfaces != 1)
        return failure->code;
    lc_interface *via = &h->interfaces[SHARED_MEMORY];
    via->link = lc_shm_open(&h->config, processes, n, h->clock, descriptors, failure);
    if (via->link && !make_interface(h, via, via->link))
        refuse(failure, LC_E_MEMORY);
    if (failure->code == LC_OK) {
        h->n_interfaces = SHARED_MEMORY + 1;
        put_key(h, via);
    } else
        free_interface(via);
    return failure->code;
}

int lc_host_verbs(lc_host *h, lc_verbs_port *port, lc_failure *failure) {
    lc_link *link = (lc_link *)(void *)port;
    refuse(failure, LC_E_ARGUMENT);
    if (h->running || h->threadless || h->n_interfaces == LC_LINKS)
        return failure->code;
    uint16_t number = h->n_interfaces;
    lc_interface *via = &h->interfaces[number];
    if (!make_interface(h, via, link)) {
        refuse(failure, LC_E_MEMORY);
    } else if (fits(h, link, number, failure)) {
        via->link = link;
        h->n_interfaces++;
        return number;
    }
    free_interface(via);
    return failure->code;
}

/* ---- sealing ---- */

static int seal_interface(lc_host *h, lc_interface *via, uint16_t number, lc_failure *failure) {
    via->tag_bytes = LC_TAG_BYTES;
    if (!fits(h, via->link, number, failure))
        return failure->code;
    uint32_t most = lc_wire_bytes_max(via) + LC_SIZE_PIECES * lc_head_bytes(via);
    via->sealed_room = most > LC_RUN_BYTES ? most : LC_RUN_BYTES;
    via->sealed = malloc((size_t)LC_BATCH_RUNS * via->sealed_room);
    return via->sealed ? LC_OK : LC_E_MEMORY;
}

static int seal_paths(lc_host *h, const uint8_t *secrets) {
    if (!secrets)
        return LC_OK;
    for (uint16_t i = 0; i < h->config.processes; i++) {
        if (i == h->config.process)
            continue;
        h->paths[i].seal = lc_seal_open(&h->sealing, secrets + (size_t)2 * LC_SECRET_BYTES * i);
        if (!h->paths[i].seal)
            return LC_E_MEMORY;
    }
    return LC_OK;
}

int lc_host_seal(lc_host *h, const lc_seal_config *config, lc_failure *failure) {
    refuse(failure, LC_E_ARGUMENT);
    if (h->running || h->unsealed || config->cipher <= LC_CIPHER_NONE ||
        config->cipher >= LC_CIPHERS)
        return failure->code;
    refuse(failure, LC_E_CRYPTO);
    if (!lc_crypto_has(config->cipher))
        return failure->code;
    refuse(failure, LC_E_MEMORY);
    h->unsealed = malloc(LC_DATAGRAM_BYTES);
    if (!h->unsealed)
        return failure->code;
    h->sealing.cipher = config->cipher;
    h->sealing.clear = config->clear;
    h->sealing.filter = config->filter;
    h->sealing.rekey_ns = config->rekey_ns;
    refuse(failure, seal_paths(h, config->secrets));
    for (uint16_t i = 0; i < h->n_interfaces && failure->code == LC_OK; i++) {
        lc_interface *via = &h->interfaces[i];
        if (!via->link->local) /* what stays in this machine's memory nobody else can read */
            failure->code = seal_interface(h, via, i, failure);
    }
    return failure->code;
}

void lc_host_rekey(lc_host *h) {
    atomic_fetch_add(&h->sealing.rekeys, 1);
}

uint64_t lc_host_pulse(lc_host *h, uint16_t process) {
    if (process >= h->config.processes || process == h->config.process)
        return 0;
    atomic_store(&h->paths[process].pulse_asked, 1);
    return atomic_load(&h->paths[process].pulse_ns);
}

/* ---- starting ---- */

/* Signals are Python's to handle: the thread takes none. */
static int start_thread(lc_host *h) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&h->thread, NULL, lc_progress, h);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return LC_E_SYSTEM;
    (void)pthread_setname_np(h->thread, "lossycoll");
    return LC_OK;
}

static int set_address(lc_host *h, lc_path *p, const lc_address *address) {
    if (address->link >= h->n_interfaces)
        return LC_E_ARGUMENT;
    int is_own = p == &h->paths[h->config.process];
    drop_room(p); /* of a start that failed, */
    if (p->interface)
        p->interface = NULL; /* perhaps with another link */
    if (address->absent)
        return is_own ? LC_E_ARGUMENT : LC_OK;
    lc_path_begin(h, p, &h->interfaces[address->link], lc_clock_now(h->clock));
    lc_room room = {.records = NULL};
    if (!is_own && lc_room_make(&room, p->interface) != LC_OK)
        return LC_E_MEMORY;
    lc_path_exchange(p, &room);
    return lc_path_reach(h, p, address);
}

/* Where processes come and go there are numbers for many more than send to one at a time. Should
 * so many do, packets find no cell and are lost like others. */
static void share_cells(const lc_host *h, lc_interface *via, int come_and_go) {
    uint32_t senders = h->config.processes - 1u;
    if (come_and_go && senders > SENDERS)
        senders = SENDERS;
    via->eager = senders ? via->cells.n_cells / senders : 0;
}

/* How many processes are reached through this machine's memory, or in other ways. */
static uint32_t paths_of(const lc_host *h, int local) {
    uint32_t n = 0;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        n += !h->interfaces[i].link->local == !local ? h->interfaces[i].n_paths : 0;
    return n;
}

/* How many cores this machine has for each process that shares its memory. */
static double cores_each(const lc_host *h) {
    double cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
    return cores >= 1 ? cores / (1 + paths_of(h, 1)) : 1;
}

static uint64_t spin_of(const lc_host *h) {
    if (cores_each(h) < 2)
        return SHORT_SPIN_NS;
    return paths_of(h, 0) ? SPIN_NS : LOCAL_SPIN_NS;
}

/* Of a host whose clock is virtual it is no property of this machine. */
static double row_rate(const lc_host *h) {
    if (h->threadless)
        return VIRTUAL_ROW_RATE;
    double share = cores_each(h) < 1 ? cores_each(h) : 1;
    return lc_gf_of(!(h->config.disable & LC_SIMD))->row_rate * share;
}

void lc_host_crowded(lc_host *h) {
    h->crowded_until_ns = UINT64_MAX;
}

/* Anew, after a start that failed. */
static void begin_interface(const lc_host *h, lc_interface *via) {
    via->n_paths = 0;
    via->paces_port = h->config.paces_port;
    for (int i = 0; i < LC_UPLINKS; i++) {
        via->exits[i].n_paths = 0;
        lc_uplink_init(&via->exits[i].uplink, lc_clock_now(h->clock));
    }
}

/* Each host begins with another one, so that no receiver has all of them at once. */
static uint16_t begins_with(const lc_host *h, const lc_interface *via) {
    uint16_t lower = 0;
    while (lower < via->n_paths && via->paths[lower]->number < h->config.process)
        lower++;
    return lower < via->n_paths ? lower : 0;
}

/* The socket's uplinks are those of all who share this machine's memory and send from its address.
 */
static int share_uplinks(lc_host *h) {
    lc_uplink_board *own = NULL;
    const lc_uplink_board *boards[LC_UPLINK_RANKS];
    uint32_t n = 0;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        own = h->interfaces[i].link->board ? h->interfaces[i].link->board : own;
    for (uint16_t i = 0; i < h->config.processes && own && n < LC_UPLINK_RANKS; i++) {
        const lc_interface *via = h->paths[i].interface;
        if (i == h->config.process || !via || !via->link->local)
            continue;
        boards[n] = lc_link_board(via->link, i);
        n += boards[n] != NULL;
    }
    if (!n)
        return LC_OK;
    free(h->uplink_ranks);
    h->uplink_ranks = calloc(LC_UPLINKS * (size_t)n, sizeof *h->uplink_ranks);
    if (!h->uplink_ranks)
        return LC_E_MEMORY;
    for (int i = 0; i < LC_UPLINKS; i++) {
        lc_uplink_share(&h->interfaces[0].exits[i].uplink, own + i, h->uplink_ranks + i * n, boards,
                        n);
        for (uint32_t k = 0; k < n; k++)
            boards[k]++;
    }
    return LC_OK;
}

int lc_host_start(lc_host *h, uint64_t session, const lc_address *processes) {
    int code = LC_OK, come_and_go = 0;
    if (h->running)
        return LC_E_ARGUMENT;
    for (uint16_t i = 0; i < h->n_interfaces; i++)
        begin_interface(h, &h->interfaces[i]);
    for (uint16_t i = 0; i < h->config.processes && code == LC_OK; i++) {
        come_and_go |= processes[i].absent;
        code = set_address(h, &h->paths[i], &processes[i]);
    }
    if (code == LC_OK)
        code = share_uplinks(h);
    if (code != LC_OK)
        return code;
    h->session = session;
    for (uint16_t i = 0; i < h->n_interfaces; i++) {
        lc_interface *via = &h->interfaces[i];
        via->turn = via->paces_port ? begins_with(h, via) : 0;
        lc_share_credits(h, via);
        share_cells(h, via, come_and_go);
        for (uint16_t k = 0; k < via->n_paths; k++)
            via->paths[k]->tx_window = via->large_units; /* until the peer says what it can take */
        via->expect = (lc_expect){.session = session,
                                  .process = h->config.process,
                                  .processes = h->config.processes,
                                  .payload_bytes = (uint16_t)via->payload_bytes,
                                  .filter = h->sealing.filter};
    }
    h->row_rate = row_rate(h);
    h->spin_ns = spin_of(h);
    if (h->threadless)
        h->now = lc_clock_now(h->clock);
    else
        code = start_thread(h);
    h->running = code == LC_OK;
    return code;
}

/* ---- others that come and go ---- */

/* Until the loop has seen to it. */
static void hand_over(lc_host *h, lc_admission *a) {
    pthread_mutex_lock(&h->lock);
    a->next = h->admissions;
    h->admissions = a;
    pthread_mutex_unlock(&h->lock);
    atomic_fetch_or(&h->attention, LC_LOOK_ADMISSIONS);
    lc_nudge(h);
    if (h->threadless)
        lc_turn(h);
    pthread_mutex_lock(&h->lock);
    while (a->code == LC_PENDING)
        pthread_cond_wait(&h->admitted, &h->lock);
    pthread_mutex_unlock(&h->lock);
}

int lc_host_admit(lc_host *h, uint16_t process, const lc_address *address, const uint8_t *secrets) {
    int sealed = h->sealing.cipher != LC_CIPHER_NONE;
    if (!h->running || process >= h->config.processes || process == h->config.process ||
        h->n_interfaces != 1 || sealed != (address ? secrets != NULL : sealed))
        return LC_E_ARGUMENT;
    lc_admission a = {.process = process, .address = address, .code = LC_PENDING};
    if (address && sealed) {
        a.seal = lc_seal_open(&h->sealing, secrets);
        if (!a.seal)
            return LC_E_MEMORY;
    }
    if (address && lc_room_make(&a.room, &h->interfaces[0]) != LC_OK)
        a.code = LC_E_MEMORY;
    else
        hand_over(h, &a);
    lc_seal_close(a.seal); /* the former one, or that of an admission that failed */
    lc_room_free(&a.room);
    return a.code;
}

/* ---- what it tells of its links ---- */

int lc_host_link(lc_host *h, uint16_t number, lc_link_info *info) {
    if (number >= h->n_interfaces)
        return LC_E_ARGUMENT;
    lc_link_info_of(h->interfaces[number].link, info);
    return LC_OK;
}

int lc_host_wakers(lc_host *h, int32_t descriptors[2]) {
    descriptors[0] = fcntl(h->waiter.wake_fd, F_DUPFD_CLOEXEC, 0);
    descriptors[1] = fcntl(h->caller_waiter.wake_fd, F_DUPFD_CLOEXEC, 0);
    if (descriptors[0] >= 0 && descriptors[1] >= 0)
        return LC_OK;
    for (int i = 0; i < 2; i++)
        if (descriptors[i] >= 0)
            close(descriptors[i]);
    return LC_E_SYSTEM;
}

int lc_host_event(lc_host *h, lc_event *event) {
    pthread_mutex_lock(&h->lock);
    int found = h->events_in != h->events_out;
    if (found)
        *event = h->events[h->events_out++ % LC_EVENTS];
    pthread_mutex_unlock(&h->lock);
    return found;
}

/* ---- by hand ---- */

int lc_host_turn(lc_host *h) {
    return lc_turn(h);
}

uint64_t lc_host_idle_ns(lc_host *h) {
    return lc_idle_ns(h);
}
