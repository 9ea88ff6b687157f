/* Ways to other processes. A path is made anew when another process takes a number, or the same one
 * starts again: all that was known of it, keys and numbers of packets included, is of the one that
 * was there before. */
#include "path.h"

#include <stdlib.h>

/* ---- what it takes ---- */

static void begin(const lc_host *h, lc_path *p, uint64_t now) {
    uint64_t day = lc_clock_time_of_day(h->clock);
    lc_pace_init(&p->pace, now, day - now, LC_HEADER_BYTES + h->config.payload_bytes);
    p->sent_ns = now; /* it has been idle for no time: nothing keeps a path alive that is new */
}

void lc_path_begin(const lc_host *h, lc_path *p, lc_interface *via, uint64_t now) {
    if (p->interface)
        return;
    p->number = (uint16_t)(p - h->paths);
    p->interface = via;
    begin(h, p, now);
}

int lc_room_make(lc_room *room, const lc_interface *via) {
    *room = (lc_room){.records = calloc(LC_RECORDS, sizeof *room->records),
                      .early = calloc(LC_EARLY, sizeof *room->early),
                      .held = malloc(lc_wire_bytes_max(via))};
    int made = room->records && room->early && room->held;
    if (via->link->small_max) {
        room->units_at = calloc(LC_UNITS, sizeof *room->units_at);
        made = made && room->units_at;
    }
    if (via->link->routed) {
        room->pieces = lc_pieces_make(LC_HEADER_BYTES + via->payload_bytes);
        made = made && room->pieces;
    }
    if (!made)
        lc_room_free(room);
    return made ? LC_OK : LC_E_MEMORY;
}

void lc_room_free(lc_room *room) {
    free(room->records);
    free(room->early);
    free(room->held);
    free(room->units_at);
    free(room->pieces);
    *room = (lc_room){.records = NULL};
}

lc_room lc_path_exchange(lc_path *p, const lc_room *room) {
    lc_room had = {p->records, p->early, p->held, p->units_at, p->pieces};
    p->records = room->records;
    p->early = room->early;
    p->held = room->held;
    p->units_at = room->units_at;
    p->pieces = room->pieces;
    return had;
}

/* ---- reaching a process ---- */

int lc_path_reach(lc_host *h, lc_path *p, const lc_address *address) {
    int code = lc_link_set_peer(p->interface->link, p->number, address);
    if (code != LC_OK)
        return code;
    p->pace.packet_bytes = lc_wire_bytes_max(p->interface);
    p->pace.same_host = lc_link_is_here(p->interface->link, p->number);
    uint32_t want = lc_wire_bytes_max(p->interface);
    lc_size_begin(&p->size, want,
                  p->interface->link->routed && !p->pace.same_host &&
                      !(h->config.disable & LC_PATH_MTU) && want <= LC_CUT_BYTES);
    if (p->number == h->config.process)
        return LC_OK;
    p->interface->paths[p->interface->n_paths++] = p;
    p->leaves_by = address->far ? LC_FAR : LC_NEAR;
    lc_exit_of(p)->n_paths += !p->pace.same_host;
    return LC_OK;
}

static uint32_t share_of(const lc_interface *via, uint32_t packet_bytes) {
    uint32_t share = lc_link_credits(via->link, packet_bytes, via->n_paths ? via->n_paths : 1);
    return share ? share : 1;
}

/* Where small packets take less room, the window is as many of those, and large ones count so much
 * that no more of them fit into it than there is room for. */
void lc_share_credits(const lc_host *h, lc_interface *via) {
    for (int i = 0; i < LC_UPLINKS; i++)
        lc_uplink_serves(&via->exits[i].uplink, via->exits[i].n_paths, lc_clock_now(h->clock));
    uint32_t large = share_of(via, lc_wire_bytes_max(via)), small_max = via->link->small_max;
    via->window = small_max ? share_of(via, small_max) : large;
    via->large_units = (via->window + large - 1) / large;
}

/* ---- anew ---- */

/* Whether it was there or not. */
static void take_off(lc_interface *via, const lc_path *p) {
    uint16_t n = 0;
    for (int i = 0; i < LC_UPLINKS; i++)
        via->exits[i].n_paths = 0;
    for (uint16_t i = 0; i < via->n_paths; i++) {
        if (via->paths[i] == p)
            continue;
        via->paths[n++] = via->paths[i];
        lc_exit_of(via->paths[i])->n_paths += !via->paths[i]->pace.same_host;
    }
    via->n_paths = n;
    via->turn = 0;
}

static void forget(lc_host *h, lc_path *p) {
    lc_cell *next;
    for (lc_cell *cell = p->waiting.first; cell; cell = next) {
        next = cell->next;
        lc_cells_free(&p->interface->cells, cell);
    }
    for (uint32_t i = 0; i < h->n_late_fins;) {
        if (h->late_fins[i].process == p->number)
            h->late_fins[i] = h->late_fins[--h->n_late_fins];
        else
            i++;
    }
    lc_path fresh = {.number = p->number,
                     .interface = p->interface,
                     .records = p->records,
                     .early = p->early,
                     .held = p->held,
                     .units_at = p->units_at,
                     .pieces = p->pieces};
    *p = fresh;
    begin(h, p, h->now);
}

static void admit(lc_host *h, lc_admission *a) {
    lc_path *p = &h->paths[a->process];
    lc_interface *via = &h->interfaces[0]; /* there is no other where processes come and go */
    lc_seal *before = p->seal;
    lc_path_begin(h, p, via, h->now);
    take_off(via, p);
    lc_room had = lc_path_exchange(p, &a->room);
    forget(h, p);
    a->room = had;
    p->seal = a->seal;
    a->seal = before;
    a->code =
        a->address ? lc_path_reach(h, p, a->address) : lc_link_set_peer(via->link, p->number, NULL);
    lc_share_credits(h, via);
    p->tx_window = via->large_units;
}

/* Whether some group, also one that isn't closed yet, has the process. Under the lock. */
static int is_member(const lc_host *h, uint16_t process) {
    for (const lc_group *g = h->registered; g; g = g->next_registered)
        if (g->rank_of_process[process] != 0xFFFF)
            return 1;
    return 0;
}

void lc_admit_waiting(lc_host *h) {
    pthread_mutex_lock(&h->lock);
    while (h->admissions) {
        lc_admission *a = h->admissions;
        h->admissions = a->next;
        if (is_member(h, a->process))
            a->code = LC_E_ARGUMENT;
        else
            admit(h, a);
        pthread_cond_broadcast(&h->admitted);
    }
    pthread_mutex_unlock(&h->lock);
}
