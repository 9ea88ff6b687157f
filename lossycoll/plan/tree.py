"""Barrier along a tree, up and down: no rank has more than ``fanout`` children.

The tree is the one of a heap: with a fanout of 2, rank ``v`` has the children ``2v + 1`` and
``2v + 2``.
"""

from __future__ import annotations

from typing import Final

from .assembly import add, assemble, receive, send_own
from .model import Edge, Plan, Slot, Target
from .registry import Algorithm, register
from .signature import signature
from .validation import check_world

BARRIER_FANOUT: Final = 4
"""A barrier's: each rank sends one small packet to each child, which costs less than one more level
of the tree."""


def barrier(
    world: int, rank: int, elements_per_packet: int = 1, *, fanout: int = BARRIER_FANOUT
) -> Plan:
    """Ends on no rank before every rank has begun it. It must run with reliable delivery.

    One float32 element, in place, is added up the tree (slot number 0) and its sum is copied down
    (number 1): a buffer of 1.0 comes back as ``world``, which the caller may check. Costs twice the
    tree's depth in steps.
    """
    check_world(world, rank, elements_per_packet)
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}, wanted 1 or more")
    parent = ((rank - 1) // fanout,) if rank else ()
    children = tuple(range(fanout * rank + 1, min(fanout * (rank + 1) + 1, world)))
    up = [Edge(above, 0) for above in parent]
    down = [Edge(child, 1) for child in children]
    slots: list[Slot] = []
    if parent:
        if children:
            slots.append(add(0, 0, 0, 1, *up, sources=children, target=Target.SCRATCH))
        else:
            slots.append(send_own(0, 0, 1, *up))
        slots.append(receive(1, parent[0], 0, 1, *down))
    elif children:
        slots.append(add(0, 0, 0, 1, *down, sources=children))
    return assemble(
        "barrier",
        "tree",
        world,
        rank,
        elements_per_packet,
        sizes=(1, 1),
        slots=slots,
        sign=signature("barrier", "tree", world, elements_per_packet, fanout),
        scratch_elements=1 if parent and children else 0,
    )


def broadcast_steps(world: int, fanout: int = 2) -> int:
    """Hops from the root to the deepest of ``world`` ranks."""
    hops, deepest = 0, world - 1
    while deepest:
        hops, deepest = hops + 1, (deepest - 1) // fanout
    return hops


register(
    Algorithm(
        collective="barrier",
        name="tree",
        build=barrier,
        summary="up a tree and down again; no rank has more than four children",
        steps=lambda world: 2 * broadcast_steps(world, BARRIER_FANOUT),
        # The root's children down; or those of another rank, and up to one.
        traffic=lambda world: min(world - 1, BARRIER_FANOUT + (world > 2 * BARRIER_FANOUT)),
        default=True,
        partial_sums=True,
    )
)
