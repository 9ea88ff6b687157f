#define _GNU_SOURCE
#include "frame.h"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include <linux/virtio_net.h>

enum { ROOMS = 3, IP = FRAME_VNET + FRAME_ETHERNET, IP_HEADER = 20, TCP = 6, UDP = 17 };
enum { GSO_TCP = 1, GSO_UDP = 5, GSO_ECN = 0x80 }; /* of struct virtio_net_hdr */
enum { TCP_FIN = 1, TCP_PSH = 8, TCP_CWR = 0x80 };
enum { PAYLOAD_MAX = 65535 - IP_HEADER - 8 };

static const uint32_t ROOM[ROOMS] = {2048, 12288, FRAME_MAX};

static uint32_t get16(const uint8_t *at) {
    return (uint32_t)at[0] << 8 | at[1];
}
static void put16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}
static uint32_t get32(const uint8_t *at) {
    return get16(at) << 16 | get16(at + 2);
}
static void put32(uint8_t *at, uint32_t value) {
    put16(at, value >> 16);
    put16(at + 2, value);
}

/* ---- memory ---- */

lab_frame *lab_frame_new(lab_store *store, uint32_t length) {
    int size = 0;
    while (size < ROOMS - 1 && ROOM[size] < length)
        size++;
    lab_frame *frame = store->idle[size];
    if (frame)
        store->idle[size] = frame->next;
    else if (!(frame = malloc(sizeof *frame + ROOM[size])))
        return NULL;
    frame->room = ROOM[size];
    frame->refs = 1;
    store->bytes += frame->room;
    return frame;
}

void lab_frame_keep(lab_frame *frame, uint32_t times) {
    frame->refs += times;
}

void lab_frame_drop(lab_store *store, lab_frame *frame) {
    if (--frame->refs)
        return;
    store->bytes -= frame->room;
    int size = 0;
    while (ROOM[size] < frame->room)
        size++;
    frame->next = store->idle[size];
    store->idle[size] = frame;
}

lab_frame *lab_frame_fit(lab_store *store, lab_frame *frame) {
    if (frame->length > ROOM[ROOMS - 2])
        return frame;
    lab_frame *small = lab_frame_new(store, frame->length);
    if (!small)
        return frame;
    small->length = frame->length;
    memcpy(small->data, frame->data, frame->length);
    lab_frame_drop(store, frame);
    return small;
}

void lab_store_free(lab_store *store) {
    for (int size = 0; size < ROOMS; size++)
        while (store->idle[size]) {
            lab_frame *frame = store->idle[size];
            store->idle[size] = frame->next;
            free(frame);
        }
}

/* ---- headers ---- */

/* Bytes up to the payload of an IPv4 packet that can be split or joined; 0 for any other. */
static uint32_t headers(const lab_frame *frame) {
    const uint8_t *data = frame->data;
    if (frame->length < IP + IP_HEADER + 8 || get16(data + IP - 2) != 0x0800)
        return 0;
    /* No options, no fragments. */
    if (data[IP] != 0x45 || get16(data + IP + 6) & 0x3fff)
        return 0;
    uint32_t head = IP + IP_HEADER + 8;
    if (data[IP + 9] == TCP) {
        if (frame->length < IP + IP_HEADER + 20)
            return 0;
        head = IP + IP_HEADER + (uint32_t)(data[IP + IP_HEADER + 12] >> 4) * 4;
        if (head < IP + IP_HEADER + 20)
            return 0;
    } else if (data[IP + 9] != UDP) {
        return 0;
    }
    /* Short packets are padded to Ethernet's least: their length is what IP says. */
    return head <= frame->length && get16(data + IP + 2) == frame->length - IP ? head : 0;
}

int lab_frame_read(lab_frame *frame) {
    struct virtio_net_hdr virtio;
    if (frame->length < IP)
        return -1;
    memcpy(&virtio, frame->data, sizeof virtio);
    uint32_t kind = virtio.gso_type & ~(uint32_t)GSO_ECN;
    frame->whole = !(virtio.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM);
    frame->head = headers(frame);
    frame->protocol = frame->head ? frame->data[IP + 9] : 0;
    frame->packets = 1;
    if (!kind) {
        /* Only datagrams are joined with others; a lone TCP packet goes as it came. */
        if (frame->protocol != UDP) {
            frame->protocol = 0;
            frame->head = frame->length;
        }
        frame->segment = frame->length - frame->head;
        return 0;
    }
    uint32_t payload = frame->length - frame->head;
    frame->segment = virtio.gso_size;
    if (!frame->protocol || !frame->segment || !payload || frame->whole ||
        kind != (frame->protocol == UDP ? GSO_UDP : GSO_TCP))
        return -1;
    frame->packets = (uint16_t)((payload + frame->segment - 1) / frame->segment);
    return 0;
}

uint32_t lab_payload(const lab_frame *frame, uint32_t first, uint32_t packets) {
    uint32_t all = frame->length - frame->head;
    uint32_t from = first * frame->segment, to = (first + packets) * frame->segment;
    return (to < all ? to : all) - from;
}

uint32_t lab_wire(const lab_frame *frame, uint32_t first, uint32_t packets) {
    return packets * (frame->head - FRAME_VNET) + lab_payload(frame, first, packets);
}

/* ---- out ---- */

/* Headers and fields that packets of one aggregate share: type of service, time to live, addresses
 * and ports. */
static int same_flow(const lab_frame *a, const lab_frame *b) {
    const uint8_t *x = a->data + IP, *y = b->data + IP;
    return x[1] == y[1] && x[8] == y[8] && !memcmp(x + 12, y + 12, 12);
}

static int joins(const lab_run *run, const lab_train *next) {
    const lab_train *last = run->train + run->count - 1;
    const lab_frame *a = run->train->frame, *z = last->frame, *b = next->frame;
    if (next->to != last->to || !a->protocol || b->protocol != a->protocol)
        return 0;
    if (a->protocol == TCP)
        return z == b && next->first == last->first + last->packets && run->count < LAB_JOINED;
    /* All but the last packet of an aggregate are of one length. */
    uint32_t bytes = lab_payload(b, next->first, next->packets);
    return !a->whole && !b->whole && z->segment == a->segment &&
           lab_payload(z, last->first, last->packets) == last->packets * z->segment &&
           (b->segment == a->segment || (next->packets == 1 && bytes < a->segment)) && bytes &&
           run->packets + next->packets <= LAB_JOINED && run->bytes + bytes <= PAYLOAD_MAX &&
           same_flow(a, b);
}

int lab_run_add(lab_run *run, const lab_train *train) {
    if (run->count && !joins(run, train))
        return 0;
    run->train[run->count++] = *train;
    run->packets += train->packets;
    run->bytes += lab_payload(train->frame, train->first, train->packets);
    return 1;
}

static uint32_t fold(uint32_t sum) {
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return sum;
}

static uint32_t sum16(const uint8_t *at, uint32_t bytes) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < bytes; i += 2)
        sum += get16(at + i);
    return sum;
}

/* The headers of ``packets`` packets of ``frame`` from ``first`` on, with ``bytes`` of payload. */
static void write_head(uint8_t *head, const lab_frame *frame, uint32_t first, uint32_t packets,
                       uint32_t bytes) {
    struct virtio_net_hdr virtio;
    memcpy(head, frame->data, frame->head);
    memcpy(&virtio, head, sizeof virtio);
    uint8_t *ip = head + IP, *transport = ip + IP_HEADER;
    uint32_t below = frame->head - IP - IP_HEADER;
    int udp = frame->protocol == UDP;
    uint8_t ecn = first ? 0 : virtio.gso_type & GSO_ECN;
    virtio.gso_type = packets > 1 ? (uint8_t)((udp ? GSO_UDP : GSO_TCP) | ecn) : 0;
    virtio.gso_size = packets > 1 ? (uint16_t)frame->segment : 0;
    virtio.hdr_len = (uint16_t)(frame->head - FRAME_VNET);
    memcpy(head, &virtio, sizeof virtio);

    put16(ip + 2, IP_HEADER + below + bytes);
    put16(ip + 4, get16(ip + 4) + first);
    put16(ip + 10, 0);
    put16(ip + 10, ~fold(sum16(ip, IP_HEADER)));
    if (udp) {
        put16(transport + 4, below + bytes);
    } else {
        put32(transport + 4, get32(transport + 4) + first * frame->segment);
        if (first)
            transport[13] &= (uint8_t)~TCP_CWR;
        if (first + packets < frame->packets)
            transport[13] &= (uint8_t)~(TCP_FIN | TCP_PSH);
    }
    /* The kernel completes the checksum from that of the pseudo header. */
    if (!frame->whole)
        put16(transport + (udp ? 6 : 16),
              fold(sum16(ip + 12, 8) + frame->protocol + below + bytes));
}

int lab_run_write(int device, const lab_run *run) {
    const lab_frame *frame = run->train->frame;
    /* Trains of TCP that join are of one frame and in order. */
    if (run->packets == frame->packets && (run->count == 1 || frame->protocol == TCP))
        return write(device, frame->data, frame->length) < 0 ? -1 : 0;
    uint8_t head[FRAME_VNET + FRAME_ETHERNET + IP_HEADER + 60];
    struct iovec parts[LAB_JOINED + 1] = {{head, frame->head}};
    for (uint32_t i = 0; i < run->count; i++) {
        const lab_train *train = run->train + i;
        uint32_t skip = train->frame->head + train->first * train->frame->segment;
        parts[i + 1] = (struct iovec){(void *)(train->frame->data + skip),
                                      lab_payload(train->frame, train->first, train->packets)};
    }
    write_head(head, frame, run->train->first, run->packets, run->bytes);
    return writev(device, parts, (int)run->count + 1) < 0 ? -1 : 0;
}
