/* Packets that a path doesn't carry: what it carries is found out, follows when it changes, and
 * costs little. What would mislead it does bounded harm. In virtual time. */
#include <stdlib.h>

#include "check.h"
#include "pieces.h"
#include "slow_links.h"
#include "state.h"

enum { JUMBO = 8896, USUAL = 1408, TUNNEL = 1392, LEAST_V6 = 1252, SMALL = 672 };
enum { WANT = LC_HEADER_BYTES + USUAL, SENT = 100 };

static const slow_scenario USUALLY = {.seed = 1,
                                      .hosts = 2,
                                      .mbit = 100,
                                      .rtt_ms = 20,
                                      .queue_ms = 100,
                                      .burst = 1,
                                      .capacity = 4000,
                                      .bytes = 1048576,
                                      .ops = 4,
                                      .deep = 1,
                                      .routed = 1,
                                      .payload = USUAL};

static slow_run *open_run(const slow_scenario *s) {
    slow_run *r = calloc(1, sizeof *r);
    if (!r)
        abort();
    r->s = *s;
    slow_open_hosts(r);
    return r;
}

static void close_run(slow_run *r) {
    CHECK(!slow_is_single(r) || memory_path_of(r->v.net, 0, 1)->single);
    virtual_close(&r->v);
    free(r);
}

/* All paths; 0: any size. */
static void carry(slow_run *r, uint32_t bytes) {
    for (uint16_t i = 0; i < r->v.size; i++)
        for (uint16_t k = 0; k < r->v.size; k++)
            memory_path_of(r->v.net, i, k)->carries = bytes;
}

static const lc_packet_size *size_of(const slow_run *r, uint16_t from, uint16_t to) {
    return &r->v.host[from]->paths[to].size;
}

/* Whether the host tells of the path, once: what it carries and what is wanted. */
static int is_told(slow_run *r, uint16_t from, uint16_t to) {
    lc_event event;
    int told = 0;
    while (lc_host_event(r->v.host[from], &event))
        told += event.kind == LC_EVENT_SIZE && event.peer == to &&
                event.bytes == size_of(r, from, to)->size &&
                event.wanted == size_of(r, from, to)->want;
    return told == 1;
}

static double seconds_of(slow_run *r, uint64_t *vanished, uint64_t *missing) {
    uint64_t begin = memory_now(r->v.net);
    slow_run_ops(r);
    *missing = 0;
    for (uint32_t k = 0; k < r->ended; k++) {
        CHECK(r->ops[k].code == LC_OK);
        *missing += r->ops[k].missing;
    }
    *vanished = memory_counts_of(r->v.net).vanished;
    return 1e-9 * (double)(memory_now(r->v.net) - begin);
}

/* ---- what paths carry from the start ---- */

/* Payloads whose datagrams are full where the size is known beforehand. */
static double known_seconds(const slow_scenario *s, uint32_t carries) {
    slow_scenario known = *s;
    uint64_t vanished, missing;
    known.payload = (carries - LC_HEADER_BYTES) / 64 * 64;
    if (known.payload > s->payload)
        known.payload = s->payload;
    slow_run *r = open_run(&known);
    carry(r, carries);
    double seconds = seconds_of(r, &vanished, &missing);
    CHECK(!missing);
    close_run(r);
    return seconds;
}

static void test_smaller_paths(int sample) {
    static const struct {
        double payload;
        uint32_t carries;
    } cases[] = {{USUAL, TUNNEL}, {USUAL, LEAST_V6}, {USUAL, SMALL},
                 {JUMBO, 1472},   {JUMBO, LEAST_V6}, {JUMBO, SMALL}};
    for (uint32_t i = (uint32_t)sample; i < sizeof cases / sizeof *cases; i += 1 + 2 * sample)
        for (int delivery = SLOW_LOSSY; delivery <= SLOW_RELIABLE; delivery++) {
            slow_scenario s = USUALLY;
            uint64_t vanished, missing;
            s.payload = cases[i].payload;
            s.delivery = delivery;
            slow_run *r = open_run(&s);
            carry(r, cases[i].carries);
            double known = known_seconds(&s, cases[i].carries);
            double times = seconds_of(r, &vanished, &missing) / known;
            uint32_t size = size_of(r, 0, 1)->size;
            CHECK(vanished > 0);
            CHECK_AT(!missing, "case %u: %d missing", i, (int)missing);
            CHECK_AT(times < 1.5, "case %u, delivery %d: %.2f times", i, delivery, times);
            CHECK_AT(size <= cases[i].carries && size >= cases[i].carries * 9 / 10,
                     "case %u: size %u", i, size);
            close_run(r);
        }
}

/* Where all is carried, one attempt tells. */
static void test_a_full_path(void) {
    slow_scenario s = USUALLY;
    uint64_t vanished, missing;
    slow_run *r = open_run(&s);
    double seconds = seconds_of(r, &vanished, &missing);
    s.routed = 0;
    slow_run *plain = open_run(&s);
    double before = seconds_of(plain, &vanished, &missing);
    CHECK_AT(seconds < 1.05 * before + 0.02, "%.3f s and %.3f s", seconds, before);
    for (uint16_t i = 0; i < 2; i++) {
        CHECK(size_of(r, i, 1 - i)->size == LC_HEADER_BYTES + USUAL);
        CHECK(size_of(r, i, 1 - i)->attempts == 1 && !is_told(r, i, 1 - i));
    }
    close_run(plain);
    close_run(r);
}

/* ---- paths that change ---- */

static void run_one(slow_run *r) {
    slow_submit(r);
    while (r->ended < r->submitted) {
        slow_go_on(r, UINT64_MAX);
        slow_take_ended(r);
    }
}

static int run_again(slow_run *r) {
    r->submitted = r->ended = 0;
    r->ops[0] = (slow_op){.code = LC_OK};
    run_one(r);
    return r->ops[0].code == LC_OK;
}

/* It falls in the middle of a call, and rises again later. */
static void test_a_path_that_falls(int delivery) {
    static const uint32_t sizes[] = {LEAST_V6, SMALL};
    for (int i = 0; i < 2; i++) {
        slow_scenario s = USUALLY;
        s.delivery = delivery;
        slow_run *r = open_run(&s);
        run_one(r);
        double usual = slow_seconds(r, 0);
        slow_submit(r);
        uint64_t middle = memory_now(r->v.net) + 50 * MS;
        while (memory_now(r->v.net) < middle)
            slow_go_on(r, middle);
        CHECK(r->ended == 1);
        carry(r, sizes[i]);
        while (r->ended < r->submitted) {
            slow_go_on(r, UINT64_MAX);
            slow_take_ended(r);
        }
        CHECK(memory_counts_of(r->v.net).vanished > 0);
        CHECK(r->ops[1].code == LC_OK);
        CHECK_AT(slow_seconds(r, 1) < 3 * usual + 0.5, "%.3f s, usually %.3f", slow_seconds(r, 1),
                 usual);
        for (int k = 2; k < 9; k++)
            run_one(r);
        CHECK(size_of(r, 0, 1)->size <= sizes[i] && is_told(r, 0, 1));
        CHECK(r->ops[8].code == LC_OK && !r->ops[8].missing);
        CHECK_AT(slow_seconds(r, 8) < 1.5 * usual, "%.3f s, usually %.3f", slow_seconds(r, 8),
                 usual);
        carry(r, 0);
        uint64_t end = memory_now(r->v.net) + 5 * SECOND;
        while (memory_now(r->v.net) < end)
            run_again(r);
        CHECK(size_of(r, 0, 1)->size == LC_HEADER_BYTES + USUAL);
        close_run(r);
    }
}

/* Every now and then most of a network's ways are other ones: each change costs less than a call,
 * and larger packets are tried more and more rarely. */
static void test_a_path_that_flips(uint32_t seconds) {
    slow_scenario s = USUALLY;
    s.bytes = 262144;
    s.delivery = SLOW_RELIABLE;
    slow_run *r = open_run(&s);
    uint64_t begin = memory_now(r->v.net), calls = 0;
    while (memory_now(r->v.net) - begin < seconds * SECOND) {
        uint64_t half = (memory_now(r->v.net) - begin) / (300 * MS);
        carry(r, half % 2 ? LEAST_V6 : 0);
        CHECK(run_again(r));
        calls++;
    }
    memory_counts counts = memory_counts_of(r->v.net);
    CHECK(counts.vanished > 0);
    double share = (double)counts.vanished / (double)counts.sent;
    CHECK_AT(share < 0.02, "%.4f", share);
    CHECK_AT(calls > 10 * seconds, "%d", (int)calls);
    close_run(r);
}

/* Seconds of a first call, one at a time, of so many bytes. */
static double first_seconds(double bytes, double payload, int routed, uint32_t carries) {
    slow_scenario s = USUALLY;
    s.bytes = bytes;
    s.payload = payload;
    s.routed = routed;
    slow_run *r = open_run(&s);
    carry(r, carries);
    run_one(r);
    CHECK(r->ops[0].code == LC_OK && !r->ops[0].missing);
    CHECK(!routed || size_of(r, 0, 1)->attempts > 0);
    CHECK((memory_counts_of(r->v.net).vanished > 0) == (carries > 0 && routed));
    double seconds = slow_seconds(r, 0);
    close_run(r);
    return seconds;
}

/* To look for what a path carries adds at most a round trip to the first call. */
static void test_a_first_call(int sample) {
    static const double bytes[] = {1024, 262144, 16384, 65536, 1048576};
    static const uint32_t carries[] = {0, LEAST_V6, TUNNEL};
    for (int i = 0; i < (sample ? 2 : 5); i++)
        for (int k = 0; k < 3; k++) {
            uint32_t known = carries[k] ? (carries[k] - LC_HEADER_BYTES) / 64 * 64 : USUAL;
            /* A start takes another course with packets of another size, by up to a third. */
            double plain = fmax(first_seconds(bytes[i], known, 0, carries[k]),
                                first_seconds(bytes[i], USUAL, 0, 0));
            double added = first_seconds(bytes[i], USUAL, 1, carries[k]) - plain;
            double trips = added / (1e-3 * USUALLY.rtt_ms);
            CHECK_AT(trips <= 1, "%.0f bytes, %u carried: %.2f round trips more", bytes[i],
                     carries[k], trips);
        }
}

/* ---- what is sent together ---- */

static int single_is_told(slow_run *r, uint16_t from, uint16_t to) {
    lc_event event;
    int told = 0;
    while (lc_host_event(r->v.host[from], &event))
        told += event.kind == LC_EVENT_SINGLE && event.peer == to;
    return told == 1;
}

/* Runs vanish and single packets come: from then on all go one by one, to that host alone, and to
 * another process of its number nothing of this is known. */
static void test_what_is_sent_together(int delivery, double loss) {
    slow_scenario s = USUALLY;
    s.delivery = delivery;
    s.loss = loss;
    s.hosts = 3;
    slow_run *r = open_run(&s);
    memory_path_of(r->v.net, 0, 1)->single = 1;
    run_one(r);
    CHECK(memory_counts_of(r->v.net).vanished > 0);
    CHECK(r->ops[0].code == LC_OK && slow_seconds(r, 0) < 3);
    run_one(r);
    CHECK(r->v.host[0]->paths[1].aggregates.mode == LC_SINGLE);
    CHECK(single_is_told(r, 0, 1));
    for (uint16_t i = 0; i < 3; i++)
        for (uint16_t k = 0; k < 3; k++)
            CHECK((i == 0 && k == 1) || r->v.host[i]->paths[k].aggregates.mode == LC_TOGETHER);
    uint64_t vanished = memory_counts_of(r->v.net).vanished;
    for (int k = 0; k < 3; k++)
        CHECK(run_again(r) && (loss > 0 || !r->ops[0].missing));
    CHECK(memory_counts_of(r->v.net).vanished == vanished);
    close_run(r);
}

/* So many packets went in a run, and so many alone; so many of all came. */
static int window(lc_aggregates *a, uint32_t together, uint32_t singles, uint32_t came) {
    static uint32_t next = UINT32_MAX - 50, received = UINT32_MAX - 20; /* both wrap */
    lc_aggregates_sent(a, next, together, 1, received);
    CHECK(a->mode == LC_SINGLE || a->is_open);
    lc_aggregates_sent(a, next + together, singles, 0, received);
    next += together + singles;
    CHECK(!lc_aggregates_told(a, next - 1, received, WANT));
    return lc_aggregates_told(a, next, received += came, WANT);
}

/* Three windows of which no run came, while a single datagram as large did, are a reason to try;
 * that single packets come is one to stay with them. */
static void test_strikes(void) {
    for (int come = 0; come < 2; come++) {
        lc_aggregates a = {.size = WANT};
        CHECK(!window(&a, 16, 2, 2) && !window(&a, 16, 2, 2) && a.strikes == 2);
        CHECK(!window(&a, 16, 2, 3) && !a.strikes); /* one more came than went alone */
        CHECK(!window(&a, 16, 17, 1) && !a.strikes);
        for (int i = 0; i < 5; i++)
            CHECK(!window(&a, 16, 2, 0));
        lc_aggregates_came(&a, WANT - 1, WANT);
        CHECK(!window(&a, 16, 0, 0) && a.mode == LC_TOGETHER);
        lc_aggregates_came(&a, WANT, WANT);
        CHECK(window(&a, 16, 0, 0) && a.mode == LC_TRIED && !a.news);
        CHECK(window(&a, 16, 0, come ? 9 : 8) == !come);
        CHECK(a.mode == (come ? LC_SINGLE : LC_TOGETHER) && a.news == come);
    }
    lc_aggregates a = {.size = WANT, .mode = LC_TRIED}; /* with another size it begins again */
    CHECK(lc_aggregates_told(&a, 0, 0, WANT - 1) && a.mode == LC_TOGETHER);
}

/* ---- what would mislead it ---- */

static void forge(slow_run *r, uint16_t from, uint16_t to, uint16_t bytes) {
    uint8_t packet[LC_HEADER_BYTES + LC_RECORD_BYTES];
    const lc_record ack = {.kind = LC_R_ACK, .b = 4000};
    lc_header header = {.session = r->v.host[to]->session,
                        .slot = bytes,
                        .sender = from,
                        .receiver = to,
                        .length = LC_RECORD_BYTES,
                        .count = 1,
                        .type = LC_CONTROL};
    lc_record_put(packet + LC_HEADER_BYTES, &ack);
    header.op = lc_records_check(packet + LC_HEADER_BYTES, 1);
    lc_wire_put(packet, &header);
    memory_throw(r->v.net, from, to, packet, sizeof packet, 0);
}

static uint64_t refused(slow_run *r) {
    lc_stats stats;
    lc_group_stats(r->v.group[0], &stats);
    return stats.forged + stats.foreign + stats.malformed;
}

/* Answers of nobody: sizes stay between what every path carries and what is wanted. On sealed paths
 * they change nothing. */
static void test_forged_answers(int sealed) {
    static const uint16_t sizes[] = {1, 547, 549, 1400, LC_HEADER_BYTES + USUAL, 9000, 65535};
    slow_scenario s = USUALLY;
    s.delivery = SLOW_RELIABLE;
    s.bytes = 262144;
    s.sealed = sealed;
    slow_run *r = open_run(&s);
    carry(r, LEAST_V6);
    run_one(r);
    uint32_t before = size_of(r, 0, 1)->size;
    for (int i = 0; i < 7; i++) {
        forge(r, 0, 1, sizes[i]);
        forge(r, 1, 0, sizes[i]);
        run_one(r);
        const lc_packet_size *size = size_of(r, 0, 1);
        CHECK(size->size >= LC_SIZE_FLOOR && size->size <= LC_HEADER_BYTES + USUAL);
        CHECK(!sealed || size->size == before);
    }
    CHECK_AT(refused(r) == (sealed ? 7 : 0), "sealed %d: %d", sealed, (int)refused(r));
    run_one(r);
    for (uint32_t k = 0; k < r->ended; k++) {
        CHECK(r->ops[k].code == LC_OK);
        CHECK_AT(slow_seconds(r, k) < 2, "operation %u: %.2f s", k, slow_seconds(r, k));
    }
    CHECK(size_of(r, 0, 1)->size <= LEAST_V6);
    close_run(r);
}

/* Packets that chance takes, also many in a row, are no reason for a smaller size. */
static void test_chance(int sealed, int times) {
    for (int i = 0; i < times; i++) {
        slow_scenario s = USUALLY;
        s.sealed = sealed;
        s.seed = 1 + i;
        s.bytes /= 2;
        s.loss = 0.1 * (1 + i % 3);
        s.burst = i % 2 ? 4 : 1;
        s.delivery = i % 3;
        slow_run *r = open_run(&s);
        slow_run_ops(r);
        CHECK(memory_counts_of(r->v.net).lost > 100);
        for (uint16_t k = 0; k < 2; k++) {
            const lc_packet_size *size = size_of(r, k, 1 - k);
            CHECK_AT(size->size == size->want && !size->fell_ns,
                     "case %d, sealed %d: size %u of %u, %u tried %.3f", i, sealed, size->size,
                     size->want, size->n_tried, 1e-9 * (double)size->fell_ns);
            CHECK(!is_told(r, k, 1 - k));
        }
        close_run(r);
    }
}

/* A path that carries the size that is wanted, of which a dozen large ones have vanished. */
static lc_packet_size doubted_size(uint64_t now) {
    lc_packet_size s;
    uint32_t sizes[LC_SIZE_PROBES];
    lc_size_begin(&s, WANT, 1);
    lc_size_sent(&s, 64, 1, 1, now);
    CHECK(lc_size_probes(&s, now, 10 * MS, sizes) > 0);
    lc_size_came(&s, WANT + 1, now);
    CHECK(s.size == s.floor); /* more than was asked for is no answer */
    lc_size_came(&s, WANT, now);
    CHECK(s.size == WANT);
    lc_size_sent(&s, WANT, 12, SENT, now);
    lc_size_check(&s, now + 20 * MS, 10 * MS, now + 20 * MS, SENT);
    CHECK(s.doubt_ns != 0);
    return s;
}

/* A first attempt asks for the wanted size once; a later one three times, with others between,
 * since a burst of losses takes neighbours. */
static void test_how_often_the_wanted_size_is_asked_for(void) {
    lc_packet_size s;
    uint32_t sizes[LC_SIZE_PROBES];
    uint64_t now = 1000 * MS;
    lc_size_begin(&s, WANT, 1);
    lc_size_sent(&s, 64, 1, 1, now);
    for (uint32_t attempt = 1; attempt <= 2; attempt++) {
        uint32_t n = lc_size_probes(&s, now, 10 * MS, sizes), times = 0;
        for (uint32_t i = 0; i < n; i++) {
            times += sizes[i] == WANT;
            CHECK(!i || sizes[i] != sizes[i - 1]);
        }
        CHECK_AT(times == (attempt == 1 ? 1 : 3), "attempt %u: %u times", attempt, times);
        now = s.ask_ns;
    }
}

/* A size is given up after the last probe of it, and no sooner; one that comes ends the doubt. */
static void test_doubts(void) {
    for (uint32_t comes = 0; comes <= LC_SIZE_DOUBTS; comes++) {
        uint64_t now = 1000 * MS;
        lc_packet_size s = doubted_size(now);
        for (uint32_t probe = 1; probe <= LC_SIZE_DOUBTS; probe++) {
            uint32_t sizes[LC_SIZE_PROBES];
            now += 100 * MS;
            lc_size_check(&s, now, 10 * MS, now, SENT);
            CHECK_AT(s.size == WANT, "before probe %u: %u", probe, s.size);
            CHECK(lc_size_is_due(&s, now) == (comes == 0 || probe <= comes));
            if (!lc_size_is_due(&s, now))
                break;
            CHECK(lc_size_probes(&s, now, 10 * MS, sizes) == 2 && sizes[0] == WANT);
            if (probe == comes)
                lc_size_came(&s, WANT, now);
        }
        now += 100 * MS;
        lc_size_check(&s, now, 10 * MS, now, SENT);
        CHECK_AT((s.size == s.floor) == !comes, "%u: %u", comes, s.size);
    }
}

/* What came before a path went silent says nothing of its size; what comes beside the last probes
 * says that larger packets vanish. */
static void test_silence_is_no_size(void) {
    for (int heard = 0; heard < 2; heard++) {
        uint64_t now = 1000 * MS;
        lc_packet_size s;
        uint32_t sizes[LC_SIZE_PROBES], attempts = 0;
        lc_size_begin(&s, WANT, 1);
        lc_size_sent(&s, 64, 1, 1, now);
        lc_size_came(&s, 64, now);
        while (lc_size_is_due(&s, now) && lc_size_probes(&s, now, 10 * MS, sizes)) {
            if (heard && ++attempts == 4)
                lc_size_came(&s, 64, now);
            now += 100 * MS;
        }
        CHECK(s.size == s.floor && s.news == heard && s.is_found == heard);
    }
}

/* Probes are answered and data doesn't come, whatever the size of the stream. */
static void test_a_dead_link(int sample) {
    static const double bytes[] = {4096, 1048576, 65536, 33554432};
    for (int i = 0; i < (sample ? 2 : 4); i++) {
        slow_scenario s = USUALLY;
        s.delivery = SLOW_RELIABLE;
        s.lost_here = 1;
        s.bytes = bytes[i];
        slow_run *r = open_run(&s);
        run_one(r);
        CHECK(size_of(r, 0, 1)->size == LC_HEADER_BYTES + USUAL);
        CHECK_AT(r->ops[0].code == LC_E_LINK, "%.0f bytes: %d", bytes[i], r->ops[0].code);
        CHECK_AT(slow_seconds(r, 0) >= 60 && slow_seconds(r, 0) < 63, "%.0f bytes: %.1f s",
                 bytes[i], slow_seconds(r, 0));
        close_run(r);
    }
}

/* Nothing arrives at first, which says nothing of the path's size; then it is found, and the
 * silence isn't told as a path of small packets. */
static void test_a_path_that_is_silent_at_first(void) {
    slow_scenario s = USUALLY;
    s.delivery = SLOW_RELIABLE;
    s.bytes = 65536;
    lc_event event;
    slow_run *r = open_run(&s);
    slow_submit(r);
    memory_path_of(r->v.net, 0, 1)->cut = 1;
    while (memory_now(r->v.net) < 20 * SECOND)
        slow_go_on(r, 20 * SECOND);
    CHECK(size_of(r, 0, 1)->asked_ns > 0 && size_of(r, 0, 1)->size < USUAL);
    memory_path_of(r->v.net, 0, 1)->cut = 0;
    uint64_t end = memory_now(r->v.net) + 70 * SECOND;
    while (memory_now(r->v.net) < end) {
        slow_go_on(r, end);
        slow_take_ended(r);
        if (r->ended == r->submitted)
            CHECK(run_again(r));
    }
    CHECK(size_of(r, 0, 1)->size == LC_HEADER_BYTES + USUAL);
    while (lc_host_event(r->v.host[0], &event))
        CHECK_AT(event.kind != LC_EVENT_SIZE, "%u", event.bytes);
    close_run(r);
}

/* The switch: packets go as they are, and large ones that vanish are a dead link. */
static void test_without(void) {
    slow_scenario s = USUALLY;
    s.delivery = SLOW_RELIABLE;
    s.disable = LC_PATH_MTU;
    slow_run *r = open_run(&s);
    carry(r, LEAST_V6);
    run_one(r);
    CHECK(r->ops[0].code == LC_E_LINK && memory_counts_of(r->v.net).vanished > 256);
    close_run(r);
}

/* Numbers of packets wrap; a piece that is left from before they did is given up like any other. */
static void test_pieces_after_half_of_all_numbers(void) {
    enum { TOTAL = LC_HEADER_BYTES + 1000, HALF = TOTAL / 2 };
    static const uint8_t payload[HALF];
    const uint32_t later[] = {16, 1u << 20, 1u << 31, 0xC0000000u};
    for (int i = 0; i < 4; i++) {
        lc_pieces *pieces = lc_pieces_make(TOTAL);
        lc_header h = {.op = TOTAL, .count = 2, .length = HALF, .link_seq = 5};
        uint32_t n = 0;
        if (!CHECK(pieces))
            return;
        CHECK(!lc_pieces_take(pieces, &h, payload, &n));
        h.link_seq += later[i];
        CHECK(!lc_pieces_take(pieces, &h, payload, &n));
        lc_header late = h;
        late.link_seq -= 16;
        late.slot = 1;
        late.packet = HALF;
        CHECK(!lc_pieces_take(pieces, &late, payload, &n)); /* of one that was given up */
        h.slot = 1;
        h.packet = HALF;
        CHECK_AT(lc_pieces_take(pieces, &h, payload, &n) && n == TOTAL, "%u later", later[i]);
        free(pieces);
    }
}

/* -sample: some of it. */
int main(int argc, char **argv) {
    int sample = check_samples(argc, argv);
    test_smaller_paths(sample);
    test_a_full_path();
    test_a_first_call(sample);
    for (int delivery = sample ? SLOW_RELIABLE : SLOW_LOSSY; delivery <= SLOW_RELIABLE; delivery++)
        test_a_path_that_falls(delivery);
    test_a_path_that_flips(sample ? 10 : 60);
    for (int sealed = 0; sealed < 2; sealed++) {
        test_forged_answers(sealed);
        test_chance(sealed, sample ? 3 : 24);
    }
    test_how_often_the_wanted_size_is_asked_for();
    test_doubts();
    test_silence_is_no_size();
    for (int delivery = SLOW_LOSSY; delivery <= SLOW_RELIABLE; delivery++)
        test_what_is_sent_together(delivery, delivery == SLOW_LOSSY ? 0 : 0.05);
    test_strikes();
    test_a_dead_link(sample);
    test_a_path_that_is_silent_at_first();
    test_without();
    test_pieces_after_half_of_all_numbers();
    return check_result("test_packet_size");
}
