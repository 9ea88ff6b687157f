"""All-reduce along a ring: a partial sum of each segment goes around once, the mean once more.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009). What differs: packets pass on singly, as soon as they are
added, and a lost partial sum restarts at the next position with its own contribution.
"""

from __future__ import annotations

from .assembly import add, receive, send_own
from .model import Edge, Finish, Missing, Plan, Slot, Target
from .registry import Algorithm, register
from .segmented import SegmentedAllReduce, segmented


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
    which overlap packet by packet; each rank sends 2 (world - 1) / world of the buffer.

    Args:
        world: Number of ranks.
        rank: This rank.
        elements: Elements of the buffer.
        elements_per_packet: Elements that one packet carries.
        order: A permutation of the ranks (:func:`~.order.draw_order`); None means 0, 1, 2, ...
        missing: What a reduced packet becomes at a rank that it never reaches.
        finish: MEAN, or WEIGHTED where contributions have weights.

    Returns:
        This rank's plan. With one rank it has no slots.

    Raises:
        ValueError: For a rank, count or order that the world does not allow, or another finish.
    """
    call = segmented(world, rank, elements, elements_per_packet, order, missing, finish)
    if world == 1:
        return call.plan("ring", [])
    slots, scratch_elements = _sums(call)
    return call.plan("ring", [*slots, *_copies(call)], scratch_elements)


def _neighbours(call: SegmentedAllReduce) -> tuple[int, int, int]:
    """(this rank's position, the rank before it, the rank after it)."""
    position = call.positions[call.rank]
    return position, call.order[position - 1], call.order[(position + 1) % call.world]


def _sums(call: SegmentedAllReduce) -> tuple[list[Slot], int]:
    """The first time around, and the elements of scratch memory that partial sums take.

    A partial sum is ``step`` hops old when it is here. Going by age is going in the order in which
    packets arrive.
    """
    position, before, after = _neighbours(call)
    slots = []
    scratch = 0
    for step in range(call.world):
        s, offset, length = call.segments[position - step]
        if step == 0:
            slots.append(send_own(s, offset, length, Edge(after, s)))
        elif step < call.world - 1:
            onwards, store = Edge(after, s), Target.SCRATCH
            slots.append(add(s, scratch, offset, length, onwards, sources=(before,), target=store))
            scratch += length
        else:
            onwards = Edge(after, call.world + s)
            slots.append(
                add(s, offset, offset, length, onwards, sources=(before,), finish=call.finish)
            )
    return slots, scratch


def _copies(call: SegmentedAllReduce) -> list[Slot]:
    """The second time around. The position before the one that finished a segment ends it."""
    position, before, after = _neighbours(call)
    slots = []
    for step in range(call.world - 1):
        s, offset, length = call.segments[position - step]
        last = step == call.world - 2
        onwards = () if last else (Edge(after, call.world + s),)
        number = call.world + s
        slots.append(receive(number, before, offset, length, *onwards, missing=call.missing))
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
