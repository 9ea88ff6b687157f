/* The verbs link, its queue pair: making it, giving it buffers, and setting it going again. */
#include "link_verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

enum { POLLED = 16 };

void lc_verbs_note(lc_verbs *v, lc_event event) {
    if (v->events_in - v->events_out < LC_VERBS_EVENTS)
        v->events[v->events_in++ % LC_VERBS_EVENTS] = event;
}

void lc_verbs_leave_payload(lc_verbs *v, uint32_t number) {
    uint16_t *payload = &v->payload_of[number % LC_VERBS_SENDS];
    if (*payload != LC_VERBS_NONE && --v->users[*payload] == 0)
        v->free[v->n_free++] = *payload;
    *payload = LC_VERBS_NONE;
}

/* ---- buffers ---- */

/* The last n buffers of those that are spent. Returns whether the device took all. */
int lc_verbs_offer(lc_verbs *v, uint32_t n) {
    uint16_t *spent = v->spent + v->n_spent - n;
    vb_recv_wr *bad = NULL;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *slot = v->slots + (size_t)spent[i] * v->slot_bytes;
        v->return_pieces[i] = (vb_sge){(uintptr_t)slot, v->slot_bytes, v->mr->lkey};
        v->returns[i] = (vb_recv_wr){.wr_id = spent[i],
                                     .next = i + 1 < n ? &v->returns[i + 1] : NULL,
                                     .sg_list = &v->return_pieces[i],
                                     .num_sge = 1};
    }
    int error = v->context->post_recv(v->qp, v->returns, &bad);
    /* It took those before the bad one; the others are tried again. */
    uint32_t taken = !error ? n : bad ? (uint32_t)(bad - v->returns) : 0;
    memmove(spent, spent + taken, (n - taken) * sizeof *spent);
    v->n_spent -= taken;
    errno = error;
    return !error;
}

static int offer_all(lc_verbs *v) {
    for (uint32_t i = 0; i < v->queue; i++)
        v->spent[i] = (uint16_t)i;
    v->n_spent = v->queue;
    while (v->n_spent)
        if (!lc_verbs_offer(v, v->n_spent < LC_VERBS_RETURN ? v->n_spent : LC_VERBS_RETURN))
            return 0;
    return 1;
}

/* ---- the queue pair ---- */

/* Not every device has so much room within a request. */
static int make_queue_pair(lc_verbs *v) {
    static const uint32_t within[] = {LC_VERBS_INLINE, LC_VERBS_INLINE / 2, 0};
    for (int i = 0; i < 3 && !v->qp; i++) {
        vb_qp_init_attr attr = {
            .send_cq = v->send_cq, .recv_cq = v->receive_cq, .qp_type = VB_QPT_UD};
        attr.cap = (vb_qp_cap){LC_VERBS_SENDS, v->queue, 2, 1, within[i]};
        v->qp = v->api->create_qp(v->pd, &attr);
        v->inline_max = attr.cap.max_inline_data;
    }
    return v->qp != NULL;
}

static int start_queue_pair(lc_verbs *v) {
    vb_qp_attr init = {.qp_state = VB_QPS_INIT, .port_num = v->config.port, .qkey = v->own.key};
    vb_qp_attr receives = {.qp_state = VB_QPS_RTR}, sends = {.qp_state = VB_QPS_RTS};
    int error =
        v->api->modify_qp(v->qp, &init, VB_QP_STATE | VB_QP_PKEY_INDEX | VB_QP_PORT | VB_QP_QKEY);
    if (!error)
        error = v->api->modify_qp(v->qp, &receives, VB_QP_STATE);
    if (!error)
        error = v->api->modify_qp(v->qp, &sends, VB_QP_STATE | VB_QP_SQ_PSN);
    errno = error;
    return !error;
}

static int never_blocks(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

int lc_verbs_make_queues(lc_verbs *v) {
    const vb_api *api = v->api;
    errno = 0;
    v->channel = api->create_comp_channel(v->context);
    if (v->channel)
        v->send_cq = api->create_cq(v->context, LC_VERBS_SENDS, NULL, v->channel, 0);
    if (v->send_cq)
        v->receive_cq = api->create_cq(v->context, (int)v->queue, NULL, v->channel, 0);
    if (!v->receive_cq || !make_queue_pair(v) || !never_blocks(v->channel->fd) ||
        !never_blocks(v->context->async_fd) || !start_queue_pair(v) || !offer_all(v))
        return 0;
    v->own.queue_pair = ((const vb_qp_head *)(const void *)v->qp)->qp_num;
    return 1;
}

void lc_verbs_drop_queues(lc_verbs *v) {
    if (v->qp)
        v->api->destroy_qp(v->qp);
    if (v->receive_cq)
        v->api->destroy_cq(v->receive_cq);
    if (v->send_cq)
        v->api->destroy_cq(v->send_cq);
    if (v->channel)
        v->api->destroy_comp_channel(v->channel);
    v->qp = NULL;
    v->receive_cq = v->send_cq = NULL;
    v->channel = NULL;
}

/* ---- after an error ---- */

static void drain(lc_verbs *v, vb_cq *cq, uint32_t most) {
    vb_wc found[POLLED];
    for (uint32_t n = 0; n <= most && v->context->poll_cq(cq, POLLED, found) > 0; n += POLLED)
        ;
}

/* What a device does after an error differs: some stop sending, others receiving too, and some
 * can't be set going from there. All can be begun anew, under the same number and key. What was on
 * its way, and what had come, is loss. */
void lc_verbs_begin_anew(lc_verbs *v) {
    vb_qp_attr reset = {.qp_state = VB_QPS_RESET};
    lc_event told;
    v->stats.failed++;
    if (lc_trouble_begins(&v->failing, EIO, lc_clock_now(v->link.clock), &told))
        lc_verbs_note(v, told);
    int is_reset = !v->api->modify_qp(v->qp, &reset, VB_QP_STATE);
    drain(v, v->send_cq, LC_VERBS_SENDS);
    drain(v, v->receive_cq, v->queue);
    while (v->done != v->posted)
        lc_verbs_leave_payload(v, v->done++);
    v->unsignalled = v->n_arrived = v->n_given = 0;
    if (!is_reset || !start_queue_pair(v) || !offer_all(v))
        v->failed_errno = EIO;
}
