/* Frames as a TAP device gives and takes them, and trains of packets within them.
 *
 * The kernel hands over aggregates of up to 64 KiB that stand for many packets of one flow (TSO,
 * USO). A frame is read once and never copied: what becomes of its packets is told by trains, runs
 * of packets within it. Loss, queues and delays split trains; on the way out what follows on each
 * other is joined again. */
#ifndef LAB_FRAME_H
#define LAB_FRAME_H

#include <stdint.h>

enum { FRAME_VNET = 10, FRAME_ETHERNET = 14, FRAME_MAX = FRAME_VNET + FRAME_ETHERNET + 65535 + 64 };
enum { LAB_JOINED = 64 }; /* packets in an aggregate of datagrams, which all kernels take */

typedef struct lab_frame {
    struct lab_frame *next; /* of a free list */
    uint32_t refs;
    uint32_t room;
    uint32_t length;  /* virtio header and all */
    uint32_t head;    /* virtio header, Ethernet, IP and transport header */
    uint32_t segment; /* payload bytes per packet but the last */
    uint16_t packets;
    uint8_t protocol; /* 6, 17, or 0 for what is never split or joined */
    uint8_t whole;    /* its checksum is complete: it can't be joined with others */
    uint8_t data[];
} lab_frame;

enum lab_stage { LAB_SITE_UP, LAB_SITE_DOWN, LAB_DOWN, LAB_OUT };

typedef struct {
    int64_t at; /* ns: when the packets are where they are going next */
    uint64_t order;
    lab_frame *frame;
    uint16_t first, packets; /* of the frame's */
    uint8_t from, to;
    uint8_t stage; /* what it comes to at that time: lab_stage */
} lab_train;

/* A free list per size of frames. */
typedef struct {
    lab_frame *idle[3];
    uint64_t bytes; /* in frames that are in use */
} lab_store;

lab_frame *lab_frame_new(lab_store *store, uint32_t length);
void lab_frame_keep(lab_frame *frame, uint32_t times);
void lab_frame_drop(lab_store *store, lab_frame *frame);
/* What was read into a large frame, in one that fits it; the frame itself when it does. */
lab_frame *lab_frame_fit(lab_store *store, lab_frame *frame);
void lab_store_free(lab_store *store);

/* Fills in what the headers say. Returns 0, or -1 for a frame that contradicts itself. */
int lab_frame_read(lab_frame *frame);
/* Bytes of a run of packets of a frame: payload, and as Ethernet frames. */
uint32_t lab_payload(const lab_frame *frame, uint32_t first, uint32_t packets);
uint32_t lab_wire(const lab_frame *frame, uint32_t first, uint32_t packets);

/* Trains that go out as one aggregate. */
typedef struct {
    lab_train train[LAB_JOINED];
    uint32_t count, packets, bytes; /* bytes of payload */
} lab_run;

/* Puts a train behind the others. Returns 0 when it doesn't belong there; an empty run takes any.
 */
int lab_run_add(lab_run *run, const lab_train *train);
/* Writes the run to a TAP device; returns -1 when that doesn't take it. */
int lab_run_write(int device, const lab_run *run);

#endif
