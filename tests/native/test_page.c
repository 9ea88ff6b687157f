/* The status page, for the sanitizers: read without a lock while calls, messages and the control
 * plane write it. What a reader takes for whole is whole. */
#define _GNU_SOURCE
#include "net.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 2, CALLS = 400, SEGMENT = 32, LETTERS = 26, MANY = LC_PAGE_GROUPS + 2 };

static int files[NET_MAX];

typedef struct {
    lc_page head;
    lc_page_peer peers[RANKS];
    lc_page_group group; /* the first; members and sets of ranks follow */
} page_start;

static void open_page(lc_host *host, uint16_t rank, uint16_t size) {
    int file = files[rank] = memfd_create("page", MFD_CLOEXEC);
    CHECK(file >= 0);
    CHECK(lc_host_page(host, file) == LC_E_ARGUMENT); /* it is empty */
    CHECK(ftruncate(file, (off_t)lc_page_bytes(size)) == 0);
    CHECK(lc_host_page(host, file) == LC_OK);
    CHECK(lc_host_page(host, file) == LC_E_ARGUMENT); /* it has one */
}

static uint32_t sequence_of(int file) {
    uint32_t found = 1;
    CHECK(pread(file, &found, sizeof found, offsetof(lc_page, sequence)) == sizeof found);
    return found;
}

/* Whether all of it is of one moment; as status_page.py does it. */
static int read_page(int file, page_start *to) {
    CHECK(pread(file, to, sizeof *to, 0) == sizeof *to);
    return to->head.sequence % 2 == 0 && sequence_of(file) == to->head.sequence;
}

static int is_whole_text(const char *text, char letter) {
    for (int i = 0; i < LC_PAGE_TEXT - 1; i++)
        if (text[i] != letter)
            return 0;
    return text[LC_PAGE_TEXT - 1] == 0;
}

static void check_page(const page_start *p) {
    const lc_page_group *g = &p->group;
    CHECK(p->head.magic == LC_PAGE_MAGIC && p->head.version == LC_PAGE_VERSION);
    CHECK(p->head.world == RANKS);
    if (!g->number)
        return;
    CHECK(g->number == NET_GROUP && g->size == RANKS);
    for (uint32_t i = 0; i < LC_PAGE_CALLS; i++) {
        const lc_page_call *c = &g->calls[i];
        if (!c->op)
            continue;
        CHECK((c->op - 1) % LC_PAGE_CALLS == i && c->op <= g->submitted);
        CHECK(c->begin_ns && (!c->end_ns || c->end_ns >= c->begin_ns));
        CHECK(c->bytes == RANKS * SEGMENT * sizeof(float) && !c->failed);
        CHECK(is_whole_text(c->text, (char)('a' + (c->op - 1) % LETTERS)));
    }
    for (uint32_t i = 0; i < LC_PAGE_MESSAGES; i++)
        CHECK(!g->messages[i].op || g->messages[i].bytes == sizeof(float));
}

/* ---- while it is written ---- */

typedef struct {
    net *n;
    uint16_t rank;
    atomic_int *over;
    uint32_t whole, torn, latest;
} worker;

static void pass_message(worker *w, float *value) {
    lc_message m = {.data = value,
                    .elements = 1,
                    .element_bytes = sizeof *value,
                    .peer = 1 - w->rank,
                    .timeout_ns = 30 * SECOND,
                    .receive = w->rank};
    int64_t ticket = lc_group_post(w->n->group[w->rank], &m);
    CHECK(ticket >= 0);
    if (ticket > 0) {
        CHECK(lc_group_wait(w->n->group[w->rank], ticket, 30 * SECOND) == LC_OK);
        lc_group_release(w->n->group[w->rank], ticket);
    }
}

static void *calling(void *argument) {
    worker *w = argument;
    float data[RANKS * SEGMENT], value = 1;
    char text[2 * LC_PAGE_TEXT] = {0};
    net_text = text;
    for (int i = 0; i < CALLS; i++) {
        memset(text, 'a' + i % LETTERS, sizeof text - 1);
        fill(data, RANKS * SEGMENT, w->rank);
        int64_t ticket = net_submit(w->n, w->rank, 0, SEGMENT, data, 1, 0, 0);
        CHECK(ticket > 0);
        CHECK(lc_group_wait(w->n->group[w->rank], ticket, 30 * SECOND) == LC_OK);
        lc_group_release(w->n->group[w->rank], ticket);
        if (i % 8 == 0)
            pass_message(w, &value);
    }
    net_text = NULL;
    return NULL;
}

static void *hearing(void *argument) {
    worker *w = argument;
    for (uint64_t i = 0; !atomic_load(w->over); i++) {
        lc_host_page_peer(w->n->host[w->rank], 1 - w->rank, (int)(i % 4), i);
        usleep(100);
    }
    return NULL;
}

static void *reading(void *argument) {
    worker *w = argument;
    page_start *page = malloc(sizeof *page);
    while (!atomic_load(w->over)) {
        if (!read_page(files[w->rank], page)) {
            w->torn++;
            continue;
        }
        check_page(page);
        CHECK(page->group.submitted >= w->latest);
        w->latest = page->group.submitted;
        w->whole++;
    }
    free(page);
    return NULL;
}

static void test_readers_need_no_lock(void) {
    net n;
    atomic_int over = 0;
    net_open(&n, RANKS, (lc_inject){0}, SECOND);
    pthread_t callers[RANKS], others[2 * RANKS];
    worker w[RANKS];
    for (uint16_t r = 0; r < RANKS; r++) {
        w[r] = (worker){.n = &n, .rank = r, .over = &over};
        CHECK(lc_host_page(n.host[r], files[r]) == LC_E_ARGUMENT); /* it has started */
        CHECK(!pthread_create(&callers[r], NULL, calling, &w[r]));
        CHECK(!pthread_create(&others[2 * r], NULL, hearing, &w[r]));
        CHECK(!pthread_create(&others[2 * r + 1], NULL, reading, &w[r]));
    }
    for (uint16_t r = 0; r < RANKS; r++)
        pthread_join(callers[r], NULL);
    atomic_store(&over, 1);
    for (int i = 0; i < 2 * RANKS; i++)
        pthread_join(others[i], NULL);
    page_start *page = malloc(sizeof *page);
    for (uint16_t r = 0; r < RANKS; r++) {
        CHECK(w[r].whole > 10);
        CHECK(read_page(files[r], page));
        check_page(page);
        CHECK(page->group.submitted == CALLS);
        lc_group_close(n.group[r]);
        CHECK(read_page(files[r], page));
        CHECK(!page->group.number); /* the block is free */
    }
    free(page);
    net_close(&n);
    for (uint16_t r = 0; r < RANKS; r++)
        close(files[r]);
}

/* ---- more groups than a page has blocks for ---- */

static void test_groups_beyond_the_page_are_counted(void) {
    net n;
    net_open(&n, RANKS, (lc_inject){0}, SECOND);
    lc_group *more[MANY];
    page_start page;
    for (uint32_t i = 0; i < MANY; i++) {
        lc_failure failure;
        lc_group_config c = {.number = NET_GROUP + 1 + i,
                             .size = RANKS,
                             .fault_group = NET_GROUP,
                             .deadline_min_ns = SECOND,
                             .deadline_max_ns = SECOND,
                             .met = 1};
        more[i] = lc_group_open(n.host[0], &c, &failure);
        CHECK(more[i] != NULL);
    }
    CHECK(read_page(files[0], &page));
    CHECK(page.head.groups_untold == MANY + 1 - LC_PAGE_GROUPS);
    for (uint32_t i = MANY; i-- > 0;)
        lc_group_close(more[i]);
    CHECK(read_page(files[0], &page));
    CHECK(page.head.groups_untold == 0);
    net_close(&n);
    for (uint16_t r = 0; r < RANKS; r++)
        close(files[r]);
}

int main(void) {
    net_opened = open_page;
    test_readers_need_no_lock();
    test_groups_beyond_the_page_are_counted();
    return check_result("test_page");
}
