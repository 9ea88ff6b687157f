"""Collectives in which every rank sends each owner its segment directly.

Two waits whatever the number of ranks, and a lost packet costs one contribution to one packet.
Source: "Transpose AllReduce" in Warraich et al., "OptiReduce", NSDI 2025 (arXiv 2310.06993);
the division by what arrived is that of Weintraub, Banner and Orda, arXiv 2507.07114.
"""

from __future__ import annotations

from collections.abc import Sequence

from .assembly import add, assemble, copy_own, receive, send_own
from .model import Edge, Finish, Missing, Plan
from .registry import Algorithm, register
from .segmented import segmented
from .signature import signature
from .validation import check_counts, check_finish, check_world, others, starts


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
    """Mean of all ranks' buffers, on all ranks, in place; ``order[s]`` reduces segment ``s``.

    Slot number ``s`` feeds the reduction of segment ``s``, ``world + s`` its copy back. Costs 2
    steps; each rank sends 2 (world - 1) / world of the buffer. The executor's ``scale`` makes the
    mean a sum (``world``) or leaves it (1).

    Args:
        world: Number of ranks.
        rank: This rank.
        elements: Elements of the buffer.
        elements_per_packet: Elements that one packet carries.
        order: A permutation of the ranks (:func:`~.order.draw_order`); None means 0, 1, 2, ...
        missing: What a reduced packet becomes at a rank that it never reaches.
        finish: MEAN, or WEIGHTED where contributions have weights.

    Returns:
        This rank's plan. With one rank it scales the buffer.

    Raises:
        ValueError: For a rank, count or order that the world does not allow, or another finish.
    """
    call = segmented(world, rank, elements, elements_per_packet, order, missing, finish)
    peers = others(world, rank)
    theirs = [(peer, *call.segments[call.positions[peer]]) for peer in peers]
    slots = [send_own(s, offset, length, Edge(peer, s)) for peer, s, offset, length in theirs]
    mine, offset, length = call.segments[call.positions[rank]]
    back = [Edge(peer, world + mine) for peer in peers]
    slots.append(add(mine, offset, offset, length, *back, sources=peers, finish=finish))
    slots += [
        receive(world + s, peer, offset, length, missing=missing)
        for peer, s, offset, length in theirs
    ]
    return call.plan("transpose", slots)


def reduce_scatter(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    finish: Finish = Finish.STRATIFIED,
) -> Plan:
    """Mean of all ranks' chunk ``r``, at rank ``r``; slot number ``s`` belongs to chunk ``s``.

    The owner of a chunk cannot be redrawn, so STRATIFIED is the unbiased finish (WEIGHTED is as
    well, with the right weights); without loss MEAN gives the same. Costs one step; each rank sends
    all chunks but its own.

    Args:
        world: Number of ranks.
        rank: This rank.
        counts: Elements of each rank's chunk; one number: of every chunk. The input holds the
            chunks one after another, the output is this rank's.
        elements_per_packet: Elements that one packet carries.
        finish: STRATIFIED, MEAN or WEIGHTED.

    Raises:
        ValueError: For a rank or count that the world does not allow, or finish NONE.
    """
    check_finish(finish, Finish.MEAN, Finish.STRATIFIED, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("counts", counts, world)
    begin = starts(sizes)
    peers = others(world, rank)
    slots = [send_own(s, begin[s], sizes[s], Edge(s, s)) for s in peers]
    if peers:
        slots.append(add(rank, 0, begin[rank], sizes[rank], sources=peers, finish=finish))
    else:  # There is nothing to add: the chunk is copied, as in an all-gather.
        slots.append(copy_own(rank, 0, begin[rank], sizes[rank]))
    return assemble(
        "reduce_scatter",
        "transpose",
        world,
        rank,
        elements_per_packet,
        sizes=(sum(sizes), sizes[rank]),
        slots=slots,
        sign=signature("reduce_scatter", "transpose", world, sizes, elements_per_packet),
    )


register(
    Algorithm(
        collective="all_reduce",
        name="transpose",
        build=all_reduce,
        summary="two steps at every world, and a lost packet costs one contribution",
        steps=lambda world: 2 if world > 1 else 0,
        traffic=lambda world: 2 * (world - 1) / world,
        # Two steps rather than 2 (world - 1) at every world and size: docs/design.md.
        default=True,
        draws_order=True,
    )
)
register(
    Algorithm(
        collective="reduce_scatter",
        name="transpose",
        build=reduce_scatter,
        summary="every rank sends each owner its chunk",
        steps=lambda world: 1 if world > 1 else 0,
        traffic=lambda world: (world - 1) / world,
        default=True,
        direct=True,
    )
)
