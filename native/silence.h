/* Paths that are dead in a direction, or both, though the process at the other end lives. */
#ifndef LC_SILENCE_H
#define LC_SILENCE_H

#include "state.h"

/* A datagram goes there now. */
void lc_note_sent(lc_host *h, lc_path *p);
/* The age that an ACK carries: how long ago this process last heard anything from there. */
uint16_t lc_heard_age(const lc_host *h, const lc_path *p);
/* The peer's ACK says how long ago it last heard anything from here. */
void lc_note_reached(lc_host *h, lc_path *p, uint16_t age);

/* How long the operation waits for a member of which nothing comes, or that hears nothing:
 * deadline_max; or as long as an answer takes, where that link was found dead before. */
uint64_t lc_patience(const lc_op *op, uint16_t peer);
/* Whether the operation has waited for longer than that in vain: lc_silence, or 0. The group's
 * figures tell of it, unless the operation's caller has its result. */
enum lc_silence lc_find_silence(lc_op *op, uint16_t peer, uint64_t patience);
/* How long the member has heard nothing of what is sent to it, as it says itself; since `begin` at
 * most. */
uint64_t lc_unheard_ns(const lc_member *m, uint64_t begin);
/* What is known now. */
enum lc_silence lc_silence_of(const lc_group *g, const lc_member *m);
/* Nothing has come from there for so long that a filter on the way may have forgotten the flow:
 * what goes ahead of the peer's first word might not arrive. */
int lc_may_be_forgotten(const lc_host *h, const lc_path *p);
/* Says something where nothing was sent for long, so that no filter on the way forgets the flow. */
void lc_keep_alive(const lc_host *h, lc_path *p);

#endif
