/* Limits that are promised, in virtual time: how long silence may last, what deadlines are learnt
 * from, credit of small messages one way, and what is left of a process that has gone. */
#include "check.h"
#include "deadline.h"
#include "records_in.h"
#include "state.h"
#include "virtual_net.h"

#include <string.h>

enum { RANKS = 2, PAYLOAD = 1024, PACKETS = 40, BYTES = PACKETS * PAYLOAD };

static const uint64_t US = 1000, MS = 1000000, SECOND = 1000000000;
static const uint64_t DEADLINE_NS = 2000000000, LINK_NS = 6000000000;

/* lost: share of data that its receiver drops. */
static void open_lossy(virtual_net *v, uint32_t eager_bytes, uint32_t capacity, uint64_t way_ns,
                       double lost) {
    const virtual_setup how = {.size = RANKS,
                               .payload = PAYLOAD,
                               .capacity = capacity,
                               .eager_bytes = eager_bytes,
                               .delay_ns = way_ns,
                               .group = {.inject = {.loss = lost, .seed = 1},
                                         .deadline_max_ns = DEADLINE_NS,
                                         .link_ns = LINK_NS,
                                         .met = 1}};
    virtual_open(v, &how);
    virtual_go_on(v, 100 * MS);
}

static void open_pair_of(virtual_net *v, uint32_t eager_bytes, uint32_t capacity, uint64_t way_ns) {
    open_lossy(v, eager_bytes, capacity, way_ns, 0);
}

static void open_pair(virtual_net *v, uint32_t eager_bytes) {
    open_pair_of(v, eager_bytes, 4096, 20 * US);
}

/* A copy from rank 0 to rank 1; needed: by packet, whether rank 1 needs it, or NULL. */
static int64_t submit_needed(const virtual_net *v, uint16_t rank, uint8_t *data, int reliable,
                             const uint8_t *needed) {
    const lc_edge edge = {(uint16_t)(1 - rank), 0};
    const lc_slot_desc slot = {.length = BYTES,
                               .own = rank ? LC_OWN_NONE : LC_OWN_INPUT,
                               .target = rank ? LC_TARGET_OUT : LC_TARGET_NONE,
                               .n_dests = !rank,
                               .n_sources = rank};
    lc_call call = {.slots = &slot,
                    .edges = &edge,
                    .n_slots = 1,
                    .n_edges = 1,
                    .in = data,
                    .out = data,
                    .in_elements = BYTES,
                    .out_elements = BYTES,
                    .levels = {{.elements_per_packet = PAYLOAD,
                                .reliable = (uint8_t)reliable,
                                .selective = needed != NULL}},
                    .dtype = LC_BYTES,
                    .scale = 1,
                    .needed = rank ? needed : NULL,
                    .n_needed = rank && needed ? PACKETS : 0,
                    .signature = 3};
    int64_t ticket = lc_group_submit(v->group[rank], &call);
    CHECK(ticket > 0);
    return ticket;
}

static int64_t submit(const virtual_net *v, uint16_t rank, uint8_t *data, int reliable) {
    return submit_needed(v, rank, data, reliable, NULL);
}

static int64_t post(const virtual_net *v, uint16_t rank, uint8_t *data, uint64_t bytes) {
    lc_message m = {.data = data,
                    .elements = bytes,
                    .element_bytes = 1,
                    .peer = 1 - rank,
                    .receive = (uint8_t)rank};
    int64_t ticket = lc_group_post(v->group[rank], &m);
    CHECK(ticket >= 0);
    return ticket;
}

static void cut(const virtual_net *v, int is_cut) {
    memory_path_of(v->net, 0, 1)->cut = memory_path_of(v->net, 1, 0)->cut = is_cut;
}

/* How long the call goes on, and how it ends. */
static uint64_t ends_after(virtual_net *v, uint16_t rank, int64_t ticket, lc_failure *failure,
                           lc_report *report) {
    uint64_t begin = memory_now(v->net);
    while (lc_group_result(v->group[rank], ticket, report, failure) == LC_PENDING &&
           memory_now(v->net) - begin < 10 * LINK_NS)
        virtual_go_on(v, 10 * MS);
    return memory_now(v->net) - begin;
}

/* A link that is dead is an error after link_ns, of a call and of a message alike. */
static void test_a_dead_link(int message, int started) {
    static uint8_t data[RANKS][BYTES];
    virtual_net v;
    lc_failure failure;
    lc_report report;
    open_pair(&v, 0);
    cut(&v, !started);
    int64_t ticket = message ? post(&v, 1, data[1], BYTES) : submit(&v, 1, data[1], 1);
    if (started) {
        virtual_go_on(&v, 10 * MS);
        cut(&v, 1);
    }
    uint64_t took = ends_after(&v, 1, ticket, &failure, &report);
    CHECK(failure.code == LC_E_LINK && failure.peer == 0);
    CHECK_AT(took >= LINK_NS * 9 / 10 && took < LINK_NS * 3 / 2, "message %d, started %d: %lu ms",
             message, started, (unsigned long)(took / MS));
    virtual_close(&v);
}

/* A lossy call goes on without what a silent peer has not sent for deadline_max: whether nothing
 * ever came, or the path broke in the middle. */
static void test_silence(int started) {
    static uint8_t data[RANKS][BYTES];
    virtual_net v;
    lc_failure failure;
    lc_report report;
    open_pair_of(&v, 0, PACKETS / 2, 5 * MS); /* no more than that at once */
    cut(&v, !started);
    if (started)
        (void)submit(&v, 0, data[0], 0);
    int64_t ticket = submit(&v, 1, data[1], 0);
    virtual_go_on(&v, 12 * MS); /* READY, and the first packets */
    cut(&v, 1);
    uint64_t took = ends_after(&v, 1, ticket, &failure, &report);
    CHECK(failure.code == LC_OK && report.packets_missing > 0 &&
          (report.packets_missing < PACKETS) == started);
    CHECK_AT(took >= DEADLINE_NS * 9 / 10 && took < DEADLINE_NS * 3 / 2, "started %d: %lu ms",
             started, (unsigned long)(took / MS));
    virtual_close(&v);
}

/* What a lossy call needs is resent as long as deadline_max since something came, and no longer: of
 * a peer that is heard, and of which no data comes. */
static void test_needed(int is_needed) {
    static uint8_t data[RANKS][BYTES];
    static const uint8_t needed[PACKETS] = {[3] = 1, [PACKETS - 1] = 1}, none[PACKETS];
    virtual_net v;
    lc_failure failure;
    lc_report report;
    open_lossy(&v, 0, 4096, 1 * MS, 1);
    (void)submit_needed(&v, 0, data[0], 0, needed);
    int64_t ticket = submit_needed(&v, 1, data[1], 0, is_needed ? needed : none);
    uint64_t took = ends_after(&v, 1, ticket, &failure, &report);
    CHECK(failure.code == LC_OK && report.packets_missing == PACKETS);
    CHECK_AT(is_needed ? took >= DEADLINE_NS * 9 / 10 && took < DEADLINE_NS * 3 / 2
                       : took < DEADLINE_NS / 10,
             "needed %d: %lu ms", is_needed, (unsigned long)(took / MS));
    virtual_close(&v);
}

/* A rank that takes part later than deadline_max is no reason to go on without what is needed. */
static void test_needed_of_a_late_rank(void) {
    static uint8_t data[RANKS][BYTES];
    static const uint8_t needed[PACKETS] = {[0] = 1};
    virtual_net v;
    lc_failure failure;
    lc_report report;
    open_pair(&v, 0);
    int64_t ticket = submit_needed(&v, 1, data[1], 0, needed);
    virtual_go_on(&v, 3 * DEADLINE_NS);
    CHECK(lc_group_result(v.group[1], ticket, &report, &failure) == LC_PENDING);
    (void)submit_needed(&v, 0, data[0], 0, needed);
    (void)ends_after(&v, 1, ticket, &failure, &report);
    CHECK(failure.code == LC_OK && !report.packets_missing);
    virtual_close(&v);
}

/* One stream in ten is slow. The deadline is made for those, too; not for one in fifty. */
static void test_deadlines_are_made_for_slow_streams(void) {
    static const struct {
        uint32_t one_in;
        int is_for_slow;
    } cases[] = {{10, 1}, {50, 0}};
    for (int i = 0; i < 2; i++) {
        lc_deadline d = {.n = 0};
        for (uint32_t k = 1; k <= LC_DEADLINE_SAMPLES; k++)
            lc_deadline_add(&d, k % cases[i].one_in ? 100 * US : 800 * US, 0, 100);
        uint64_t found = lc_deadline_of(&d, 100, 0, SECOND);
        CHECK_AT((found > 800 * US) == cases[i].is_for_slow, "one in %u: %lu us", cases[i].one_in,
                 (unsigned long)(found / US));
    }
}

/* Small messages one way, many times the credit in all: it comes back as often as it is used, and
 * is never given twice. */
static void test_one_way(uint64_t bytes) {
    enum { MOST = 1024, AT_ONCE = 16 };
    static uint8_t data[AT_ONCE][MOST], room[AT_ONCE][MOST];
    const uint64_t total = 12 * (uint64_t)LC_MAIL_CREDIT;
    virtual_net v;
    lc_failure failure;
    lc_report report;
    uint64_t sent = 0;
    open_pair(&v, 1 << 16);
    for (int stuck = 0; sent < total && !stuck; sent += AT_ONCE * (bytes + LC_MAIL_CHARGE)) {
        int64_t tickets[RANKS][AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            tickets[1][i] = post(&v, 1, room[i], bytes);
            memset(data[i], (int)(1 + (sent + (uint64_t)i) % 250), bytes);
            tickets[0][i] = post(&v, 0, data[i], bytes);
        }
        virtual_go_on(&v, MS);
        for (int i = 0; i < AT_ONCE * RANKS; i++) {
            int64_t ticket = tickets[i % RANKS][i / RANKS];
            lc_group *g = v.group[i % RANKS];
            for (int k = 0; ticket && k < 1000 && !stuck; k++) {
                stuck = k == 999;
                if (lc_group_result(g, ticket, &report, &failure) != LC_PENDING)
                    break;
                virtual_go_on(&v, MS);
            }
            if (ticket && !stuck)
                lc_group_release(g, ticket);
        }
        CHECK_AT(!stuck, "after %lu bytes", (unsigned long)sent);
        CHECK(stuck || memcmp(data, room, sizeof data) == 0);
        /* what may be on its way is what the receiver has room for */
        const lc_mail_peer *out = &v.group[0]->mail->peers[1], *in = &v.group[1]->mail->peers[0];
        CHECK(out->used >= in->kept && out->used <= LC_MAIL_CREDIT);
    }
    virtual_close(&v);
}

/* Packets that come ahead of their call, and find no cell, are lost like others: their sender
 * learns it, so that its figures are honest. */
static void test_no_cell(void) {
    static uint8_t data[RANKS][BYTES];
    virtual_net v;
    lc_failure failure;
    lc_report report;
    lc_stats stats;
    lc_peer_stats peer;
    open_pair(&v, 64 * PAYLOAD);
    v.host[1]->interfaces[0].eager = PACKETS / 4; /* others have the rest */
    (void)submit(&v, 0, data[0], 1);
    virtual_go_on(&v, 100 * MS);
    int64_t ticket = submit(&v, 1, data[1], 1);
    (void)ends_after(&v, 1, ticket, &failure, &report);
    virtual_go_on(&v, SECOND);
    lc_group_stats(v.group[1], &stats);
    lc_group_peer_stats(v.group[0], 1, &peer);
    CHECK(failure.code == LC_OK && stats.eager_dropped > 0 && stats.eager_kept > 0);
    const lc_path *in = v.group[1]->members[0].path;
    CHECK_AT(in->rx_next - in->rx_taken == stats.eager_dropped, "%u of %lu are told as lost",
             in->rx_next - in->rx_taken, (unsigned long)stats.eager_dropped);
    CHECK_AT(peer.link_loss > 0, "%f", peer.link_loss);
    virtual_close(&v);
}

static void count(void *context, uint16_t from, uint16_t to, const struct iovec *iov) {
    (void)to, (void)iov;
    *(int *)context += from == 0;
}

/* What a process hasn't acknowledged isn't said to the next one of its number. */
static void test_the_next_process_of_a_number(void) {
    static uint8_t data[RANKS][BYTES];
    virtual_net v;
    int told = 0;
    const lc_address next = {.port = 0};
    open_pair(&v, 0);
    lc_host *h = v.host[0];
    for (uint16_t rank = 0; rank < RANKS; rank++)
        (void)submit(&v, rank, data[rank], 0);
    virtual_go_on(&v, 30 * US); /* READY is heard, DONE won't be */
    memory_path_of(v.net, 1, 0)->cut = 1;
    virtual_go_on(&v, 10 * MS);
    CHECK(h->n_late_fins == 1);
    lc_group_close(v.group[0]);
    v.group[0] = NULL;
    memory_set_tap(v.net, count, &told);
    virtual_go_on(&v, 100 * MS);
    CHECK(told > 0);
    CHECK(lc_host_admit(h, 1, &next, NULL) == LC_OK);
    told = 0;
    virtual_go_on(&v, 10 * SECOND);
    CHECK_AT(h->n_late_fins == 0 && told == 0, "told %d times", told);
    virtual_close(&v);
}

/* A member that lies can't have a message sent which its receiver hasn't asked for: a NACK is of a
 * round, and the first sending is none. */
static void test_a_nack_of_the_first_sending(void) {
    static uint8_t data[BYTES];
    uint8_t payload[LC_RECORD_BYTES];
    const lc_record nack = {
        .kind = LC_R_NACK, .slot = LC_SLOT_MESSAGE, .b = PACKETS, .c = UINT64_MAX, .d = UINT64_MAX};
    const lc_header header = {
        .type = LC_CONTROL, .group = 1, .count = 1, .length = LC_RECORD_BYTES};
    virtual_net v;
    lc_stats stats;
    open_pair(&v, 0);
    (void)post(&v, 0, data, BYTES);
    virtual_go_on(&v, MS);
    lc_record_put(payload, &nack);
    lc_control_arrived(v.host[0], v.group[0]->members[1].path, v.group[0], &header, payload);
    virtual_go_on(&v, 100 * MS);
    lc_group_stats(v.group[0], &stats);
    CHECK(v.group[0]->live.stale == 1);
    CHECK_AT(stats.packets_sent == 0, "%lu sent", (unsigned long)stats.packets_sent);
    virtual_close(&v);
}

int main(void) {
    test_a_nack_of_the_first_sending();
    test_the_next_process_of_a_number();
    for (int i = 0; i < 4; i++)
        test_a_dead_link(i & 1, i >> 1);
    test_silence(0);
    test_silence(1);
    test_needed(0);
    test_needed(1);
    test_needed_of_a_late_rank();
    test_deadlines_are_made_for_slow_streams();
    test_one_way(64);
    test_one_way(1024);
    test_no_cell();
    return check_result("test_limits");
}
