/* Flows of TCP between hosts of a simulated network: they share its ports and queues with the
 * engines, and send as much as their windows let them.
 *
 * A packet has a new number each time that it is sent, so what is lost is known from what comes
 * (as with SACK), and nothing comes twice. A packet that another has overtaken looks lost. */
#ifndef LC_TCP_H
#define LC_TCP_H

#include "link_memory.h"
#include "tcp_law.h"

typedef struct tcp_flows tcp_flows;

/* NULL: no memory. `packet` and `ack`: bytes of theirs, as of memory_send_foreign; `payload`: of
 * data in a packet. It hears the net's foreign packets. */
tcp_flows *tcp_flows_new(memory_net *net, uint32_t packet, uint32_t ack, uint32_t payload);
void tcp_flows_free(tcp_flows *flows);
/* From a place to another, from now on, for such a share of each second. Returns its number; -1: no
 * memory. */
int tcp_flows_add(tcp_flows *flows, uint16_t from, uint16_t to, int kind, double share);
/* What timers ask for by now. */
void tcp_flows_turn(tcp_flows *flows);
/* When it next has a turn by itself; UINT64_MAX: there is no flow. */
uint64_t tcp_flows_next(const tcp_flows *flows);
/* Bytes of data that its receiver has, and packets that it sent for others that were lost. */
void tcp_flows_took(const tcp_flows *flows, int number, uint64_t *bytes, uint64_t *resent);

#endif
