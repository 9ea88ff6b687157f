"""Collectives that move data and add nothing: every range goes straight to who needs it."""

from __future__ import annotations

from collections.abc import Sequence

from .model import Edge, Plan, Slot, Target
from .signature import signature
from .validation import check_count, check_counts, check_rank, check_world, others, starts


def _send(number: int, own_offset: int, length: int, *dests: Edge) -> Slot:
    return Slot(
        number=number,
        offset=0,
        length=length,
        dests=dests,
        own=True,
        own_offset=own_offset,
        target=Target.NONE,
    )


def _keep(number: int, offset: int, own_offset: int, length: int, *dests: Edge) -> Slot:
    """Own data that goes to the own output (and to ``dests``)."""
    return Slot(
        number=number,
        offset=offset,
        length=length,
        dests=dests,
        own=True,
        own_offset=own_offset,
    )


def _receive(number: int, sender: int, offset: int, length: int) -> Slot:
    return Slot(number=number, offset=offset, length=length, sources=(sender,))


def _plan(
    names: tuple[str, str],
    world: int,
    rank: int,
    elements_per_packet: int,
    *,
    sizes: tuple[int, int],
    slots: list[Slot],
    sign: int,
) -> Plan:
    """``names``: collective and algorithm; ``sizes``: elements of the input and the output."""
    return Plan(
        collective=names[0],
        algorithm=names[1],
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=sizes[0],
        out_elements=sizes[1],
        scratch_elements=0,
        # A slot of no elements would still make its peers wait for its end.
        slots=tuple([slot for slot in slots if slot.length]),
        signature=sign,
    )


def all_gather(
    world: int, rank: int, counts: int | Sequence[int], elements_per_packet: int
) -> Plan:
    """Every rank's chunk on every rank, one after another.

    The input is this rank's chunk (``counts[rank]`` elements; one number: all chunks are of that
    size), the output all of them. Slot number ``j`` belongs to rank j's chunk. A packet that never
    arrives leaves the output as it was.

    Raises ValueError for a rank or count that the world doesn't allow.
    """
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("counts", counts, world)
    begin = starts(sizes)
    peers = others(world, rank)
    slots = [_keep(rank, begin[rank], 0, sizes[rank], *[Edge(peer, rank) for peer in peers])]
    slots += [_receive(j, j, begin[j], sizes[j]) for j in peers]
    sign = signature("all_gather", "direct", world, sizes, elements_per_packet)
    return _plan(
        ("all_gather", "direct"),
        world,
        rank,
        elements_per_packet,
        sizes=(sizes[rank], sum(sizes)),
        slots=slots,
        sign=sign,
    )


def _all_to_all(
    algorithm: str,
    world: int,
    rank: int,
    elements_per_packet: int,
    *,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    sign: int,
) -> Plan:
    to, at = starts(send), starts(receive)
    peers = others(world, rank)
    # What is received is numbered by its sender; what is sent needs numbers of its own here.
    slots = [_send(world + j, to[j], send[j], Edge(j, rank)) for j in peers]
    slots.append(_keep(rank, at[rank], to[rank], send[rank]))
    slots += [_receive(j, j, at[j], receive[j]) for j in peers]
    return _plan(
        ("all_to_all", algorithm),
        world,
        rank,
        elements_per_packet,
        sizes=(sum(send), sum(receive)),
        slots=slots,
        sign=sign,
    )


def all_to_all(world: int, rank: int, count: int, elements_per_packet: int) -> Plan:
    """Chunk ``j`` of rank ``i``'s input becomes chunk ``i`` of rank ``j``'s output.

    Every chunk has ``count`` elements; both buffers hold ``world`` chunks. A stream is numbered by
    the rank it comes from.

    Raises ValueError for a rank or count that the world doesn't allow.
    """
    check_world(world, rank, elements_per_packet)
    sizes = (check_count("count", count),) * world
    sign = signature("all_to_all", "direct", world, sizes[0], elements_per_packet)
    return _all_to_all(
        "direct", world, rank, elements_per_packet, send=sizes, receive=sizes, sign=sign
    )


def all_to_all_uneven(
    world: int,
    rank: int,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    elements_per_packet: int,
) -> Plan:
    """:func:`all_to_all` with chunks of any size.

    ``send_counts[j]`` elements go to rank j, ``receive_counts[j]`` come from it. No rank knows
    the other ranks' counts, so the signature leaves them out: that ``send_counts[j]`` here equals
    ``receive_counts[rank]`` at rank j is for the caller to ensure.

    Raises ValueError for a rank or count that the world doesn't allow, and if the rank would send
    itself another number of elements than it expects.
    """
    check_world(world, rank, elements_per_packet)
    send = check_counts("send_counts", tuple(send_counts), world)
    receive = check_counts("receive_counts", tuple(receive_counts), world)
    if send[rank] != receive[rank]:
        raise ValueError(
            f"receive_counts[{rank}] is {receive[rank]}, wanted {send[rank]}: what rank {rank} "
            f"sends itself"
        )
    sign = signature("all_to_all", "uneven", world, elements_per_packet)
    return _all_to_all(
        "uneven", world, rank, elements_per_packet, send=send, receive=receive, sign=sign
    )


def gather(
    world: int, rank: int, counts: int | Sequence[int], elements_per_packet: int, *, root: int = 0
) -> Plan:
    """Every rank's chunk at ``root``, one after another; other ranks have no output.

    Slot number ``j`` belongs to rank j's chunk (``counts[j]`` elements; one number: all of that
    size). Raises ValueError for a rank, root or count that the world doesn't allow.
    """
    check_world(world, rank, elements_per_packet)
    check_rank("root", root, world)
    sizes = check_counts("counts", counts, world)
    begin = starts(sizes)
    if rank == root:
        slots = [_keep(root, begin[root], 0, sizes[root])]
        slots += [_receive(j, j, begin[j], sizes[j]) for j in others(world, root)]
    else:
        slots = [_send(rank, 0, sizes[rank], Edge(root, rank))]
    sign = signature("gather", "direct", world, sizes, elements_per_packet, root)
    return _plan(
        ("gather", "direct"),
        world,
        rank,
        elements_per_packet,
        sizes=(sizes[rank], sum(sizes) if rank == root else 0),
        slots=slots,
        sign=sign,
    )


def scatter(
    world: int, rank: int, counts: int | Sequence[int], elements_per_packet: int, *, root: int = 0
) -> Plan:
    """Chunk ``j`` of ``root``'s input at rank ``j``; other ranks have no input.

    Slot number ``j`` belongs to rank j's chunk (``counts[j]`` elements; one number: all of that
    size). Raises ValueError for a rank, root or count that the world doesn't allow.
    """
    check_world(world, rank, elements_per_packet)
    check_rank("root", root, world)
    sizes = check_counts("counts", counts, world)
    begin = starts(sizes)
    if rank == root:
        slots = [_send(j, begin[j], sizes[j], Edge(j, j)) for j in others(world, root)]
        slots.append(_keep(root, 0, begin[root], sizes[root]))
    else:
        slots = [_receive(rank, root, 0, sizes[rank])]
    sign = signature("scatter", "direct", world, sizes, elements_per_packet, root)
    return _plan(
        ("scatter", "direct"),
        world,
        rank,
        elements_per_packet,
        sizes=(sum(sizes) if rank == root else 0, sizes[rank]),
        slots=slots,
        sign=sign,
    )


def point_to_point(
    world: int, rank: int, elements: int, elements_per_packet: int, *, sender: int, receiver: int
) -> Plan:
    """``elements`` from ``sender`` to ``receiver``; any other rank's plan is empty.

    Raises ValueError for a rank or count that the world doesn't allow, or a sender that is the
    receiver.
    """
    check_world(world, rank, elements_per_packet)
    check_rank("sender", sender, world)
    check_rank("receiver", receiver, world)
    if sender == receiver:
        raise ValueError(f"receiver is {receiver}, wanted another rank than the sender's {sender}")
    elements = check_count("elements", elements)
    slots = []
    if rank == sender:
        slots.append(_send(0, 0, elements, Edge(receiver, 0)))
    elif rank == receiver:
        slots.append(_receive(0, sender, 0, elements))
    sign = signature(
        "point_to_point", "direct", world, elements, elements_per_packet, sender, receiver
    )
    return _plan(
        ("point_to_point", "direct"),
        world,
        rank,
        elements_per_packet,
        sizes=(elements if rank == sender else 0, elements if rank == receiver else 0),
        slots=slots,
        sign=sign,
    )
