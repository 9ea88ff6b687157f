/* What the groups of two processes share: the room for messages that nobody wants yet, and the way
 * there. Hosts take turns in virtual time, on links of memory whose receive buffers are small. */
#include "check.h"
#include "letter.h"
#include "link_memory.h"
#include "state.h"
#include "step.h"

#include <stdlib.h>
#include <string.h>

enum { PROCESSES = 4, GROUPS = 8, PAYLOAD = 1024, CAPACITY = 64, SMALL = 60000, LARGE = 400000 };

static const uint64_t MS = 1000000, SECOND = 1000000000;

typedef struct {
    memory_net *net;
    uint16_t n;
    lc_host *host[PROCESSES];
    lc_group *group[PROCESSES][GROUPS];
} net;

static void open_group(net *n, uint16_t process, uint32_t number) {
    lc_failure failure;
    lc_group_config c = {.number = number + 1,
                         .rank = process,
                         .size = n->n,
                         .deadline_max_ns = 5 * SECOND,
                         .met = 1};
    n->group[process][number] = lc_group_open(n->host[process], &c, &failure);
    if (!n->group[process][number])
        abort();
}

static void open_net(net *n, uint16_t processes, int n_groups) {
    lc_address nowhere[PROCESSES] = {{.port = 0}};
    lc_failure failure;
    memset(n, 0, sizeof *n);
    n->n = processes;
    n->net = memory_net_new(processes, LC_HEADER_BYTES + PAYLOAD, CAPACITY, 1);
    memory_set_now(n->net, SECOND);
    for (uint16_t i = 0; i < processes; i++) {
        for (uint16_t j = 0; j < processes; j++)
            *memory_path_of(n->net, i, j) = (memory_path){.delay_ns = MS / 10};
        lc_host_config c = {.address = "memory",
                            .process = i,
                            .processes = processes,
                            .payload_bytes = PAYLOAD,
                            .eager_bytes = 65536};
        lc_link *link = memory_link_open(n->net, i);
        lc_setting setting = {memory_clock(n->net), &link, 1};
        n->host[i] = lc_host_open_in(&c, &setting, &failure);
        if (!n->host[i] || lc_host_start(n->host[i], 1, nowhere) != LC_OK)
            abort();
        for (int k = 0; k < n_groups; k++)
            open_group(n, i, (uint32_t)k);
    }
}

static void close_net(net *n) {
    for (uint16_t i = 0; i < n->n; i++) {
        for (int k = 0; k < GROUPS; k++)
            if (n->group[i][k])
                lc_group_close(n->group[i][k]);
        lc_host_close(n->host[i]);
    }
    memory_net_free(n->net);
}

static void pass(net *n, uint64_t ns) {
    for (uint64_t end = memory_now(n->net) + ns; memory_now(n->net) < end;) {
        for (uint16_t i = 0; i < n->n; i++)
            for (int k = 0; k < 1000 && lc_host_turn(n->host[i]); k++)
                continue;
        memory_set_now(n->net, memory_now(n->net) + MS / 20);
    }
}

static int64_t post(const net *n, uint16_t process, int group, uint16_t peer, void *data,
                    uint64_t bytes, int receive) {
    lc_message m = {.data = data,
                    .elements = bytes,
                    .element_bytes = 1,
                    .peer = peer,
                    .receive = (uint8_t)receive};
    int64_t ticket = lc_group_post(n->group[process][group], &m);
    CHECK_AT(ticket >= 0, "%ld", (long)ticket);
    return ticket;
}

static int has_ended(const net *n, uint16_t process, int group, int64_t ticket) {
    lc_report report;
    lc_failure failure;
    int code = ticket ? lc_group_result(n->group[process][group], ticket, &report, &failure) : 0;
    CHECK_AT(code == LC_OK || code == LC_PENDING, "%d", code);
    return code != LC_PENDING;
}

static uint64_t kept_of(const net *n, uint16_t process, int group, uint16_t peer) {
    return n->group[process][group]->mail->peers[peer].kept;
}

/* ---- room for what nobody wants yet ---- */

static uint8_t data_of(int group, int number) {
    return (uint8_t)(1 + 32 * group + number);
}

/* Sends small messages in a group until one isn't taken over at once. */
static int send_until_full(net *n, int group, int64_t *last) {
    static uint8_t data[SMALL];
    int sent = 0;
    do {
        memset(data, data_of(group, sent), SMALL);
        *last = post(n, 0, group, 1, data, SMALL, 0);
        sent++;
    } while (*last == 0);
    pass(n, 20 * MS); /* the last one's memory has been copied */
    return sent;
}

static void receive_all(net *n, int group, int sent) {
    static uint8_t room[SMALL];
    for (int k = 0; k < sent; k++) {
        int64_t ticket = post(n, 1, group, 0, room, SMALL, 1);
        for (int i = 0; i < 1000 && !has_ended(n, 1, group, ticket); i++)
            pass(n, MS);
        CHECK_AT(has_ended(n, 1, group, ticket), "group %d, message %d", group, k);
        CHECK(room[0] == data_of(group, k) && room[SMALL - 1] == data_of(group, k));
    }
}

/* One group alone has a megabyte, all together four, and the last one still has some. */
static void test_groups_share_the_room_at_a_peer(void) {
    net n;
    int sent[GROUPS];
    int64_t last[GROUPS];
    uint64_t all = 0, before = LC_MAIL_CREDIT;
    open_net(&n, 2, GROUPS);
    for (int k = 0; k < GROUPS; k++) {
        sent[k] = send_until_full(&n, k, &last[k]);
        uint64_t kept = kept_of(&n, 1, k, 0);
        CHECK_AT(kept > 0 && kept <= before, "group %d: %lu bytes", k, (unsigned long)kept);
        CHECK(kept == (uint64_t)(sent[k] - 1) * (SMALL + LC_MAIL_CHARGE));
        all += kept;
        before = kept + SMALL + LC_MAIL_CHARGE;
    }
    CHECK(kept_of(&n, 1, 0, 0) > LC_MAIL_CREDIT - SMALL - LC_MAIL_CHARGE);
    CHECK_AT(all <= LC_MAIL_SHARES * LC_MAIL_CREDIT, "%lu bytes", (unsigned long)all);
    CHECK(n.host[1]->paths[0].mail_kept == all && n.host[0]->paths[1].mail_used == all);
    for (int k = GROUPS - 1; k >= 0; k--) {
        receive_all(&n, k, sent[k]);
        pass(&n, 10 * MS);
        CHECK(has_ended(&n, 0, k, last[k]));
    }
    CHECK(n.host[1]->paths[0].mail_kept == 0 && n.host[0]->paths[1].mail_used == 0);
    CHECK(memory_overflow(n.net, 1) == 0);
    close_net(&n);
}

/* A peer that doesn't count what it sends has what it sends ahead dropped, until there is room. */
static void test_a_peer_that_takes_more_gets_no_more(void) {
    net n;
    int sent[GROUPS];
    int64_t last;
    lc_stats stats;
    open_net(&n, 2, GROUPS);
    for (int k = 0; k < GROUPS; k++) {
        n.host[0]->paths[1].mail_used = 0;
        sent[k] = send_until_full(&n, k, &last);
        CHECK_AT(sent[k] > 16, "group %d: %d messages", k, sent[k]);
        uint64_t kept = n.host[1]->paths[0].mail_kept;
        CHECK_AT(kept <= LC_MAIL_SHARES * LC_MAIL_CREDIT, "%lu bytes", (unsigned long)kept);
    }
    lc_group_stats(n.group[1][GROUPS - 1], &stats);
    CHECK(stats.eager_dropped > 0);
    for (int k = 0; k < GROUPS; k++)
        receive_all(&n, k, sent[k]);
    close_net(&n);
}

/* Other groups' messages have left little for announcements: two are heard, and the third one once
 * there is room again. None is lost, and none comes out of order. */
static void test_groups_share_the_announcements(void) {
    enum { OTHERS = LC_MAIL_SHARES * LC_MAIL_ANNOUNCED - 8, SENT = 6, HEARD = 2 };
    net n;
    static uint8_t data[SENT][LARGE], room[LARGE];
    int64_t sends[SENT];
    open_net(&n, 2, 1);
    const lc_mail_peer *p = &n.group[1][0]->mail->peers[0];
    lc_path *path = &n.host[1]->paths[0];
    path->mail_announced = OTHERS;
    for (int k = 0; k < SENT; k++) {
        memset(data[k], k + 1, LARGE);
        sends[k] = post(&n, 0, 0, 1, data[k], LARGE, 0);
    }
    pass(&n, 300 * MS);
    CHECK_AT(p->heard == HEARD && p->announced == HEARD + 1, "%u, %u", p->heard, p->announced);
    for (int k = 0; k < SENT; k++) {
        int64_t receive = post(&n, 1, 0, 0, room, LARGE, 1);
        pass(&n, 500 * MS);
        CHECK_AT(has_ended(&n, 0, 0, sends[k]) && has_ended(&n, 1, 0, receive), "message %d", k);
        CHECK(memcmp(data[k], room, LARGE) == 0);
        CHECK_AT(p->announced <= HEARD + 1, "%u", p->announced);
    }
    CHECK(path->mail_announced == OTHERS && p->announced == 0);
    path->mail_announced = 0;
    close_net(&n);
}

/* What a rank that has left a group sent there stays, and doesn't hold up other groups. */
static void test_groups_that_were_left_take_no_room(void) {
    net n;
    int sent[GROUPS];
    int64_t last;
    open_net(&n, 2, GROUPS);
    for (int k = 0; k < GROUPS - 1; k++) {
        sent[k] = send_until_full(&n, k, &last) - 1;
        CHECK_AT(sent[k] > 16, "group %d: %d messages", k, sent[k]);
        CHECK(lc_group_unheard(n.group[0][k]) == 0);
        lc_group_peer_left(n.group[1][k], 0);
        lc_group_close(n.group[0][k]);
        n.group[0][k] = NULL;
        pass(&n, MS);
    }
    for (int k = 0; k < GROUPS - 1; k++)
        receive_all(&n, k, sent[k]);
    CHECK(n.host[1]->paths[0].mail_kept == 0 && n.host[0]->paths[1].mail_used == 0);
    close_net(&n);
}

/* So does a group that has failed, at both ends. */
static void test_groups_that_failed_take_no_room(void) {
    net n;
    int64_t last;
    open_net(&n, 2, GROUPS);
    for (int k = 0; k < GROUPS; k++) {
        CHECK(send_until_full(&n, k, &last) > 16);
        for (uint16_t i = 0; i < 2; i++)
            lc_group_abort(n.group[i][k], LC_E_ABORTED, -1);
        pass(&n, MS);
        CHECK(n.host[1]->paths[0].mail_kept == 0 && n.host[0]->paths[1].mail_used == 0);
    }
    close_net(&n);
}

/* ---- the way there ---- */

/* Several processes send large messages in all groups at once to one whose buffer holds 64 packets:
 * nothing finds it full, so nothing is lost or resent. */
static void test_groups_share_the_window_of_a_path(void) {
    net n;
    static uint8_t data[LARGE], room[PROCESSES - 1][GROUPS][LARGE];
    int64_t tickets[PROCESSES - 1][GROUPS][2];
    int ended = 0;
    memset(data, 7, LARGE);
    open_net(&n, PROCESSES, GROUPS);
    for (uint16_t i = 0; i < PROCESSES - 1; i++)
        for (int k = 0; k < GROUPS; k++) {
            uint16_t from = (uint16_t)(i + 1);
            tickets[i][k][0] = post(&n, 0, k, from, room[i][k], LARGE, 1);
            tickets[i][k][1] = post(&n, from, k, 0, data, LARGE, 0);
        }
    for (int t = 0; t < 5000 && ended < (PROCESSES - 1) * GROUPS; t++) {
        pass(&n, MS);
        ended = 0;
        for (uint16_t i = 0; i < PROCESSES - 1; i++)
            for (int k = 0; k < GROUPS; k++)
                ended += has_ended(&n, 0, k, tickets[i][k][0]) &&
                         has_ended(&n, (uint16_t)(i + 1), k, tickets[i][k][1]);
    }
    CHECK_AT(ended == (PROCESSES - 1) * GROUPS, "%d", ended);
    for (uint16_t i = 0; i < PROCESSES - 1; i++)
        for (int k = 0; k < GROUPS; k++)
            CHECK(memcmp(room[i][k], data, LARGE) == 0);
    CHECK_AT(memory_overflow(n.net, 0) == 0, "%lu packets found no room",
             (unsigned long)memory_overflow(n.net, 0));
    for (uint16_t i = 1; i < PROCESSES; i++)
        for (int k = 0; k < GROUPS; k++) {
            lc_stats stats;
            lc_group_stats(n.group[i][k], &stats);
            CHECK(stats.packets_resent == 0);
        }
    close_net(&n);
}

int main(void) {
    test_groups_share_the_room_at_a_peer();
    test_a_peer_that_takes_more_gets_no_more();
    test_groups_share_the_announcements();
    test_groups_that_were_left_take_no_room();
    test_groups_that_failed_take_no_room();
    test_groups_share_the_window_of_a_path();
    return check_result("test_shared_mail");
}
