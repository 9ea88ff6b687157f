/* The verbs link, moving datagrams: copied once into memory that the device reads, posted as one
 * chain for each run, completed in dozens. */
#include "link_verbs.h"

#include <errno.h>
#include <string.h>

enum { FIRST = 0, SECOND = 1, POLLED = 16 };

/* ---- sending: what is taken back ---- */

/* A request has gone since there was trouble. */
static void works(lc_verbs *v) {
    lc_event event;
    if (lc_trouble_ends(&v->failing, lc_clock_now(v->link.clock), &event))
        lc_verbs_note(v, event);
}

/* A completion is of all requests up to its own. */
static void take_back(lc_verbs *v) {
    vb_wc found[POLLED];
    int n, good = 0, bad = 0;
    do {
        n = v->context->poll_cq(v->send_cq, POLLED, found);
        for (int i = 0; i < n; i++) {
            good |= found[i].status == VB_WC_SUCCESS;
            bad |= found[i].status != VB_WC_SUCCESS;
            while ((int32_t)((uint32_t)found[i].wr_id - v->done) >= 0 && v->done != v->posted)
                lc_verbs_leave_payload(v, v->done++);
        }
    } while (n == POLLED);
    if (n < 0)
        v->failed_errno = EIO;
    else if (bad)
        lc_verbs_begin_anew(v);
    else if (good && v->failing.sys_errno)
        works(v);
}

/* ---- sending: requests ---- */

static uint16_t take_payload(lc_verbs *v) {
    return v->free[--v->n_free];
}

static uint8_t *payload_at(const lc_verbs *v, uint16_t payload) {
    return v->payloads + (size_t)payload * v->payload_stride;
}

/* The payload of packet k in the device's memory. Where it has several receivers, it is copied once
 * as long as one of them is on its way. */
static uint16_t fill(lc_verbs *v, const lc_run *run, uint32_t k) {
    const struct iovec *from = &run->iov[2 * k + SECOND];
    uint64_t content = run->receivers > 1 ? run->contents[k] : 0;
    uint16_t *holder = &v->holder[content % LC_VERBS_SENDS];
    if (content && *holder != LC_VERBS_NONE && v->users[*holder] &&
        v->content[*holder] == content) {
        v->users[*holder]++;
        return *holder;
    }
    uint16_t payload = take_payload(v);
    memcpy(payload_at(v, payload), from->iov_base, from->iov_len);
    v->users[payload] = 1;
    v->content[payload] = content;
    if (content)
        *holder = payload;
    return payload;
}

static vb_sge piece(const lc_verbs *v, const void *at, size_t bytes) {
    return (vb_sge){(uintptr_t)at, (uint32_t)bytes, v->mr->lkey};
}

/* Pieces that the device reads before posting ends. */
static int within(const struct iovec *iov, vb_sge *pieces) {
    int n = 0;
    for (int i = FIRST; i <= SECOND; i++)
        if (iov[i].iov_len)
            pieces[n++] = (vb_sge){(uintptr_t)iov[i].iov_base, (uint32_t)iov[i].iov_len, 0};
    return n;
}

static int in_memory(lc_verbs *v, const lc_run *run, uint32_t k, uint32_t number, vb_sge *pieces) {
    const struct iovec *iov = &run->iov[2 * k];
    uint16_t payload;
    int n = 0;
    if (iov[FIRST].iov_len <= LC_VERBS_HEAD_BYTES && iov[SECOND].iov_len) {
        uint8_t *head = v->heads + (size_t)(number % LC_VERBS_SENDS) * LC_VERBS_HEAD_BYTES;
        memcpy(head, iov[FIRST].iov_base, iov[FIRST].iov_len);
        payload = fill(v, run, k);
        pieces[n++] = piece(v, head, iov[FIRST].iov_len);
        pieces[n++] = piece(v, payload_at(v, payload), iov[SECOND].iov_len);
    } else {
        payload = take_payload(v);
        v->users[payload] = 1;
        v->content[payload] = 0;
        uint8_t *to = payload_at(v, payload);
        memcpy(to, iov[FIRST].iov_base, iov[FIRST].iov_len);
        if (iov[SECOND].iov_len)
            memcpy(to + iov[FIRST].iov_len, iov[SECOND].iov_base, iov[SECOND].iov_len);
        pieces[n++] = piece(v, to, iov[FIRST].iov_len + iov[SECOND].iov_len);
    }
    v->payload_of[number % LC_VERBS_SENDS] = payload;
    return n;
}

static void write_request(lc_verbs *v, const lc_run *run, uint32_t k, const lc_verbs_peer *p,
                          uint32_t n) {
    vb_send_wr *w = &v->requests[n];
    vb_sge *pieces = &v->pieces[2 * n];
    uint32_t number = v->posted + n;
    const struct iovec *iov = &run->iov[2 * k];
    memset(w, 0, offsetof(vb_send_wr, others));
    w->wr_id = number;
    w->sg_list = pieces;
    w->opcode = VB_WR_SEND;
    w->ah = p->ah;
    w->remote_qpn = p->address.queue_pair;
    w->remote_qkey = p->address.key;
    if (iov[FIRST].iov_len + iov[SECOND].iov_len <= v->inline_max) {
        w->num_sge = within(iov, pieces);
        w->send_flags = VB_SEND_INLINE;
    } else {
        w->num_sge = in_memory(v, run, k, number, pieces);
    }
    if (++v->unsignalled == LC_VERBS_SIGNAL_EVERY || v->failing.sys_errno) {
        w->send_flags |= VB_SEND_SIGNALED;
        v->unsignalled = 0;
    }
    if (n)
        w[-1].next = w;
}

/* ---- sending: what fails ---- */

/* The device's memory or the system's is short. */
static void put_off(lc_verbs *v, int error) {
    lc_event event;
    if (lc_trouble_begins(&v->failing, error, lc_clock_now(v->link.clock), &event))
        lc_verbs_note(v, event);
    v->stats.failed++;
}

/* Posts the first n requests. Returns how many the device took. */
static uint32_t post(lc_verbs *v, uint32_t n) {
    vb_send_wr *bad = NULL;
    v->stats.send_calls++;
    int error = v->context->post_send(v->qp, v->requests, &bad);
    uint32_t taken = error && bad ? (uint32_t)(bad - v->requests) : error ? 0 : n;
    for (uint32_t i = taken; i < n; i++)
        lc_verbs_leave_payload(v, v->posted + i);
    /* Where one with a mark was refused, the next one gets it. */
    uint32_t marks = 0;
    for (uint32_t i = taken; i < n; i++)
        marks |= v->requests[i].send_flags & VB_SEND_SIGNALED;
    if (marks)
        v->unsignalled = LC_VERBS_SIGNAL_EVERY - 1;
    v->posted += taken;
    if (error)
        put_off(v, error);
    return taken;
}

static uint32_t room(lc_verbs *v, uint32_t wanted) {
    uint32_t left = LC_VERBS_SENDS - (v->posted - v->done);
    if (left < wanted) {
        take_back(v);
        left = LC_VERBS_SENDS - (v->posted - v->done);
    }
    return left < wanted ? left : wanted;
}

/* A datagram beyond the limit would vanish: the device takes it and says that it went. */
static int is_too_large(const lc_verbs *v, const struct iovec *iov) {
    return iov[FIRST].iov_len + iov[SECOND].iov_len > v->mtu;
}

/* Returns how many of its packets are gone. */
static uint32_t send_run(lc_verbs *v, const lc_run *run) {
    const lc_verbs_peer *p = lc_verbs_peer_of(v, run->peer);
    uint32_t gone = 0;
    while (gone < run->n_packets) {
        uint32_t n = 0, k = gone, most = room(v, run->n_packets - gone);
        for (; k < run->n_packets && n < most; k++)
            if (p && !is_too_large(v, &run->iov[2 * k]))
                write_request(v, run, k, p, n++);
            else
                v->stats.failed++; /* nobody is there, or it can't be sent: it is lost */
        if (n && post(v, n) < n)
            return gone; /* some of these may have gone: they come twice, and are told apart */
        gone = k;
        if (!most)
            break;
    }
    return gone;
}

int lc_verbs_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno) {
    lc_verbs *v = lc_verbs_of(link);
    uint32_t gone = 0;
    if (!v->failed_errno && lc_trouble_holds(&v->failing, lc_clock_now(link->clock)))
        return 0;
    take_back(v);
    for (int i = 0; i < n_runs && !v->failed_errno; i++) {
        uint32_t n = send_run(v, &runs[i]);
        gone += n;
        if (n < runs[i].n_packets)
            break;
    }
    if (!v->failed_errno)
        return (int)gone;
    *sys_errno = v->failed_errno;
    return -1;
}

/* ---- receiving ---- */

static uint8_t *slot_at(const lc_verbs *v, uint32_t slot) {
    return v->slots + (size_t)slot * v->slot_bytes;
}

/* What the caller was given last is the device's again. */
static void give_back(lc_verbs *v) {
    for (uint32_t i = 0; i < v->n_given; i++)
        v->spent[v->n_spent++] = v->given[i];
    v->n_given = 0;
    while (v->n_spent >= LC_VERBS_RETURN)
        if (!lc_verbs_offer(v, LC_VERBS_RETURN))
            break;
}

/* A receive that failed has no datagram, and the queue pair takes none after it. */
static void look(lc_verbs *v) {
    uint32_t left = LC_RECEIVE_BUFFERS - v->n_arrived;
    vb_wc *found = v->arrived + v->n_arrived;
    int n = left ? v->context->poll_cq(v->receive_cq, (int)left, found) : 0;
    if (n < 0)
        v->failed_errno = EIO;
    for (int i = 0; i < n; i++)
        if (found[i].status != VB_WC_SUCCESS) {
            lc_verbs_begin_anew(v);
            return;
        }
    v->n_arrived += n > 0 ? (uint32_t)n : 0;
}

static lc_arrival arrival_of(const lc_verbs *v, const vb_wc *wc, lc_verbs_sender *sender) {
    const uint8_t *slot = slot_at(v, (uint32_t)wc->wr_id);
    int good = wc->byte_len > VB_GRH_BYTES && wc->byte_len <= v->slot_bytes;
    uint32_t length = good ? wc->byte_len - VB_GRH_BYTES : 0;
    *sender = (lc_verbs_sender){.queue_pair = wc->src_qp,
                                .lid = wc->slid,
                                .has_grh = good && (wc->wc_flags & VB_WC_GRH),
                                .grh = slot};
    return (lc_arrival){
        .data = slot + VB_GRH_BYTES, .length = length, .stride = length, .from = sender};
}

int lc_verbs_receive(lc_link *link, lc_arrival *arrivals, int max) {
    lc_verbs *v = lc_verbs_of(link);
    uint32_t most = max < LC_RECEIVE_BUFFERS ? (uint32_t)max : LC_RECEIVE_BUFFERS;
    give_back(v);
    v->stats.receive_calls++;
    look(v);
    uint32_t n = v->n_arrived < most ? v->n_arrived : most;
    for (uint32_t i = 0; i < n; i++) {
        v->given[i] = (uint16_t)v->arrived[i].wr_id;
        arrivals[i] = arrival_of(v, &v->arrived[i], &v->senders[i]);
    }
    v->n_given = n;
    v->n_arrived -= n;
    memmove(v->arrived, v->arrived + n, v->n_arrived * sizeof *v->arrived);
    return (int)n;
}

/* ---- who sent it ---- */

static int is_ipv4(const uint8_t *gid) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    return !memcmp(gid, mapped, sizeof mapped);
}

/* Where RoCE has an IPv4 header it stands at the end of the place for a GRH. */
static int is_source(const uint8_t *grh, const uint8_t *gid) {
    enum { GRH_SOURCE = 8, IPV4 = 20, IPV4_SOURCE = IPV4 + 12, IPV4_VERSION = 4 };
    if (is_ipv4(gid) && grh[IPV4] >> 4 == IPV4_VERSION)
        return !memcmp(grh + IPV4_SOURCE, gid + 12, 4);
    return !memcmp(grh + GRH_SOURCE, gid, 16);
}

int lc_verbs_is_from(const lc_link *link, const lc_arrival *arrival, uint16_t peer) {
    const lc_verbs_peer *p = lc_verbs_peer_of(lc_verbs_of_const(link), peer);
    const lc_verbs_sender *s = arrival->from;
    if (!p || s->queue_pair != p->address.queue_pair)
        return 0;
    return s->has_grh ? is_source(s->grh, p->address.gid) : s->lid == p->address.lid;
}

/* ---- sleeping ---- */

static void drain(lc_verbs *v) {
    vb_cq *cq;
    void *own;
    while (!v->api->get_cq_event(v->channel, &cq, &own))
        v->api->ack_cq_events(cq, 1);
}

/* A queue tells of what comes after it was asked to; so it is asked, and looked at once more. */
int lc_verbs_watch(lc_link *link) {
    lc_verbs *v = lc_verbs_of(link);
    if (v->n_arrived)
        return 1;
    if (v->context->req_notify_cq(v->receive_cq, 0))
        v->failed_errno = EIO;
    look(v);
    return v->n_arrived > 0;
}

static int is_full(lc_verbs *v) {
    if (v->context->req_notify_cq(v->send_cq, 0))
        v->failed_errno = EIO;
    take_back(v);
    return v->posted - v->done == LC_VERBS_SENDS;
}

int lc_verbs_descriptors(lc_link *link, int blocked, struct pollfd *fds, uint64_t *timeout_ns) {
    lc_verbs *v = lc_verbs_of(link);
    uint64_t now = lc_clock_now(link->clock);
    drain(v);
    v->looked_ns = 0; /* what wakes a sleeper may be an asynchronous event */
    if (lc_verbs_watch(link))
        *timeout_ns = 0;
    if (blocked && lc_trouble_holds(&v->failing, now)) {
        uint64_t left = v->failing.again.until_ns - now;
        *timeout_ns = left < *timeout_ns ? left : *timeout_ns;
    } else if (blocked && !is_full(v)) {
        *timeout_ns = 0;
    }
    fds[0] = (struct pollfd){v->channel->fd, POLLIN, 0};
    fds[1] = (struct pollfd){v->context->async_fd, POLLIN, 0};
    return 2;
}
