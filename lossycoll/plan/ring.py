"""All-reduce along a ring: a partial sum of each segment goes around once, the mean once more.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009). What differs: packets pass on singly, as soon as they are
added, and a lost partial sum restarts at the next position with its own contribution.
"""

from __future__ import annotations

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
    check_order(order, world)
    position, cut = order.index(rank), segments(elements, world, elements_per_packet)
    before, after = order[position - 1], order[(position + 1) % world]
    sums: list[Slot] = []
    copies: list[Slot] = []
    scratch = 0
    # Segments as they come by, the rank's own first: partial sums are ``step`` hops old then.
    for step in range(world if world > 1 else 0):
        s = (position - step) % world
        offset, length = cut[s]
        onwards, back = Edge(after, s), Edge(after, world + s)
        if step == 0:
            sums.append(send_own(s, offset, length, onwards))
        elif step < world - 1:
            store = Target.SCRATCH
            sums.append(add(s, scratch, offset, length, onwards, sources=(before,), target=store))
            scratch += length
        else:
            sums.append(add(s, offset, offset, length, back, sources=(before,), finish=finish))
            break
        # The position before the one that finished a segment ends it.
        dests = () if step == world - 2 else (back,)
        copies.append(receive(world + s, before, offset, length, *dests, missing=missing))
    what = (world, elements, elements_per_packet, missing, order)
    return assemble(
        "all_reduce",
        "ring",
        world,
        rank,
        elements_per_packet,
        sizes=(elements, elements),
        slots=[*sums, *copies],
        sign=signature("all_reduce", "ring", *what),
    )


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
