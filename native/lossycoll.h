/* lossycoll native engine: the whole public C interface.
 *
 * Its parts are below, a part for each link with functions of its own. In each,
 * native/build_cffi.py reads what is between the two cdef marks as it stands, so it holds plain
 * declarations only. docs/streams.md explains the state machine.
 */
#ifndef LOSSYCOLL_H
#define LOSSYCOLL_H

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "lossycoll needs a little-endian host: packets and planes of bits are in the host's order"
#endif

/* Each stands on those above it. */
// clang-format off
#include "lossycoll_types.h"
#include "lossycoll_plan.h"
#include "lossycoll_stats.h"
#include "lossycoll_verbs.h"
#include "lossycoll_host.h"
#include "lossycoll_out_of_band.h"
#include "lossycoll_group.h"
#include "lossycoll_codec.h"
// clang-format on
#endif
