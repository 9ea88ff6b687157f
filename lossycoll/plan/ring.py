"""All-reduce along a ring: a partial sum of each segment goes around once, the mean once more.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009). What differs: packets pass on singly, as soon as they are
added, and a lost partial sum restarts at the next position with its own contribution.
"""

from __future__ import annotations

from .model import Combine, Edge, Finish, Missing, Plan, Slot, Target
from .order import segments
from .signature import signature
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

    Segment ``s`` starts at ``order[s]`` and is complete one position before it, at
    ``order[s - 1]``; slot number ``s`` carries its partial sums, ``world + s`` its copies.
    ``order`` is a permutation of the ranks (:func:`~.order.draw_order`); None means 0, 1, 2, ...
    ``missing`` says what a reduced packet becomes at a rank that it never reaches.

    Raises ValueError for a rank, count or order that the world doesn't allow, or a finish other
    than MEAN and WEIGHTED.
    """
    check_finish(finish, Finish.MEAN, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    elements = check_count("elements", elements)
    order = tuple(range(world)) if order is None else order
    place = check_order(order, world)
    cut = segments(elements, world, elements_per_packet)
    position = place[rank]
    before = order[position - 1]
    after = order[(position + 1) % world]
    slots: list[Slot] = []
    scratch = 0
    # A segment is `step` hops old when its partial sum is here; both loops go by age, which is
    # the order in which packets arrive.
    for step in range(world if world > 1 else 0):
        s = (position - step) % world
        offset, length = cut[s]
        if not length:
            continue
        if step == 0:
            slots.append(
                Slot(
                    number=s,
                    offset=0,
                    length=length,
                    dests=(Edge(after, s),),
                    own=True,
                    own_offset=offset,
                    target=Target.NONE,
                )
            )
            continue
        last = step == world - 1
        slots.append(
            Slot(
                number=s,
                offset=offset if last else scratch,
                length=length,
                sources=(before,),
                dests=(Edge(after, world + s if last else s),),
                combine=Combine.ADD,
                own=True,
                own_offset=offset,
                finish=finish if last else Finish.NONE,
                target=Target.OUT if last else Target.SCRATCH,
            )
        )
        if not last:
            scratch += length
    for step in range(world - 1):
        s = (position - step) % world
        offset, length = cut[s]
        if length:
            # The position before the one that finished the segment is the last to need it.
            last = step == world - 2
            slots.append(
                Slot(
                    number=world + s,
                    offset=offset,
                    length=length,
                    sources=(before,),
                    dests=() if last else (Edge(after, world + s),),
                    missing=missing,
                )
            )
    return Plan(
        collective="all_reduce",
        algorithm="ring",
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=elements,
        out_elements=elements,
        scratch_elements=scratch,
        slots=tuple(slots),
        signature=signature(
            "all_reduce", "ring", world, elements, elements_per_packet, missing, order
        ),
    )
