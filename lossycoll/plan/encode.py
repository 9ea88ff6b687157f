"""A plan as the native engine reads it: the arrays of lc_slot_desc and lc_edge, as bytes."""

from __future__ import annotations

import struct
from typing import Final

from .model import MAX_LEVELS, MOST_SLOTS, Plan

SLOT: Final = struct.Struct("<QQQIIIHBBBBBBHH")
"""lc_slot_desc of native/lossycoll.h: 48 bytes. An lc_edge is two shorts."""


def encode(plan: Plan) -> tuple[bytes, bytes]:
    """The tables of a plan, little-endian, as all machines that are supported.

    The edges of a slot lie together, its sources (whose slot field is 0) before its dests, and
    slots follow in the plan's order.

    Returns (slot table, edge table): 48 bytes per slot and 4 per edge.
    """
    slots = bytearray()
    edges: list[int] = []
    if len(plan.all_levels) > MAX_LEVELS:
        raise ValueError(f"{len(plan.all_levels)} levels, wanted {MAX_LEVELS} at most")
    highest = max([slot.number for slot in plan.slots], default=0)
    if highest >= MOST_SLOTS:
        raise ValueError(
            f"the {plan.collective} plan doesn't fit the native table: a slot has number "
            f"{highest}, wanted {MOST_SLOTS - 1} at most"
        )
    try:
        for slot in plan.slots:
            slots += SLOT.pack(
                slot.offset,
                slot.length,
                slot.own_offset,
                len(edges) // 2,
                len(slot.sources),
                len(slot.dests),
                slot.number,
                slot.combine,
                slot.own,
                slot.finish,
                slot.target,
                slot.missing,
                slot.level,
                slot.feed,
                slot.full_weight,
            )
            for source in slot.sources:
                edges += (source, 0)
            for dest in slot.dests:
                edges += (dest.peer, dest.slot)
        return bytes(slots), struct.pack(f"<{len(edges)}H", *edges)
    except struct.error as error:
        raise ValueError(
            f"the {plan.collective} plan doesn't fit the native table: {error}"
        ) from None
