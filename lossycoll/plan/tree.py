"""Collectives along a tree: no rank sends more than ``fanout`` copies of anything.

The tree is the one of a heap: with ranks counted from the root and a fanout of 2, ``v`` has the
children ``2v + 1`` and ``2v + 2``. With a fanout of the world nobody but the root passes anything
on, so that nobody but the root is missed when it dies.
"""

from __future__ import annotations

from .model import Combine, Edge, Plan, Slot, Target
from .signature import signature
from .validation import check_count, check_rank, check_world


def _family(
    world: int, rank: int, root: int, fanout: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the parent, or nothing at the root; the children), as ranks."""
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}, wanted 1 or more")
    v = (rank - root) % world
    parent = (((v - 1) // fanout + root) % world,) if v else ()
    children = range(fanout * v + 1, min(fanout * (v + 1) + 1, world))
    return parent, tuple((child + root) % world for child in children)


def broadcast(
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    *,
    root: int = 0,
    fanout: int = 2,
) -> Plan:
    """``root``'s buffer on all ranks, in place. One slot each, number 0.

    A packet that never arrives leaves the buffer as it was, at that rank and below it in the tree.
    Raises ValueError for a rank, root or count that the world doesn't allow.
    """
    check_world(world, rank, elements_per_packet)
    check_rank("root", root, world)
    elements = check_count("elements", elements)
    parent, children = _family(world, rank, root, fanout)
    slots = []
    if elements and world > 1:
        slots.append(
            Slot(
                number=0,
                offset=0,
                length=elements,
                sources=parent,
                dests=tuple(Edge(child, 0) for child in children),
                own=not parent,
                target=Target.OUT if parent else Target.NONE,
            )
        )
    return Plan(
        collective="broadcast",
        algorithm="tree",
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=elements,
        out_elements=elements,
        scratch_elements=0,
        slots=tuple(slots),
        signature=signature(
            "broadcast", "tree", world, elements, elements_per_packet, root, fanout
        ),
    )


def barrier(world: int, rank: int, elements_per_packet: int = 1, *, fanout: int = 2) -> Plan:
    """Ends on no rank before every rank has begun it. To be run reliably.

    One float32 element, in place, is added up the tree (slot number 0) and its sum is copied down
    (number 1): a buffer of 1.0 comes back as ``world``, which the caller may check.
    Raises ValueError for a rank that the world doesn't have.
    """
    check_world(world, rank, elements_per_packet)
    parent, children = _family(world, rank, 0, fanout)
    up = tuple(Edge(above, 0) for above in parent)
    down = tuple(Edge(child, 1) for child in children)
    slots = []
    if not parent and children:
        slots.append(
            Slot(
                number=0,
                offset=0,
                length=1,
                sources=children,
                dests=down,
                combine=Combine.ADD,
                own=True,
            )
        )
    elif parent:
        slots.append(
            Slot(
                number=0,
                offset=0,
                length=1,
                sources=children,
                dests=up,
                combine=Combine.ADD if children else Combine.COPY,
                own=True,
                target=Target.SCRATCH if children else Target.NONE,
            )
        )
        slots.append(Slot(number=1, offset=0, length=1, sources=parent, dests=down))
    return Plan(
        collective="barrier",
        algorithm="tree",
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=1,
        out_elements=1,
        scratch_elements=1 if parent and children else 0,
        slots=tuple(slots),
        signature=signature("barrier", "tree", world, elements_per_packet, fanout),
    )
