#define _GNU_SOURCE
#include "page.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "letter.h"
#include "silence.h"

static const uint64_t WAITS_NS = 20000000; /* a call that is younger is waited for by nobody */
enum { USUAL = 16 };                       /* calls that an average is of */

static uint32_t words(uint32_t world) {
    return (world + 63) / 64;
}

static uint64_t group_bytes(uint32_t world) {
    uint64_t members = ((uint64_t)world * sizeof(uint16_t) + 7) & ~(uint64_t)7;
    return sizeof(lc_page_group) + members + words(world) * sizeof(uint64_t);
}

uint64_t lc_page_bytes(uint32_t world) {
    return sizeof(lc_page) + (uint64_t)world * sizeof(lc_page_peer) +
           LC_PAGE_GROUPS * group_bytes(world);
}

static lc_page_peer *peers_of(lc_page *page) {
    return (lc_page_peer *)(page + 1);
}

static lc_page_group *block_of(lc_page *page, uint32_t i) {
    uint8_t *first = (uint8_t *)(peers_of(page) + page->world);
    return (lc_page_group *)(first + i * group_bytes(page->world));
}

static uint16_t *members_of(lc_page_group *block) {
    return (uint16_t *)(block + 1);
}

static uint64_t *absent_of(const lc_page *page, lc_page_group *block) {
    return (uint64_t *)((uint8_t *)block + page->group_bytes) - words(page->world);
}

/* A reader that sees an even number twice, and the same one, has read nothing half written. */
static void write_begin(lc_page *page) {
    __atomic_store_n(&page->sequence, page->sequence + 1, __ATOMIC_RELAXED);
#if !defined(__SANITIZE_THREAD__) /* which refuses fences; readers are other processes */
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

static void write_end(lc_page *page) {
    __atomic_store_n(&page->sequence, page->sequence + 1, __ATOMIC_RELEASE);
}

/* ---- opening and closing ---- */

int lc_host_page(lc_host *h, int file) {
    struct stat info;
    uint64_t bytes = lc_page_bytes(h->config.processes);
    if (h->running || h->page || fstat(file, &info) || (uint64_t)info.st_size != bytes)
        return LC_E_ARGUMENT;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED)
        return LC_E_SYSTEM;
    lc_page *page = at;
    page->magic = LC_PAGE_MAGIC;
    page->version = LC_PAGE_VERSION;
    page->world = h->config.processes;
    page->process = h->config.process;
    page->groups = LC_PAGE_GROUPS;
    page->group_bytes = (uint32_t)group_bytes(page->world);
    h->page = page;
    return LC_OK;
}

void lc_page_close(lc_host *h) {
    if (h->page)
        munmap(h->page, lc_page_bytes(h->config.processes));
    h->page = NULL;
}

void lc_host_page_peer(lc_host *h, uint16_t process, int state, uint64_t heard_ns) {
    pthread_mutex_lock(&h->lock);
    if (h->page && process < h->config.processes) {
        lc_page_peer *p = &peers_of(h->page)[process];
        write_begin(h->page);
        p->state = (uint8_t)state;
        p->heartbeat_ns = lc_later(p->heartbeat_ns, heard_ns);
        write_end(h->page);
    }
    pthread_mutex_unlock(&h->lock);
}

void lc_page_open_group(lc_group *g, const char *name) {
    lc_page *page = g->host->page;
    uint32_t i = 0;
    while (page && i < LC_PAGE_GROUPS && block_of(page, i)->number)
        i++;
    if (!page)
        return;
    write_begin(page);
    if (i < LC_PAGE_GROUPS) {
        g->page = block_of(page, i);
        memset(g->page, 0, page->group_bytes);
        g->page->number = g->config.number;
        g->page->rank = g->config.rank;
        g->page->size = g->config.size;
        snprintf(g->page->name, sizeof g->page->name, "%s", name ? name : "");
        for (uint16_t process = 0; process < g->host->config.processes; process++)
            if (g->rank_of_process[process] != 0xFFFF)
                members_of(g->page)[g->rank_of_process[process]] = process;
    } else {
        page->groups_untold++;
    }
    write_end(page);
}

void lc_page_close_group(lc_group *g) {
    lc_page *page = g->host->page;
    if (!page)
        return;
    write_begin(page);
    if (g->page)
        g->page->number = 0;
    else
        page->groups_untold--;
    g->page = NULL;
    write_end(page);
}

/* ---- calls ---- */

/* The place of an operation. An older call that isn't over keeps its own: it is waited for. */
static lc_page_call *place_of(const lc_op *op) {
    lc_page_group *block = op->group->page;
    if (!op->letter) {
        lc_page_call *c = &block->calls[op->number % LC_PAGE_CALLS];
        return c->op && !c->end_ns ? NULL : c;
    }
    for (int i = 0; i < LC_PAGE_MESSAGES; i++)
        if (!block->messages[i].op)
            return &block->messages[i];
    return NULL;
}

/* Bounded, since what lies beyond isn't looked at. */
static void copy_text(char *to, const char *from) {
    size_t n = from ? strnlen(from, LC_PAGE_TEXT - 1) : 0;
    if (n)
        memcpy(to, from, n);
    to[n] = 0;
}

void lc_page_begin(lc_op *op, const char *text) {
    lc_page *page = op->group->host->page;
    lc_page_group *block = op->group->page;
    op->page = NULL;
    if (!page || !block)
        return;
    write_begin(page);
    lc_page_call *c = place_of(op);
    if (!op->letter)
        block->submitted = op->number + 1;
    if (c) {
        const struct lc_letter *letter = op->letter;
        c->op = (letter ? (uint64_t)letter->number : op->number) + 1;
        c->seq = letter ? -1 : op->call.seq;
        c->begin_ns = op->submitted_ns;
        c->end_ns = 0;
        c->bytes = letter ? letter->bytes : op->call.out_elements * op->element_bytes;
        c->peer = letter ? letter->peer : -1;
        c->receives = letter && letter->kind != LC_LETTER_SEND;
        c->failed = 0;
        copy_text(c->text, text);
        op->page = c;
    }
    write_end(page);
}

void lc_page_end(lc_op *op, uint64_t now) {
    lc_page *page = op->group->host->page;
    lc_page_call *c = op->page;
    if (!page || !c)
        return;
    op->page = NULL;
    write_begin(page);
    c->end_ns = now;
    c->failed = op->failure.code != LC_OK;
    if (op->letter) {
        c->op = 0;
    } else if (!c->failed && now > c->begin_ns) {
        uint64_t took = now - c->begin_ns, *usual = &op->group->page->usual_ns;
        *usual = *usual ? *usual - *usual / USUAL + took / USUAL : took;
    }
    write_end(page);
}

/* ---- figures ---- */

static void add_stats(lc_stats *to, const lc_stats *from) {
    uint64_t *sum = (uint64_t *)to;
    const uint64_t *part = (const uint64_t *)from;
    for (size_t i = 0; i < sizeof *to / sizeof *sum; i++)
        sum[i] += part[i];
}

/* The operation that has been waited for longest, if it has been for a while. */
static const lc_op *oldest_of(const lc_group *g) {
    const lc_op *found = NULL;
    for (uint32_t i = 0; i < LC_OPS && g->active; i++) {
        const lc_op *op = g->table[i];
        if (op && op->page && (!found || (int32_t)(op->number - found->number) < 0))
            found = op;
    }
    return found && g->host->now > found->submitted_ns + WAITS_NS ? found : NULL;
}

/* Neither its word nor its data has come. */
static void show_absent(lc_page *page, lc_group *g) {
    const lc_op *op = oldest_of(g);
    uint64_t *absent = absent_of(page, g->page);
    memset(absent, 0, words(page->world) * sizeof *absent);
    g->page->waits_op = op ? (uint64_t)op->number + 1 : 0;
    if (!op)
        return;
    for (uint16_t i = 0; i < g->config.size; i++)
        if ((op->peers[i].source || op->peers[i].dest) && !op->peers[i].ready)
            lc_bit_set(absent, i);
    for (uint32_t i = 0; i < op->n_slots; i++)
        for (uint32_t j = 0; j < op->slots[i].desc.n_sources; j++)
            if (op->slots[i].ins[j].started_ns)
                lc_bit_clear(absent, op->slots[i].ins[j].peer);
}

static void show_path(const lc_host *h, lc_page_peer *to, const lc_path *p) {
    to->packets_sent = to->packets_received = to->packets_missing = 0;
    to->silence = LC_HEARD;
    if (!p->interface)
        return;
    to->heard_ns = p->heard_ns;
    to->rtt_ns = p->pace.measure.rtt_ns;
    to->queue_ns = lc_pace_queue(&p->pace);
    to->rate = p->pace.rate * p->pace.packet_bytes;
    to->link_loss = lc_loss_share(&p->loss);
    to->link_burst = lc_loss_burst(&p->loss);
    to->link = (uint8_t)(p->interface - h->interfaces);
}

static void show_member(lc_page *page, const lc_group *g, const lc_member *m) {
    lc_page_peer *to = &peers_of(page)[m->path->number];
    to->packets_sent += m->packets_sent;
    to->packets_received += m->packets_received;
    to->packets_missing += m->packets_missing;
    enum lc_silence silence = lc_silence_of(g, m);
    if (!silence)
        return;
    to->silence = (uint8_t)silence;
    if (silence != LC_NO_DATA)
        to->link_loss = 1; /* as stats_of has it: of a dead path no loss is measured */
}

void lc_page_publish(lc_host *h) {
    lc_page *page = h->page;
    if (!page)
        return;
    write_begin(page);
    page->turn_ns = h->now;
    page->stats = h->live;
    for (uint16_t i = 0; i < h->config.processes; i++)
        if (i != h->config.process)
            show_path(h, &peers_of(page)[i], &h->paths[i]);
    for (lc_group *g = h->groups; g; g = g->next) {
        add_stats(&page->stats, &g->live);
        for (uint16_t i = 0; i < g->config.size; i++)
            if (g->members[i].path)
                show_member(page, g, &g->members[i]);
        if (g->page) {
            g->page->failed = g->broken.code;
            show_absent(page, g);
        }
    }
    write_end(page);
}
