#include "paths.h"

#include <stdlib.h>
#include <string.h>

/* Aggregates are cut into pieces that a rate serves in this time, so that a slow link hands over
 * single packets and not 64 KiB at once. */
static const double PIECE_NS = 100e3;
/* A burst of losses is over when the link has been idle for so long. */
static const int64_t FADE_NS = 50000000;
/* Frames that may be in the switch. */
static const uint64_t STORE_MAX = (uint64_t)1 << 30;
/* The jitter wanders to a new value within this time, or longer where it has far to go. */
static const double TURN_NS = 10e6;

static uint64_t mix(uint64_t z) { /* the finalizer of splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform on [0, 1), with 53 bits. */
static double draw(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    return (double)(mix(*state) >> 11) * 0x1p-53;
}

/* ---- the schedule ---- */

static int before(const lab_train *a, const lab_train *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void schedule_add(lab_paths *paths, lab_train train) {
    lab_schedule *schedule = &paths->schedule;
    if (schedule->count == schedule->room) {
        uint32_t room = schedule->room ? 2 * schedule->room : 1024;
        lab_train *more = realloc(schedule->train, room * sizeof *more);
        if (!more) {
            paths->shared->host_counts[train.from].shed += train.packets;
            lab_frame_drop(&paths->store, train.frame);
            return;
        }
        schedule->train = more;
        schedule->room = room;
    }
    train.order = schedule->order++;
    uint32_t at = schedule->count++;
    while (at && before(&train, schedule->train + (at - 1) / 2)) {
        schedule->train[at] = schedule->train[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    schedule->train[at] = train;
}

static lab_train schedule_take(lab_schedule *schedule) {
    lab_train top = schedule->train[0], last = schedule->train[--schedule->count];
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < schedule->count; at = child) {
        if (child + 1 < schedule->count &&
            before(schedule->train + child + 1, schedule->train + child))
            child++;
        if (!before(schedule->train + child, &last))
            break;
        schedule->train[at] = schedule->train[child];
    }
    schedule->train[at] = last;
    return top;
}

/* ---- rates and queues ---- */

/* Takes the next piece of ``rest`` through a queue: its ``at`` is then when it has left. Returns 0
 * when nothing is left of ``rest``. A policer's bucket is a queue that delays nothing: what has
 * been taken out of it is what would wait. */
static int pass(const lab_rate *rate, lab_queue *queue, lab_rate_counts *counts, lab_train *rest,
                lab_train *piece) {
    if (!rest->packets)
        return 0;
    *piece = *rest;
    if (rate->bytes_per_s > 0) {
        double ns_per_byte = 1e9 / rate->bytes_per_s;
        int64_t wait = queue->free_at > rest->at ? queue->free_at - rest->at : 0;
        double waiting = (double)wait / ns_per_byte;
        uint32_t each = lab_wire(rest->frame, rest->first, 1);
        double fits = (rate->queue_bytes - waiting) / each;
        uint32_t served = (uint32_t)(PIECE_NS / ns_per_byte / each) + 1;
        if (rate->polices || served > rest->packets)
            served = rest->packets;
        if (fits < served)
            served = fits < 1 ? 0 : (uint32_t)fits;
        if (!served) {
            counts->packets += rest->packets;
            counts->bytes += lab_wire(rest->frame, rest->first, rest->packets);
            *(rate->polices ? &counts->policed : &counts->dropped) += rest->packets;
            rest->packets = 0;
            return 0;
        }
        piece->packets = (uint16_t)served;
        double bytes = lab_wire(piece->frame, piece->first, served);
        queue->free_at = rest->at + wait + (int64_t)(bytes * ns_per_byte + 0.5);
        if (!rate->polices)
            piece->at = queue->free_at;
        if (waiting + bytes > (double)counts->queue_max)
            counts->queue_max = (uint64_t)(waiting + bytes);
    }
    counts->packets += piece->packets;
    counts->bytes += lab_wire(piece->frame, piece->first, piece->packets);
    rest->first += piece->packets;
    rest->packets -= piece->packets;
    return 1;
}

/* ---- links ---- */

static double jitter(const lab_link *link, lab_way *way, int64_t now) {
    if (link->jitter_ns <= 0)
        return 0;
    if (now >= way->turn_end) {
        /* At most by half the time that passes, so that packets don't catch up with each other. */
        double longest = link->jitter_ns * 4 > TURN_NS ? link->jitter_ns * 4 : TURN_NS;
        way->turn_from = way->turn_to;
        way->turn_to = 2 * draw(&way->wander) - 1;
        way->turn_at = now;
        way->turn_end = now + (int64_t)longest;
    }
    double part = (double)(now - way->turn_at) / (double)(way->turn_end - way->turn_at);
    return link->jitter_ns * (way->turn_from + part * (way->turn_to - way->turn_from));
}

static int lose(const lab_link *link, lab_way *way, lab_link_counts *counts) {
    double chance = way->was_lost ? link->go_on : link->begin;
    int lost = chance > 0 && draw(&way->chance) < chance;
    counts->lost += (uint64_t)lost;
    counts->bursts += lost && !way->was_lost;
    way->was_lost = (uint8_t)lost;
    return lost;
}

static void send_on(lab_paths *paths, lab_train part, uint32_t first, uint32_t packets) {
    if (!packets)
        return;
    part.first = (uint16_t)first;
    part.packets = (uint16_t)packets;
    lab_frame_keep(part.frame, 1);
    schedule_add(paths, part);
}

/* Draws the fate of each packet of a train; what stays together stays a train. */
static void impair(lab_paths *paths, const lab_train *train, uint32_t index) {
    const lab_link *link = paths->link + index;
    lab_way *way = paths->way + index;
    lab_link_counts *counts = paths->shared->link_counts + index;
    lab_train part = *train;
    part.at += (int64_t)(link->delay_ns + jitter(link, way, train->at));
    if (part.at < way->last_at)
        part.at = way->last_at;
    /* What makes bursts doesn't wait for packets: a sender that tries again from time to time, as
     * TCP does after a timeout, would otherwise have to send as many as a burst has left. */
    if (part.at - way->last_at > FADE_NS)
        way->was_lost = 0;
    way->last_at = part.at;
    counts->offered += train->packets;
    if (!link->begin && !link->reorder && !link->double_ && !link->spread_ns) {
        way->was_lost = 0;
        send_on(paths, part, train->first, train->packets);
        return;
    }
    uint32_t from = train->first, end = from + train->packets;
    for (uint32_t i = from; i < end; i++) {
        int lost = lose(link, way, counts);
        int held = !lost && link->reorder > 0 && draw(&way->chance) < link->reorder;
        int twice = !lost && !held && link->double_ > 0 && draw(&way->chance) < link->double_;
        if (!lost && !held && !twice && !link->spread_ns)
            continue;
        send_on(paths, part, from, i - from);
        from = i + 1;
        counts->reordered += (uint64_t)held;
        counts->doubled += (uint64_t)twice;
        for (int copies = lost ? 0 : 1 + twice; copies; copies--) {
            lab_train alone = part;
            alone.at += held ? (int64_t)link->hold_ns : 0;
            if (link->spread_ns > 0)
                alone.at += (int64_t)(link->spread_ns * draw(&way->wander));
            send_on(paths, alone, i, 1);
        }
    }
    send_on(paths, part, from, end - from);
}

/* Takes the packets of ``sent`` over their link. */
static void cross(lab_paths *paths, lab_train *sent) {
    uint32_t index = (uint32_t)sent->from * LAB_HOSTS + sent->to;
    lab_rate_counts *counts = &paths->shared->link_counts[index].queue;
    lab_train across;
    while (pass(&paths->link[index].rate, &paths->way[index].queue, counts, sent, &across))
        impair(paths, &across, index);
}

static int is_far(const lab_shared *shared, uint32_t from, uint32_t to) {
    return shared->site_of[from] != shared->site_of[to];
}

void lab_paths_enter(lab_paths *paths, lab_frame *frame, uint32_t from, uint32_t to, int64_t now) {
    lab_shared *shared = paths->shared;
    int far = is_far(shared, from, to);
    lab_train sent = {.at = now,
                      .frame = frame,
                      .packets = frame->packets,
                      .from = (uint8_t)from,
                      .to = (uint8_t)to,
                      .stage = far ? LAB_SITE_UP : LAB_DOWN};
    lab_train up;
    if (paths->store.bytes > STORE_MAX) {
        shared->host_counts[from].shed += frame->packets;
        sent.packets = 0;
    }
    while (pass(paths->up + from, paths->up_queue + from, shared->up_counts + from, &sent, &up)) {
        /* Hosts share their site's uplink: it takes packets in the order in which they leave
         * the hosts' own, so each waits until it has. */
        if (far)
            send_on(paths, up, up.first, up.packets);
        else
            cross(paths, &up);
    }
    lab_frame_drop(&paths->store, frame);
}

/* ---- arrival ---- */

static void leave_site(lab_paths *paths, lab_train *train) {
    uint32_t site = paths->shared->site_of[train->from];
    lab_rate_counts *counts = paths->shared->site_up_counts + site;
    lab_train out, sent = *train;
    sent.stage = LAB_SITE_DOWN;
    while (pass(paths->site_up + site, paths->site_up_queue + site, counts, &sent, &out))
        cross(paths, &out);
    lab_frame_drop(&paths->store, train->frame);
}

/* Takes a train through a downlink. Returns 1 when it is past it at once, as that has no rate;
 * otherwise its packets are on the schedule for when they are. */
static int serve(lab_paths *paths, lab_train *train, const lab_rate *rate, lab_queue *queue,
                 lab_rate_counts *counts) {
    train->stage++;
    lab_train piece, rest = *train;
    if (rate->bytes_per_s <= 0)
        return pass(rate, queue, counts, &rest, &piece);
    while (pass(rate, queue, counts, &rest, &piece))
        send_on(paths, piece, piece.first, piece.packets);
    lab_frame_drop(&paths->store, train->frame);
    return 0;
}

/* Takes a train through what it has come to. Returns 1 when that is its host. */
static int arrive(lab_paths *paths, lab_train *train) {
    lab_shared *shared = paths->shared;
    uint32_t host = train->to, site = shared->site_of[host];
    if (train->stage == LAB_SITE_UP) {
        leave_site(paths, train);
        return 0;
    }
    if (train->stage == LAB_SITE_DOWN &&
        !serve(paths, train, paths->site_down + site, paths->site_down_queue + site,
               shared->site_down_counts + site))
        return 0;
    return train->stage == LAB_OUT || serve(paths, train, paths->down + host,
                                            paths->down_queue + host, shared->down_counts + host);
}

int lab_paths_due(lab_paths *paths, int64_t now, lab_train *train, int64_t *next_ns) {
    lab_schedule *schedule = &paths->schedule;
    while (schedule->count && schedule->train[0].at <= now) {
        *train = schedule_take(schedule);
        if (arrive(paths, train))
            return 1;
    }
    *next_ns = schedule->count ? schedule->train[0].at : -1;
    return 0;
}

/* ---- life ---- */

void lab_paths_change(lab_paths *paths) {
    lab_shared *shared = paths->shared;
    for (uint32_t i = 0; i < LAB_HOSTS * LAB_HOSTS; i++)
        /* What is sent on a new route may overtake what still is on the old one. */
        if (paths->link[i].delay_ns != shared->link[i].delay_ns)
            paths->way[i].last_at = 0;
    memcpy(paths->up, shared->up, sizeof paths->up);
    memcpy(paths->down, shared->down, sizeof paths->down);
    memcpy(paths->site_up, shared->site_up, sizeof paths->site_up);
    memcpy(paths->site_down, shared->site_down, sizeof paths->site_down);
    memcpy(paths->link, shared->link, sizeof paths->link);
}

void lab_paths_init(lab_paths *paths, lab_shared *shared) {
    memset(paths, 0, sizeof *paths);
    paths->shared = shared;
    for (uint32_t i = 0; i < LAB_HOSTS * LAB_HOSTS; i++) {
        paths->way[i].chance = mix(mix(shared->seed + 1) + 2 * (uint64_t)i);
        paths->way[i].wander = mix(mix(shared->seed + 1) + 2 * (uint64_t)i + 1);
    }
    lab_paths_change(paths);
}

void lab_paths_free(lab_paths *paths) {
    for (uint32_t i = 0; i < paths->schedule.count; i++)
        lab_frame_drop(&paths->store, paths->schedule.train[i].frame);
    free(paths->schedule.train);
    lab_store_free(&paths->store);
}
