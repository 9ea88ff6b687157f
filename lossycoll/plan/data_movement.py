"""Collectives that move data and add nothing: every range goes straight to who needs it.

Nothing can be saved by hosts where every rank has something of its own for each other one: only the
packets between ranks of one host are larger. A packet that never arrives leaves the output as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .assembly import assemble, copy_own, receive, send_own
from .model import Edge, Level, Plan, Slot, signature
from .registry import Algorithm, register
from .tiers import RELIABLE
from .topology import Topology
from .validation import (
    check_count,
    check_counts,
    check_rank,
    check_topology,
    check_world,
    others,
    starts,
)


def all_to_all(
    world: int,
    rank: int,
    count: int,
    elements_per_packet: int,
    *,
    topology: Topology | None = None,
) -> Plan:
    """Chunk ``j`` of rank ``i``'s input becomes chunk ``i`` of rank ``j``'s output.

    A stream is numbered by the rank that it comes from. Costs one step; each rank sends all chunks
    but its own. Both buffers hold ``world`` chunks of ``count`` elements.
    """
    check_world(world, rank, elements_per_packet)
    sizes = (check_count("count", count),) * world
    fields = (world, sizes[0], elements_per_packet)
    return _exchange("direct", rank, sizes, sizes, elements_per_packet, topology, fields)


def all_to_all_uneven(
    world: int,
    rank: int,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    elements_per_packet: int,
    *,
    topology: Topology | None = None,
) -> Plan:
    """:func:`all_to_all` with chunks of any size.

    No rank knows the other ranks' counts, so the signature leaves them out. The caller makes sure
    that ``send_counts[j]`` here equals ``receive_counts[rank]`` at rank j. ValueError: the rank
    would send itself another number of elements than it expects.
    """
    check_world(world, rank, elements_per_packet)
    send = check_counts("send_counts", tuple(send_counts), world)
    expected = check_counts("receive_counts", tuple(receive_counts), world)
    if send[rank] != expected[rank]:
        raise ValueError(
            f"receive_counts[{rank}] is {expected[rank]}, wanted {send[rank]}: what rank {rank} "
            f"sends itself"
        )
    fields = (world, elements_per_packet)
    return _exchange("uneven", rank, send, expected, elements_per_packet, topology, fields)


def _exchange(
    name: str,
    rank: int,
    send: tuple[int, ...],
    expected: tuple[int, ...],
    elements_per_packet: int,
    topology: Topology | None,
    fields: tuple[Any, ...],
) -> Plan:
    to, at, peers = starts(send), starts(expected), others(len(send), rank)
    # What is received is numbered by its sender; what is sent needs numbers of its own here.
    slots = [send_own(len(send) + j, to[j], send[j], Edge(j, rank)) for j in peers]
    slots.append(copy_own(rank, at[rank], to[rank], send[rank]))
    slots += [receive(j, j, at[j], expected[j]) for j in peers]
    how = ("all_to_all", name, len(send), rank, elements_per_packet)
    return _assembled(*how, topology, (sum(send), sum(expected)), slots, fields)


def gather(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    root: int = 0,
    topology: Topology | None = None,
) -> Plan:
    """Every rank's chunk at ``root``, one after another; slot ``j`` belongs to rank j's chunk.

    Costs one step; each rank but the root sends its chunk once. ``counts`` are the elements of each
    rank's chunk; one number: of every chunk. The output is at the root alone.
    """

    def slots(sizes: tuple[int, ...], begin: tuple[int, ...]) -> list[Slot]:
        if rank != root:
            return [send_own(rank, 0, sizes[rank], Edge(root, rank))]
        own = copy_own(root, begin[root], 0, sizes[root])
        return [own, *[receive(j, j, begin[j], sizes[j]) for j in others(world, root)]]

    how = (world, rank, counts, elements_per_packet, root, topology)
    return _rooted("gather", *how, slots)


def scatter(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    root: int = 0,
    topology: Topology | None = None,
) -> Plan:
    """Chunk ``j`` of ``root``'s input at rank ``j``; slot ``j`` belongs to rank j's chunk.

    Costs one step; the root sends every chunk but its own once. ``counts`` are the elements of each
    rank's chunk; one number: of every chunk.
    """

    def slots(sizes: tuple[int, ...], begin: tuple[int, ...]) -> list[Slot]:
        if rank != root:
            return [receive(rank, root, 0, sizes[rank])]
        sent = [send_own(j, begin[j], sizes[j], Edge(j, j)) for j in others(world, root)]
        return [*sent, copy_own(root, 0, begin[root], sizes[root])]

    how = (world, rank, counts, elements_per_packet, root, topology)
    return _rooted("scatter", *how, slots)


def _rooted(
    collective: str,
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    root: int,
    topology: Topology | None,
    slots: Callable[[tuple[int, ...], tuple[int, ...]], list[Slot]],
) -> Plan:
    """A gather or a scatter. ``slots``: this rank's, given the chunks' sizes and offsets."""
    check_world(world, rank, elements_per_packet)
    check_rank("root", root, world)
    sizes = check_counts("counts", counts, world)
    own, whole = sizes[rank], sum(sizes) if rank == root else 0
    buffers = (own, whole) if collective == "gather" else (whole, own)
    fields = (world, sizes, elements_per_packet, root)
    how = (collective, "direct", world, rank, elements_per_packet)
    return _assembled(*how, topology, buffers, slots(sizes, starts(sizes)), fields)


def _assembled(
    collective: str,
    name: str,
    world: int,
    rank: int,
    elements_per_packet: int,
    topology: Topology | None,
    sizes: tuple[int, int],
    slots: list[Slot],
    fields: tuple[Any, ...],
) -> Plan:
    """The plan of slots that have one stream at most, those within a host on a level of their own.
    ``fields``: what goes into the signature."""
    levels: tuple[Level, ...] = ()
    if topology is not None and check_topology(topology, world).shares_hosts:
        levels = (Level(elements_per_packet * topology.host_packets, RELIABLE),)
        near = frozenset(topology.members_of_hosts[topology.hosts[rank]])
        slots = [
            replace(slot, level=1)
            if near.intersection([*slot.sources, *[dest.peer for dest in slot.dests]])
            else slot
            for slot in slots
        ]
        fields = (*fields, *topology.fields)
    sign = signature(collective, name, *fields)
    how = (collective, name, world, rank, elements_per_packet)
    return assemble(*how, sizes=sizes, slots=slots, sign=sign, levels=levels)


for collective, name, build, summary in (
    ("all_to_all", "direct", all_to_all, "every rank sends each other one its chunk"),
    (
        "all_to_all_uneven",
        "uneven",
        all_to_all_uneven,
        "every rank sends each other one its chunk; chunks of any size",
    ),
    ("gather", "direct", gather, "every rank sends its chunk to the root"),
    ("scatter", "direct", scatter, "the root sends every rank its chunk"),
):
    register(
        Algorithm(
            collective=collective,
            name=name,
            build=build,
            summary=summary,
            steps=lambda world: min(1, world - 1),
            traffic=(lambda world: min(1, world - 1) / world)
            if collective == "gather"
            else (lambda world: (world - 1) / world),
            default=True,
            direct=True,
            levels=True,
        )
    )
