/* Parity of messages, in virtual time: none where nothing is lost, and where something is, so much
 * that most messages need no repair. */
#include "check.h"
#include "virtual_net.h"

#include <string.h>

enum { PAYLOAD = 256, LARGE = 1 << 18, SMALL = 40000 };

static const uint64_t MS = 1000000;

static uint8_t data[LARGE], room[LARGE];

/* Returns the statistics of the sender, and of the receiver, after so many messages. */
static void talk(double loss, uint64_t bytes, int times, lc_stats *sender, lc_stats *receiver) {
    virtual_net v;
    const virtual_setup how = {.size = 2,
                               .payload = PAYLOAD,
                               .capacity = 4096,
                               .delay_ns = MS,
                               .loss = loss,
                               .group = {.deadline_max_ns = 10000 * MS, .met = 1}};
    virtual_open(&v, &how);
    for (int i = 0; i < times; i++) {
        lc_report report;
        lc_failure failure;
        lc_message m = {
            .data = room, .elements = bytes, .element_bytes = 1, .peer = 0, .receive = 1};
        int64_t receive = lc_group_post(v.group[1], &m);
        memset(data, i + 1, bytes);
        m = (lc_message){.data = data, .elements = bytes, .element_bytes = 1, .peer = 1};
        int64_t send = lc_group_post(v.group[0], &m);
        CHECK(receive > 0 && send >= 0);
        for (int k = 0; k < 100; k++)
            if (lc_group_result(v.group[1], receive, &report, &failure) == LC_PENDING)
                virtual_go_on(&v, 20 * MS);
        CHECK(lc_group_result(v.group[1], receive, &report, &failure) == LC_OK);
        CHECK(memcmp(data, room, bytes) == 0);
        virtual_go_on(&v, 20 * MS);
    }
    virtual_go_on(&v, 1000 * MS);
    lc_group_stats(v.group[0], sender);
    lc_group_stats(v.group[1], receiver);
    virtual_close(&v);
}

static double share_of_parity(const lc_stats *sender) {
    uint64_t first = sender->packets_sent - sender->packets_resent;
    return (double)sender->parity_sent / (double)(first - sender->parity_sent);
}

static void test_none_without_loss(void) {
    lc_stats sender, receiver;
    talk(0, LARGE, 10, &sender, &receiver);
    CHECK(sender.packets_sent > 10 && sender.parity_sent == 0 && sender.packets_resent == 0);
}

/* Most of what is lost comes back without a repair. */
static void test_at(double loss, uint64_t bytes, int times, double least, double most) {
    lc_stats sender, receiver;
    talk(loss, bytes, times, &sender, &receiver);
    double share = share_of_parity(&sender);
    CHECK_AT(share >= least && share <= most, "loss %g: %g of the packets are parity", loss, share);
    CHECK_AT(receiver.packets_recovered > 20 * sender.packets_resent,
             "loss %g: %lu restored, %lu resent", loss, (unsigned long)receiver.packets_recovered,
             (unsigned long)sender.packets_resent);
}

int main(void) {
    test_none_without_loss();
    test_at(0.01, LARGE, 40, 0.02, 0.15);
    test_at(0.0025, LARGE, 40, 0.01, 0.08);
    test_at(0.01, SMALL, 200, 0.02, 0.2);
    return check_result("test_message_parity");
}
