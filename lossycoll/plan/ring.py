"""All-reduce along a ring: a partial sum of each segment goes around once, the mean once more.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009). What differs: packets pass on singly, as soon as they are
added, and a lost partial sum restarts at the next position with its own contribution.
"""

from __future__ import annotations

from typing import NamedTuple

from .assembly import add, assemble, receive, send_own
from .model import Edge, Finish, Missing, Plan, Slot, Target, signature
from .order import segments
from .registry import Algorithm, register
from .validation import check_count, check_finish, check_order, check_world


def all_reduce(
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    *,
    order: tuple[int, ...] | None = None,
    missing: Missing = Missing.OWN,
    finish: Finish = Finish.MEAN,
) -> Plan:
    """Mean of all ranks' buffers, on all ranks, in place, around the ring ``order``.

    Segment ``s`` starts at ``order[s]`` and is complete one position before, at ``order[s - 1]``.
    Slot number ``s`` carries its partial sums, ``world + s`` its copies. Costs 2 (world - 1) steps,
    which overlap packet by packet; each rank sends 2 (world - 1) / world of the buffer. ``missing``
    is what a reduced packet becomes at a rank that it never reaches. One rank's plan has no slots.
    """
    check_finish(finish, Finish.MEAN, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    elements = check_count("elements", elements)
    order = tuple(range(world)) if order is None else order
    position = check_order(order, world)[rank]
    slots: list[Slot] = []
    scratch = 0
    if world > 1:
        cut = segments(elements, world, elements_per_packet)
        before, after = order[position - 1], order[(position + 1) % world]
        # As they come by: each rank's own first.
        numbers = [(position - step) % world for step in range(world)]
        ring = _Ring(before, after, [(s, *cut[s]) for s in numbers])
        slots, scratch = _sums(ring, finish)
        slots += _copies(ring, missing)
    what = (world, elements, elements_per_packet, missing, order)
    return assemble(
        "all_reduce",
        "ring",
        world,
        rank,
        elements_per_packet,
        sizes=(elements, elements),
        slots=slots,
        sign=signature("all_reduce", "ring", *what),
        scratch_elements=scratch,
    )


class _Ring(NamedTuple):
    """A rank's place in the ring."""

    before: int  # the rank that sends to this one
    after: int  # the rank that this one sends to
    # (number, offset, length), in the order in which they come by
    segments: list[tuple[int, int, int]]


def _sums(ring: _Ring, finish: Finish) -> tuple[list[Slot], int]:
    """The first time around, and the elements of scratch memory that partial sums take.

    A partial sum is ``step`` hops old when it is here. Going by age is going in the order in which
    packets arrive.
    """
    before, after, world = ring.before, ring.after, len(ring.segments)
    slots = []
    scratch = 0
    for step, (s, offset, length) in enumerate(ring.segments):
        if step == 0:
            slots.append(send_own(s, offset, length, Edge(after, s)))
        elif step < world - 1:
            onwards, store = Edge(after, s), Target.SCRATCH
            slots.append(add(s, scratch, offset, length, onwards, sources=(before,), target=store))
            scratch += length
        else:
            onwards = Edge(after, world + s)
            slots.append(add(s, offset, offset, length, onwards, sources=(before,), finish=finish))
    return slots, scratch


def _copies(ring: _Ring, missing: Missing) -> list[Slot]:
    """The second time around. The position before the one that finished a segment ends it."""
    world = len(ring.segments)
    slots = []
    for step, (s, offset, length) in enumerate(ring.segments[:-1]):
        number = world + s
        onwards = () if step == world - 2 else (Edge(ring.after, number),)
        slots.append(receive(number, ring.before, offset, length, *onwards, missing=missing))
    return slots


register(
    Algorithm(
        collective="all_reduce",
        name="ring",
        build=all_reduce,
        summary="partial sums go around a ring, then means; each rank sends to one peer only",
        steps=lambda world: 2 * (world - 1),
        traffic=lambda world: 2 * (world - 1) / world,
        # A ring of one has nothing to do, but the mean over a last survivor is still to be scaled.
        serves=lambda world: world > 1,
        draws_order=True,
        partial_sums=True,
    )
)
