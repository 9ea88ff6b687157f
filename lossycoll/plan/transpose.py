"""Collectives in which every rank sends each owner its segment directly.

Two waits whatever the number of ranks, and a lost packet costs one contribution to one packet.
Source: "Transpose AllReduce" in Warraich et al., "OptiReduce", NSDI 2025 (arXiv 2310.06993);
the division by what arrived is that of Weintraub, Banner and Orda, arXiv 2507.07114.
"""

from __future__ import annotations

from collections.abc import Sequence

from .model import Combine, Edge, Finish, Missing, Plan, Slot, Target
from .order import segments
from .signature import signature
from .validation import (
    check_count,
    check_counts,
    check_finish,
    check_order,
    check_world,
    others,
    starts,
)


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
    """Mean of all ranks' buffers, on all ranks, in place; segment ``s`` is reduced by ``order[s]``.

    Slot number ``s`` feeds the reduction of segment ``s``, ``world + s`` its copy back.
    ``order`` is a permutation of the ranks (:func:`~.order.draw_order`); None means 0, 1, 2, ...
    ``missing`` says what a reduced packet becomes at a rank that it never reaches.
    The executor's ``scale`` makes the mean a sum (``world``) or leaves it (1).

    Raises ValueError for a rank, count or order that the world doesn't allow, or a finish other
    than MEAN and WEIGHTED.
    """
    check_finish(finish, Finish.MEAN, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    elements = check_count("elements", elements)
    order = tuple(range(world)) if order is None else order
    place = check_order(order, world)
    cut = segments(elements, world, elements_per_packet)
    slots: list[Slot] = []
    peers = others(world, rank)
    for peer in peers:
        s = place[peer]
        offset, length = cut[s]
        if length:
            slots.append(
                Slot(
                    number=s,
                    offset=0,
                    length=length,
                    dests=(Edge(peer, s),),
                    own=True,
                    own_offset=offset,
                    target=Target.NONE,
                )
            )
    mine = place[rank]
    offset, length = cut[mine]
    if length:
        slots.append(
            Slot(
                number=mine,
                offset=offset,
                length=length,
                sources=peers,
                dests=tuple([Edge(peer, world + mine) for peer in peers]),
                combine=Combine.ADD,
                own=True,
                own_offset=offset,
                finish=finish,
            )
        )
    for peer in peers:
        s = place[peer]
        offset, length = cut[s]
        if length:
            slots.append(
                Slot(
                    number=world + s,
                    offset=offset,
                    length=length,
                    sources=(peer,),
                    missing=missing,
                )
            )
    return Plan(
        collective="all_reduce",
        algorithm="transpose",
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=elements,
        out_elements=elements,
        scratch_elements=0,
        slots=tuple(slots),
        signature=signature(
            "all_reduce", "transpose", world, elements, elements_per_packet, missing, order
        ),
    )


def reduce_scatter(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    finish: Finish = Finish.STRATIFIED,
) -> Plan:
    """Mean of all ranks' chunk ``r``, at rank ``r``.

    The input holds the chunks one after another, ``counts[r]`` elements each (one number: all of
    that size); the output is this rank's chunk. Slot number ``s`` belongs to chunk ``s``. The owner
    can't be redrawn here, so ``STRATIFIED`` is the unbiased finish (``WEIGHTED`` is as well, with
    the right weights); without loss ``MEAN`` is equal.

    Raises ValueError for a rank or count that the world doesn't allow, or finish ``NONE``.
    """
    check_finish(finish, Finish.MEAN, Finish.STRATIFIED, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("counts", counts, world)
    begin = starts(sizes)
    peers = others(world, rank)
    slots = [
        Slot(
            number=s,
            offset=0,
            length=sizes[s],
            dests=(Edge(s, s),),
            own=True,
            own_offset=begin[s],
            target=Target.NONE,
        )
        for s in peers
        if sizes[s]
    ]
    if sizes[rank]:
        slots.append(
            Slot(
                number=rank,
                offset=0,
                length=sizes[rank],
                sources=peers,
                # Alone there is nothing to add: the chunk is copied, as in an all-gather.
                combine=Combine.ADD if peers else Combine.COPY,
                own=True,
                own_offset=begin[rank],
                finish=finish if peers else Finish.NONE,
            )
        )
    return Plan(
        collective="reduce_scatter",
        algorithm="transpose",
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=sum(sizes),
        out_elements=sizes[rank],
        scratch_elements=0,
        slots=tuple(slots),
        signature=signature("reduce_scatter", "transpose", world, sizes, elements_per_packet),
    )
