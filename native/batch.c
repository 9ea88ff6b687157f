#include "batch.h"

static void hold(lc_op *op) {
    op->runs++;
    op->group->runs++;
}

static void let_go(lc_op *op) {
    op->runs--;
    op->group->runs--;
}

int lc_batch_add(lc_interface *via, lc_op *op) {
    hold(op);
    via->run_op[via->n_runs] = op;
    return via->n_runs++;
}

void lc_batch_seal(const lc_host *h, lc_interface *via, lc_run *run, int i) {
    if (!via->tag_bytes)
        return;
    lc_seal *seal = h->paths[run->peer].seal;
    uint8_t *to = via->sealed + (size_t)i * via->sealed_room;
    for (uint32_t k = 0; k < run->n_packets; k++) {
        struct iovec *pieces = &run->iov[(size_t)2 * k];
        uint32_t n = lc_seal_put(seal, pieces, h->now, to);
        pieces[0] = (struct iovec){to, LC_HEADER_BYTES + LC_TAG_BYTES};
        pieces[1] = (struct iovec){to + pieces[0].iov_len, n - pieces[0].iov_len};
        to += n;
    }
    run->joined = 1;
    run->copied = 1; /* the next batch is sealed to the same memory */
}

void lc_batch_drop(lc_host *h, const lc_group *g) {
    for (uint16_t n = 0; n < h->n_interfaces; n++) {
        lc_interface *via = &h->interfaces[n];
        int keep = 0;
        for (int i = 0; i < via->n_runs; i++) {
            if (via->run_op[i]->group == g) {
                let_go(via->run_op[i]);
                continue;
            }
            via->run_op[keep] = via->run_op[i];
            via->run_ahead[keep] = via->run_ahead[i];
            via->runs[keep++] = via->runs[i];
        }
        via->n_runs = keep;
    }
}

/* The link has all of the run: until it has completed so many packets, the operation stays. */
static void handed_over(lc_interface *via, lc_op *op, uint64_t until) {
    if (via->link->ops->completed) {
        via->flights[via->flights_in++ % LC_FLIGHTS] = (lc_flight){op, until};
        return;
    }
    let_go(op);
    lc_touch(op);
}

static void drop_sent(lc_interface *via, uint32_t packets) {
    uint64_t until = via->link->handed - packets;
    int keep = 0;
    for (int i = 0; i < via->n_runs; i++) {
        lc_run run = via->runs[i];
        lc_op *op = via->run_op[i];
        uint32_t gone = packets < run.n_packets ? packets : run.n_packets;
        packets -= gone;
        until += gone;
        for (uint32_t k = 0; k < 2 * gone; k++)
            op->report.bytes_sent += run.iov[k].iov_len;
        if (gone)
            op->report.bytes_sent -= via->run_ahead[i];
        run.iov += 2 * gone;
        if (run.contents)
            run.contents += gone;
        run.n_packets -= gone;
        if (run.n_packets) {
            via->run_op[keep] = op;
            via->run_ahead[keep] = via->run_ahead[i];
            via->runs[keep++] = run;
        } else {
            handed_over(via, op, until);
        }
    }
    via->n_runs = keep;
}

int lc_batch_flush(lc_host *h, lc_interface *via) {
    if (!via->n_runs)
        return 1;
    if (via->flights_in - via->flights_out > LC_FLIGHTS - LC_BATCH_RUNS)
        return 0;
    int error = 0;
    int sent = lc_link_send(via->link, via->runs, via->n_runs, &error);
    if (sent < 0) {
        lc_fail_interface(h, via, error);
        return 0;
    }
    drop_sent(via, (uint32_t)sent);
    return !via->n_runs;
}

void lc_batch_completed(lc_host *h) {
    for (uint16_t n = 0; n < h->n_interfaces; n++) {
        lc_interface *via = &h->interfaces[n];
        if (via->flights_in == via->flights_out)
            continue;
        uint64_t done = lc_link_completed(via->link);
        while (via->flights_in != via->flights_out) {
            const lc_flight *first = &via->flights[via->flights_out % LC_FLIGHTS];
            if (first->until > done)
                break;
            let_go(first->op);
            lc_touch(first->op);
            via->flights_out++;
        }
    }
}

void lc_fail_interface(lc_host *h, lc_interface *via, int sys_errno) {
    via->failed = (lc_failure){.code = LC_E_SYSTEM, .sys_errno = sys_errno, .peer = -1};
    for (int i = 0; i < via->n_runs; i++)
        let_go(via->run_op[i]);
    while (via->flights_in != via->flights_out)
        let_go(via->flights[via->flights_out++ % LC_FLIGHTS].op);
    via->n_runs = 0;
    via->control_waits = 0;
    for (lc_group *g = h->groups; g; g = g->next)
        if (lc_group_uses(g, via))
            lc_fail(g, &via->failed);
}
