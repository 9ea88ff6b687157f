/* The UDP link, sending: as few calls as the kernel allows, and what to do when it refuses. */
#include "link_udp.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum {
    GATHER_BYTES = 4096 /* packets below this are packed: two pieces each cost more than the copy */
};

static const uint64_t MS = 1000000;

/* ---- sends that fail ---- */

/* A local firewall, a route or neighbour that is gone for now, an interface too small for the
 * packet: others may be reached, so nothing waits, and it is loss like any other. */
static int is_loss(int error) {
    return error == EPERM || error == EACCES || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == ECONNREFUSED || error == EHOSTDOWN || error == EMSGSIZE;
}

static int is_full(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

/* The caller's mistake, which waiting doesn't mend. */
static int is_broken(int error) {
    return error == EBADF || error == ENOTSOCK || error == EFAULT || error == EAFNOSUPPORT;
}

/* What is said of a run that is to be cut, and perhaps not of its packets. */
static int is_refusal(int error) {
    return error == EIO || error == EINVAL || error == EMSGSIZE || error == EOPNOTSUPP;
}

/* Whether the socket's address is still one of this host's. */
static int has_source(const lc_udp *u) {
    lc_udp_address here = u->here;
    int fd = socket(u->family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (u->family == AF_INET)
        here.v4.sin_port = 0;
    else
        here.v6.sin6_port = 0;
    int gone = fd >= 0 && bind(fd, &here.any, lc_udp_address_bytes(u->family)) != 0 &&
               errno == EADDRNOTAVAIL;
    if (fd >= 0)
        close(fd);
    return !gone;
}

/* Without its address a socket has no way to anyone, which kernels say in ways that are also said
 * of a single peer. Looked at once in a while: it takes three calls. */
static int meaning(lc_udp *u, int error) {
    if (error != ENETUNREACH && error != EINVAL && error != ENODEV)
        return error;
    uint64_t now = lc_clock_now(u->link.clock);
    if (now - u->source_ns >= MS) {
        u->source_gone = !has_source(u);
        u->source_ns = now;
    }
    return u->source_gone ? EADDRNOTAVAIL : error;
}

static void lost(lc_udp *u, uint16_t peer, int error) {
    lc_udp_peer *p = &u->peers[peer];
    if (p->error != error && !(error == EMSGSIZE && u->sizes))
        lc_udp_note(u, (lc_event){.kind = LC_EVENT_LOST, .sys_errno = error, .peer = peer});
    p->error = error;
}

/* The host is short of memory, its interface is down, its address gone: all of that may come back,
 * and until then the packets stay where they are. How long is borne is for the group's own
 * timeouts.
 */
static void put_off(lc_udp *u, int error) {
    lc_event event;
    if (lc_trouble_begins(&u->failing, error, lc_clock_now(u->link.clock), &event))
        lc_udp_note(u, event);
    u->stats.failed++;
}

static void works(lc_udp *u, uint16_t peer) {
    lc_event event;
    if (u->failing.sys_errno && lc_trouble_ends(&u->failing, lc_clock_now(u->link.clock), &event))
        lc_udp_note(u, event);
    u->peers[peer].error = 0;
}

/* ---- messages ---- */

static void address_message(lc_udp *u, struct msghdr *m, uint16_t peer) {
    memset(m, 0, sizeof *m);
    m->msg_name = &u->peers[peer].address;
    m->msg_namelen = lc_udp_address_bytes(u->family);
}

static void segment_message(struct msghdr *m, char *control, uint16_t bytes) {
    m->msg_control = control;
    m->msg_controllen = CMSG_SPACE(sizeof bytes);
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    c->cmsg_level = IPPROTO_UDP;
    c->cmsg_type = UDP_SEGMENT;
    c->cmsg_len = CMSG_LEN(sizeof bytes);
    memcpy(CMSG_DATA(c), &bytes, sizeof bytes);
}

/* Sends messages [0, n) in one call or one by one. Returns how many went; 0 with errno set. */
static int send_messages(lc_udp *u, struct mmsghdr *messages, int n) {
    u->stats.send_calls++;
    if (lc_udp_batches(u)) {
        int sent = u->calls.sendmmsg(u->socket.fd, messages, (unsigned)n, 0);
        if (sent >= 0 || errno != ENOSYS)
            return sent < 0 ? 0 : sent;
        lc_udp_refuse_batching(u);
    }
    return u->calls.sendmsg(u->socket.fd, &messages[0].msg_hdr, 0) < 0 ? 0 : 1;
}

static int send_flat(lc_udp *u, const struct iovec *v, struct mmsghdr *message) {
    struct iovec flat = {u->staging, v[0].iov_len + v[1].iov_len};
    memcpy(u->staging, v[0].iov_base, v[0].iov_len);
    memcpy(u->staging + v[0].iov_len, v[1].iov_base, v[1].iov_len);
    message->msg_hdr.msg_iov = &flat;
    message->msg_hdr.msg_iovlen = 1;
    return send_messages(u, message, 1);
}

/* One packet is one message. Returns how many are gone; errno says why it isn't all. */
static int send_plain(lc_udp *u, const lc_run *run) {
    int sent = 0;
    int n = (int)run->n_packets;
    for (int i = 0; i < n; i++) {
        address_message(u, &u->out[i].msg_hdr, run->peer);
        u->out[i].msg_hdr.msg_iov = &run->iov[2 * i];
        u->out[i].msg_hdr.msg_iovlen = 2;
    }
    while (sent < n) {
        int now = u->offered & LC_GATHER ? send_messages(u, &u->out[sent], n - sent)
                                         : send_flat(u, &run->iov[2 * sent], &u->out[sent]);
        if (now > 0) {
            works(u, run->peer);
            sent += now;
            continue;
        }
        int error = meaning(u, errno);
        if (!is_loss(error)) {
            errno = error;
            break;
        }
        lost(u, run->peer, error);
        sent++;
    }
    return sent;
}

static uint32_t bytes_of(const lc_run *run) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < 2 * run->n_packets; i++)
        n += (uint32_t)run->iov[i].iov_len;
    return n;
}

static uint32_t flatten(lc_udp *u, const lc_run *run) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < 2 * run->n_packets; i++) {
        memcpy(u->staging + used, run->iov[i].iov_base, run->iov[i].iov_len);
        used += (uint32_t)run->iov[i].iov_len;
    }
    return used;
}

static int gathers(const lc_udp *u, const lc_run *run) {
    return run->joined ||
           ((u->offered & LC_GATHER) && (run->n_packets == 1 || run->packet_bytes >= GATHER_BYTES));
}

/* One run is one message. Returns the runs that went, or 0 with errno set. */
static int send_segmented(lc_udp *u, const lc_run *runs, int n) {
    struct iovec flat = {u->staging, 0};
    int packed = !gathers(u, &runs[0]);
    int count = 0;
    do {
        const lc_run *run = &runs[count];
        struct msghdr *m = &u->out[count].msg_hdr;
        address_message(u, m, run->peer);
        m->msg_iov = run->iov;
        m->msg_iovlen = 2 * run->n_packets;
        if (run->joined) {
            u->joined[count] = (struct iovec){run->iov[0].iov_base, bytes_of(run)};
            m->msg_iov = &u->joined[count];
            m->msg_iovlen = 1;
        }
        if (packed) {
            flat.iov_len = flatten(u, run);
            m->msg_iov = &flat;
            m->msg_iovlen = 1;
        }
        if (run->n_packets > 1)
            segment_message(m, u->out_control[count], (uint16_t)run->packet_bytes);
        count++;
    } while (!packed && count < n && gathers(u, &runs[count]) &&
             lc_udp_segments(u, runs[count].peer));
    return send_messages(u, u->out, count);
}

/* ---- runs ---- */

/* Returns the packets of the runs that went, and in *went how many runs that were; or 0 with errno
 * set. */
static int send_in_one(lc_udp *u, const lc_run *runs, int n, int *went) {
    int packets = 0;
    *went = send_segmented(u, runs, n);
    for (int k = 0; k < *went; k++) {
        packets += (int)runs[k].n_packets;
        works(u, runs[k].peer);
        if (runs[k].n_packets > 1)
            lc_udp_segments_again(u, &u->peers[runs[k].peer]);
    }
    return packets;
}

/* A run that the kernel didn't take as one. An error may be of its packets, as where the socket's
 * address is gone, and then they have it one by one too. */
static int send_apart(lc_udp *u, const lc_run *run, int refusal) {
    int sent = send_plain(u, run);
    int error = errno;
    if (refusal && sent > 0 && !u->peers[run->peer].error)
        lc_udp_refuse_segments(u, run->peer, refusal);
    errno = error;
    return sent;
}

/* Why the rest of a batch stays where it is. */
static int stop(lc_udp *u, int packets, int error, int *sys_errno) {
    if (is_full(error))
        return packets;
    if (is_broken(error)) {
        *sys_errno = error;
        return -1;
    }
    put_off(u, error);
    return packets;
}

int lc_udp_send(lc_link *link, const lc_run *runs, int n_runs, int *sys_errno) {
    lc_udp *u = lc_udp_of(link);
    int packets = 0;
    if (u->failing.sys_errno && lc_trouble_holds(&u->failing, lc_clock_now(link->clock)))
        return 0;
    for (int i = 0; i < n_runs;) {
        const lc_run *run = &runs[i];
        int refusal = 0;
        if (lc_udp_segments(u, run->peer)) {
            int went;
            packets += send_in_one(u, run, n_runs - i, &went);
            i += went;
            if (went)
                continue;
            refusal = run->n_packets > 1 && is_refusal(errno) ? errno : 0;
            int error = meaning(u, errno);
            if (!refusal && !is_loss(error))
                return stop(u, packets, error, sys_errno);
            if (!refusal) {
                lost(u, run->peer, error);
                packets += (int)run->n_packets;
                i++;
                continue;
            }
        }
        int sent = send_apart(u, run, refusal);
        packets += sent;
        if ((uint32_t)sent < run->n_packets)
            return stop(u, packets, errno, sys_errno);
        i++;
    }
    return packets;
}
