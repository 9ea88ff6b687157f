/* What becomes of a train on its way: uplinks, link, downlinks. No system calls and no clock here.
 */
#ifndef LAB_PATHS_H
#define LAB_PATHS_H

#include "frame.h"
#include "lab.h"

typedef struct {
    int64_t free_at; /* ns: when what is queued has left */
} lab_queue;

typedef struct {
    lab_queue queue;
    uint64_t chance; /* state of the generator that decides on loss, doubles and order */
    uint64_t wander; /* and of that for the jitter */
    int64_t last_at; /* no packet arrives before the one in front of it, but those held back */
    int64_t turn_at; /* jitter goes from turn_from at turn_at to turn_to at turn_end */
    int64_t turn_end;
    double turn_from, turn_to; /* -1 to 1 */
    uint8_t was_lost;
} lab_way;

/* Trains by when they are due, a binary heap. */
typedef struct {
    lab_train *train;
    uint32_t count, room;
    uint64_t order;
} lab_schedule;

typedef struct {
    lab_shared *shared;
    lab_rate up[LAB_HOSTS], down[LAB_HOSTS]; /* the tables in force */
    lab_rate site_up[LAB_HOSTS], site_down[LAB_HOSTS];
    lab_link link[LAB_HOSTS * LAB_HOSTS];
    lab_queue up_queue[LAB_HOSTS], down_queue[LAB_HOSTS];
    lab_queue site_up_queue[LAB_HOSTS], site_down_queue[LAB_HOSTS];
    lab_way way[LAB_HOSTS * LAB_HOSTS];
    lab_schedule schedule;
    lab_store store;
} lab_paths;

void lab_paths_init(lab_paths *paths, lab_shared *shared);
void lab_paths_free(lab_paths *paths);
/* Reads the tables again. */
void lab_paths_change(lab_paths *paths);
/* A frame that ``from`` sends to ``to`` at ``now``; the paths own it from here on. */
void lab_paths_enter(lab_paths *paths, lab_frame *frame, uint32_t from, uint32_t to, int64_t now);
/* Takes the next train that has reached its host by ``now``. Returns 0 when there is none; then
 * next_ns is when to look again, or -1. The caller drops the train's frame. */
int lab_paths_due(lab_paths *paths, int64_t now, lab_train *train, int64_t *next_ns);

#endif
