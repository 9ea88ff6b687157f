/* The laboratory's switch without its devices: frames cut and joined at random are the same packets
 * afterwards; links and queues do what was asked; hostile frames are refused. */
#define _GNU_SOURCE
#include "check.h"
#include "frame.h"
#include "paths.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/virtio_net.h>

enum { IP = 24, PACKETS = 4096, SEGMENT = 1448 };

static uint64_t state = 1;
static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}
static uint32_t get16(const uint8_t *at) {
    return (uint32_t)at[0] << 8 | at[1];
}
static void put16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}
static uint32_t sum(const uint8_t *at, uint32_t bytes) {
    uint32_t out = 0;
    for (uint32_t i = 0; i < bytes; i += 2)
        out += get16(at + i);
    while (out >> 16)
        out = (out & 0xffff) + (out >> 16);
    return out;
}

/* A frame as the kernel would hand it over; its payload counts up from ``first``. */
static lab_frame *make_frame(lab_store *store, int udp, uint32_t payload, uint32_t segment,
                             uint32_t first) {
    uint32_t below = udp ? 8 : 32, head = IP + 20 + below;
    lab_frame *frame = lab_frame_new(store, head + payload);
    uint8_t *data = frame->data, *ip = data + IP, *transport = ip + 20;
    memset(data, 0, head);
    struct virtio_net_hdr virtio = {.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM,
                                    .hdr_len = (uint16_t)(head - 10),
                                    .csum_start = 34,
                                    .csum_offset = udp ? 6 : 16};
    if (payload > segment) {
        virtio.gso_type = udp ? 5 : 1;
        virtio.gso_size = (uint16_t)segment;
    }
    memcpy(data, &virtio, sizeof virtio);
    put16(data + IP - 2, 0x0800);
    ip[0] = 0x45;
    ip[8] = 64;
    ip[9] = udp ? 17 : 6;
    memcpy(ip + 12, "\x0a\x4d\x00\x01\x0a\x4d\x00\x02", 8);
    put16(ip + 2, 20 + below + payload);
    put16(ip + 10, ~sum(ip, 20));
    put16(transport, 5000);
    put16(transport + 2, 6000);
    if (udp) {
        put16(transport + 4, 8 + payload);
    } else {
        put16(transport + 4, first >> 16);
        put16(transport + 6, first);
        transport[12] = 0x80;
        transport[13] = 0x18; /* PSH, ACK */
    }
    for (uint32_t i = 0; i < payload; i++)
        data[head + i] = (uint8_t)((first + i) * 2654435761u >> 24);
    frame->length = head + payload;
    return frame;
}

/* What a host saw: payload bytes in order, and how many packets. */
typedef struct {
    uint8_t bytes[1 << 20];
    uint32_t length, packets, last_flags;
} host;

static host expected, got;

static void take_in(host *to, const uint8_t *data, uint32_t length) {
    struct virtio_net_hdr virtio;
    memcpy(&virtio, data, sizeof virtio);
    const uint8_t *ip = data + IP, *transport = ip + 20;
    int udp = ip[9] == 17;
    uint32_t head = IP + 20 + (udp ? 8 : 32), payload = length - head;
    CHECK(get16(ip + 2) == length - IP);
    CHECK(sum(ip, 20) == 0xffff);
    if (udp)
        CHECK(get16(transport + 4) == 8 + payload);
    if (virtio.gso_type) {
        CHECK((virtio.gso_type & 0x7f) == (udp ? 5 : 1));
        CHECK(payload > virtio.gso_size);
        to->packets += (payload + virtio.gso_size - 1) / virtio.gso_size;
    } else {
        to->packets++;
    }
    memcpy(to->bytes + to->length, data + head, payload);
    to->length += payload;
    to->last_flags = transport[13];
}

static void test_cut_and_joined(int udp) {
    lab_store store = {0};
    int ends[2];
    if (!CHECK(!socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, ends)))
        return;
    for (int round = 0; round < 400; round++) {
        expected.length = expected.packets = got.length = got.packets = 0;
        uint32_t first = draw(1u << 30), frames = 1 + draw(4);
        uint32_t head = IP + 20 + (udp ? 8 : 32);
        lab_run run = {0};
        uint8_t data[FRAME_MAX];
        for (uint32_t f = 0; f < frames; f++) {
            uint32_t payload = 1 + draw(round % 2 ? 3 * SEGMENT : 60000);
            lab_frame *frame = make_frame(&store, udp, payload, SEGMENT, first);
            first += payload;
            CHECK(!lab_frame_read(frame));
            CHECK(frame->packets == (payload + SEGMENT - 1) / SEGMENT);
            for (uint32_t at = 0; at < frame->packets;) {
                uint32_t count = 1 + draw((uint32_t)frame->packets - at);
                lab_train train = {
                    .frame = frame, .first = (uint16_t)at, .packets = (uint16_t)count, .to = 1};
                at += count;
                if (draw(5) == 0)
                    continue; /* lost */
                expected.packets += count;
                uint32_t skip = head + train.first * SEGMENT, bytes = count * SEGMENT;
                if (skip + bytes > frame->length)
                    bytes = frame->length - skip;
                memcpy(expected.bytes + expected.length, frame->data + skip, bytes);
                expected.length += bytes;
                lab_frame_keep(frame, 1);
                while (!lab_run_add(&run, &train)) {
                    CHECK(!lab_run_write(ends[0], &run));
                    take_in(&got, data, (uint32_t)read(ends[1], data, sizeof data));
                    for (uint32_t i = 0; i < run.count; i++)
                        lab_frame_drop(&store, run.train[i].frame);
                    run = (lab_run){0};
                }
            }
            lab_frame_drop(&store, frame);
        }
        if (run.count) {
            CHECK(!lab_run_write(ends[0], &run));
            take_in(&got, data, (uint32_t)read(ends[1], data, sizeof data));
            for (uint32_t i = 0; i < run.count; i++)
                lab_frame_drop(&store, run.train[i].frame);
        }
        CHECK_AT(got.packets == expected.packets && got.length == expected.length &&
                     !memcmp(got.bytes, expected.bytes, got.length),
                 "round %d: %u packets of %u", round, got.packets, expected.packets);
    }
    CHECK(store.bytes == 0);
    lab_store_free(&store);
    close(ends[0]);
    close(ends[1]);
}

/* Only the last packet of an aggregate has its PSH; what is in front of it doesn't. */
static void test_flags(void) {
    lab_store store = {0};
    int ends[2];
    if (!CHECK(!socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, ends)))
        return;
    lab_frame *frame = make_frame(&store, 0, 4 * SEGMENT, SEGMENT, 100);
    CHECK(!lab_frame_read(frame));
    uint8_t data[FRAME_MAX];
    for (uint16_t first = 0; first < 4; first += 2) {
        lab_run run = {0};
        lab_train train = {.frame = frame, .first = first, .packets = 2};
        CHECK(lab_run_add(&run, &train));
        CHECK(!lab_run_write(ends[0], &run));
        CHECK(read(ends[1], data, sizeof data) > 0);
        CHECK(data[IP + 20 + 13] == (first ? 0x18 : 0x10));
        CHECK(get16(data + IP + 20 + 6) == 100u + first * SEGMENT);
    }
    lab_frame_drop(&store, frame);
    lab_store_free(&store);
    close(ends[0]);
    close(ends[1]);
}

static void test_hostile(void) {
    lab_store store = {0};
    uint32_t refused = 0;
    for (int round = 0; round < 40000; round++) {
        lab_frame *frame = make_frame(&store, round & 1, 1 + draw(2000), 1 + draw(1500), 7);
        for (uint32_t i = 0; i < 3; i++)
            frame->data[draw(60)] = (uint8_t)draw(256);
        frame->length = draw(frame->length + 1);
        if (lab_frame_read(frame)) {
            refused++;
        } else {
            CHECK(frame->packets >= 1 && frame->head <= frame->length);
            uint32_t last = frame->packets - 1u;
            CHECK(lab_payload(frame, last, 1) <= frame->length - frame->head);
        }
        lab_frame_drop(&store, frame);
    }
    CHECK(refused > 1000 && refused < 39000);
    lab_store_free(&store);
}

/* ---- paths ---- */

static lab_shared shared;
static lab_paths paths;

/* Sends ``frames`` aggregates of ``count`` packets ``every`` ns; returns how many packets came, and
 * when the last did. */
static uint64_t send_all(uint32_t frames, uint32_t count, int64_t every, int64_t *last) {
    uint64_t came = 0;
    int64_t next;
    lab_train train;
    for (uint32_t f = 0; f < frames; f++) {
        int64_t now = f * every;
        lab_frame *frame = make_frame(&paths.store, 1, count * SEGMENT, SEGMENT, 0);
        CHECK(!lab_frame_read(frame));
        lab_paths_enter(&paths, frame, 0, 1, now);
        int64_t until = f + 1 == frames ? INT64_MAX : now;
        while (lab_paths_due(&paths, until, &train, &next)) {
            came += train.packets;
            *last = train.at;
            lab_frame_drop(&paths.store, train.frame);
        }
    }
    return came;
}

/* One frame of ``count`` packets from one host to another. */
static void send_one(uint32_t from, uint32_t to, uint32_t count, int64_t now) {
    lab_frame *frame = make_frame(&paths.store, 1, count * SEGMENT, SEGMENT, 0);
    CHECK(!lab_frame_read(frame));
    lab_paths_enter(&paths, frame, from, to, now);
}

static lab_link *fresh(uint64_t seed) {
    memset(&shared, 0, sizeof shared);
    shared.hosts = 2;
    shared.seed = seed;
    return shared.link + 1;
}

static void test_loss(double loss, double burst) {
    lab_link *link = fresh(1);
    link->go_on = burst > 1 ? 1 - 1 / burst : loss;
    link->begin = burst > 1 ? loss / burst / (1 - loss) : loss;
    lab_paths_init(&paths, &shared);
    int64_t last = 0;
    const double n = 40.0 * 10000;
    uint64_t came = send_all(10000, 40, 1000, &last);
    const lab_link_counts *counts = shared.link_counts + 1;
    CHECK(counts->offered == 400000 && came + counts->lost == 400000);
    double sigma = sqrt(loss * (1 - loss) * (2 * burst - 1) / n);
    CHECK_AT(fabs((double)counts->lost / n - loss) < 4 * sigma, "loss %g: %g", loss,
             (double)counts->lost / n);
    double mean = (double)counts->lost / (double)counts->bursts;
    double wanted = burst > 1 ? burst : 1 / (1 - loss);
    CHECK_AT(fabs(mean - wanted) < 0.1 * wanted, "burst %g: %g", wanted, mean);
    lab_paths_free(&paths);
}

/* Packets far apart are lost as seldom as bursts begin: none of them belongs to the one before. */
static void test_a_burst_ends_in_a_pause(void) {
    lab_link *link = fresh(1);
    link->go_on = 0.9;
    link->begin = 0.1;
    for (int far = 0; far < 2; far++) {
        lab_paths_init(&paths, &shared);
        memset(shared.link_counts, 0, sizeof shared.link_counts);
        int64_t last = 0;
        send_all(10000, 1, far ? 200000000 : 1000000, &last);
        double lost = (double)shared.link_counts[1].lost / 10000;
        double wanted = far ? 0.1 : 0.5, sigma = far ? 0.003 : 0.015;
        CHECK_AT(fabs(lost - wanted) < 4 * sigma, "far %d: %g", far, lost);
        lab_paths_free(&paths);
    }
}

static void test_rate(void) {
    fresh(1);
    shared.up[0] = (lab_rate){.bytes_per_s = 12.5e6, .queue_bytes = 1e6};
    shared.down[1] = (lab_rate){.bytes_per_s = 6.25e6, .queue_bytes = 100e3};
    shared.link[1].delay_ns = 5e6;
    lab_paths_init(&paths, &shared);
    int64_t last = 0;
    uint64_t came = send_all(10, 40, 0, &last); /* 400 packets of 1490 bytes at once */
    double frame = SEGMENT + 42;
    CHECK(shared.up_counts[0].packets == 400 && shared.up_counts[0].dropped == 0);
    CHECK(fabs((double)shared.up_counts[0].queue_max - 400 * frame) < 2);
    CHECK(shared.down_counts[1].dropped > 0);
    CHECK(came + shared.down_counts[1].dropped == 400);
    CHECK(shared.down_counts[1].queue_max <= 100000);
    /* The downlink, the slower, is never idle from the first packet to the last. */
    double sent_ns = 8 * frame / 0.1;
    double wanted = sent_ns + 5e6 + (double)came * frame / 6.25e6 * 1e9;
    CHECK_AT(fabs((double)last - wanted) < 2e5, "%g, wanted %g", (double)last, wanted);
    lab_paths_free(&paths);
}

/* A policer lets its bucket pass at once, then what the rate fills it with, and delays nothing. */
static void test_policer(void) {
    fresh(1);
    const double frame = SEGMENT + 42;
    shared.up[0] = (lab_rate){.bytes_per_s = 1e6, .queue_bytes = 20 * frame + 1, .polices = 1};
    lab_paths_init(&paths, &shared);
    int64_t last = -1;
    const lab_rate_counts *counts = shared.up_counts;
    CHECK(send_all(1, 40, 0, &last) == 20 && last == 0);
    CHECK(counts->policed == 20 && counts->dropped == 0 && counts->packets == 40);
    CHECK(fabs((double)counts->queue_max - 20 * frame) < 2);
    /* Twice the rate for a second: half of it passes, as it comes. */
    memset(shared.up_counts, 0, sizeof shared.up_counts);
    int64_t every = (int64_t)(frame / 2e6 * 1e9);
    uint64_t sent = (uint64_t)(1e9 / (double)every);
    uint64_t came = send_all((uint32_t)sent, 1, every, &last);
    CHECK(came + counts->policed == sent && counts->dropped == 0);
    CHECK_AT(fabs((double)came - 1e6 / frame) < 22, "%g of %g", (double)came, 1e6 / frame);
    CHECK(last % every == 0);
    lab_paths_free(&paths);
}

/* Each packet is late by its own share of the spread; what is lost stays what it was. */
static void test_spread(void) {
    uint64_t lost[2];
    for (int spreads = 0; spreads < 2; spreads++) {
        lab_link *link = fresh(5);
        link->begin = link->go_on = 0.1;
        link->delay_ns = 1e6;
        link->spread_ns = spreads ? 8e6 : 0;
        lab_paths_init(&paths, &shared);
        int64_t next, least = INT64_MAX, most = 0;
        double sum = 0;
        uint64_t came = 0;
        lab_train train;
        send_one(0, 1, 40, 0);
        for (int round = 0; round < 100; round++, send_one(0, 1, 40, 0))
            while (lab_paths_due(&paths, INT64_MAX, &train, &next)) {
                least = train.at < least ? train.at : least;
                most = train.at > most ? train.at : most;
                sum += (double)train.at * train.packets;
                came += train.packets;
                lab_frame_drop(&paths.store, train.frame);
            }
        lost[spreads] = shared.link_counts[1].lost;
        double mean = sum / (double)came, wanted = spreads ? 5e6 : 1e6;
        CHECK_AT(fabs(mean - wanted) < 2e5, "mean %g, wanted %g", mean, wanted);
        CHECK(least >= 1000000 && most <= (spreads ? 9000000 : 1000000));
        CHECK(!spreads || (least < 1100000 && most > 8900000));
        lab_paths_free(&paths);
    }
    CHECK(lost[0] > 300 && lost[0] == lost[1]);
}

static void test_order(void) {
    lab_link *link = fresh(3);
    link->delay_ns = 1e7;
    link->jitter_ns = 5e6;
    lab_paths_init(&paths, &shared);
    int64_t next, before = 0, least = INT64_MAX, most = 0;
    lab_train train;
    for (int64_t now = 0; now < 2000000000; now += 100000) {
        lab_frame *frame = make_frame(&paths.store, 1, 100, SEGMENT, (uint32_t)(now / 100000));
        CHECK(!lab_frame_read(frame));
        lab_paths_enter(&paths, frame, 0, 1, now);
        int64_t delay = paths.way[1].last_at - now;
        least = delay < least ? delay : least;
        most = delay > most ? delay : most;
        while (lab_paths_due(&paths, now, &train, &next)) {
            CHECK(train.at >= before);
            before = train.at;
            lab_frame_drop(&paths.store, train.frame);
        }
    }
    /* It wanders over most of the range, and never leaves it. */
    CHECK(least >= 5000000 && least < 7000000);
    CHECK(most <= 15000000 && most > 13000000);
    lab_paths_free(&paths);
}

static void test_doubles_and_holds(void) {
    lab_link *link = fresh(5);
    link->double_ = 0.02;
    link->reorder = 0.03;
    link->hold_ns = 1e6;
    lab_paths_init(&paths, &shared);
    int64_t last = 0;
    uint64_t came = send_all(1000, 40, 1000, &last);
    const lab_link_counts *counts = shared.link_counts + 1;
    CHECK(came == 40000 + counts->doubled);
    CHECK(counts->doubled > 600 && counts->doubled < 1000);
    CHECK(counts->reordered > 1000 && counts->reordered < 1400);
    CHECK(last >= 1000000);
    lab_paths_free(&paths);
}

/* Hosts 0 and 1 are at one site, 2 and 3 at another. */
static void fresh_sites(void) {
    fresh(1);
    shared.hosts = 4;
    shared.site_of[2] = shared.site_of[3] = 1;
}

static void test_hosts_share_the_rate_of_their_site(void) {
    fresh_sites();
    const double frame = SEGMENT + 42;
    shared.site_up[0] = (lab_rate){.bytes_per_s = 12.5e6, .queue_bytes = 60 * frame + 1};
    shared.site_down[1] = (lab_rate){.bytes_per_s = 6.25e6, .queue_bytes = 1e6};
    shared.link[2].delay_ns = shared.link[LAB_HOSTS + 3].delay_ns = 5e6;
    lab_paths_init(&paths, &shared);
    send_one(0, 2, 40, 0);
    send_one(1, 3, 40, 0);
    send_one(0, 1, 40, 0);
    uint64_t came[LAB_HOSTS] = {0};
    int64_t next, last[LAB_HOSTS] = {0};
    lab_train train;
    while (lab_paths_due(&paths, INT64_MAX, &train, &next)) {
        came[train.to] += train.packets;
        last[train.to] = train.at;
        lab_frame_drop(&paths.store, train.frame);
    }
    /* What stays at the site passes neither of the gateways. */
    CHECK(came[1] == 40 && last[1] == 0);
    const lab_rate_counts *up = shared.site_up_counts, *down = shared.site_down_counts;
    CHECK(up[0].packets == 80 && up[0].bytes == (uint64_t)(80 * frame) && up[1].packets == 0);
    CHECK(up[0].dropped == 20 && came[2] + came[3] == 60);
    CHECK(down[1].packets == 60 && down[1].dropped == 0 && down[0].packets == 0);
    CHECK(shared.up_counts[0].packets == 80 && shared.down_counts[1].packets == 40);
    /* The slower of the two is never idle from the first packet to the last. */
    double wanted = frame / 12.5e6 * 1e9 + 5e6 + 60 * frame / 6.25e6 * 1e9;
    double end = (double)(last[2] > last[3] ? last[2] : last[3]);
    CHECK_AT(fabs(end - wanted) < 3e5, "%g, wanted %g", end, wanted);
    lab_paths_free(&paths);
}

/* A site's uplink serves packets as they come to it, not as their hosts were given them. */
static void test_no_host_reserves_the_uplink_of_its_site(void) {
    fresh_sites();
    shared.up[0] = (lab_rate){.bytes_per_s = 1e6, .queue_bytes = 1e6};
    shared.site_up[0] = (lab_rate){.bytes_per_s = 1e8, .queue_bytes = 1e5};
    lab_paths_init(&paths, &shared);
    send_one(0, 2, 40, 0); /* 60 ms on host 0's own uplink */
    send_one(1, 3, 1, 1000000);
    int64_t next, alone = -1;
    uint64_t came = 0;
    lab_train train;
    while (lab_paths_due(&paths, INT64_MAX, &train, &next)) {
        came += train.packets;
        if (train.to == 3)
            alone = train.at;
        lab_frame_drop(&paths.store, train.frame);
    }
    CHECK(came == 41 && shared.site_up_counts[0].dropped == 0);
    CHECK_AT(alone >= 1000000 && alone < 1200000, "%g", (double)alone);
    lab_paths_free(&paths);
}

static void test_change(void) {
    lab_link *link = fresh(1);
    link->delay_ns = 1e6;
    lab_paths_init(&paths, &shared);
    int64_t last = 0;
    CHECK(send_all(1, 2, 0, &last) == 2 && last == 1000000);
    link->delay_ns = 1e7;
    CHECK(send_all(1, 2, 0, &last) == 2 && last == 1000000); /* not in force yet */
    lab_paths_change(&paths);
    CHECK(send_all(1, 2, 0, &last) == 2 && last == 10000000);
    lab_paths_free(&paths);
}

/* -sample: two of the four losses. */
int main(int argc, char **argv) {
    int sample = check_samples(argc, argv);
    test_cut_and_joined(0);
    test_cut_and_joined(1);
    test_flags();
    test_hostile();
    if (!sample) {
        test_loss(0.01, 1);
        test_loss(0.01, 4);
    }
    test_loss(0.3, 1);
    test_loss(0.2, 8);
    test_a_burst_ends_in_a_pause();
    test_rate();
    test_policer();
    test_spread();
    test_order();
    test_doubles_and_holds();
    test_hosts_share_the_rate_of_their_site();
    test_no_host_reserves_the_uplink_of_its_site();
    test_change();
    return check_result("lab");
}
