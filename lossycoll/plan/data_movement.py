"""Collectives that move data and add nothing: every range goes straight to who needs it.

Nothing can be saved by hosts where every rank has something of its own for each other one: only the
packets between ranks of one host are larger. A packet that never arrives leaves the output as it
was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .assembly import assemble, copy_own, receive, send_own
from .model import Edge, Level, Plan, signature
from .registry import DIRECT, Algorithm, register
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

    Costs one step; each rank sends all chunks but its own. Both buffers hold ``world`` chunks of
    ``count`` elements.
    """
    check_world(world, rank, elements_per_packet)
    sizes = (check_count("count", count),) * world
    fields = (world, sizes[0], elements_per_packet)
    how = (sizes, sizes, elements_per_packet, topology, fields)
    return _exchange("all_to_all", "direct", rank, *how)


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
    how = (send, expected, elements_per_packet, topology, fields)
    return _exchange("all_to_all", "uneven", rank, *how)


def gather(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    root: int = 0,
    topology: Topology | None = None,
) -> Plan:
    """Every rank's chunk at ``root``, one after another.

    Costs one step; each rank but the root sends its chunk once. ``counts`` are the elements of each
    rank's chunk; one number: of every chunk. The output is at the root alone.
    """
    return _rooted("gather", world, rank, counts, elements_per_packet, root, topology)


def scatter(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    root: int = 0,
    topology: Topology | None = None,
) -> Plan:
    """Chunk ``j`` of ``root``'s input at rank ``j``.

    Costs one step; the root sends every chunk but its own once. ``counts`` are the elements of each
    rank's chunk; one number: of every chunk.
    """
    return _rooted("scatter", world, rank, counts, elements_per_packet, root, topology)


def _rooted(
    collective: str,
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    root: int,
    topology: Topology | None,
) -> Plan:
    check_world(world, rank, elements_per_packet)
    check_rank("root", root, world)
    sizes = check_counts("counts", counts, world)
    own = tuple(sizes[rank] if peer == root else 0 for peer in range(world))
    of_root = sizes if rank == root else (0,) * world
    send, expected = (own, of_root) if collective == "gather" else (of_root, own)
    fields = (world, sizes, elements_per_packet, root)
    return _exchange(
        collective, "direct", rank, send, expected, elements_per_packet, topology, fields
    )


def _exchange(
    collective: str,
    name: str,
    rank: int,
    send: tuple[int, ...],
    expected: tuple[int, ...],
    elements_per_packet: int,
    topology: Topology | None,
    fields: tuple[Any, ...],
) -> Plan:
    """The plan of a rank that sends and gets so many elements to and from each. A stream is
    numbered by the rank that it comes from; those within a host are on a level of their own.
    ``fields``: what goes into the signature."""
    world, to, at = len(send), starts(send), starts(expected)
    levels: tuple[Level, ...] = ()
    near: frozenset[int] = frozenset()
    if topology is not None and check_topology(topology, world).shares_hosts:
        levels = (Level(elements_per_packet * topology.host_packets, RELIABLE),)
        near = frozenset(topology.members_of_hosts[topology.hosts[rank]])
        fields = (*fields, *topology.fields)
    peers = [(peer, int(peer in near)) for peer in others(world, rank)]
    # What is received is numbered by its sender; what is sent needs numbers of its own here.
    slots = [
        send_own(world + j, to[j], send[j], Edge(j, rank), level=level)
        for j, level in peers
        if send[j]
    ]
    slots.append(copy_own(rank, at[rank], to[rank], send[rank]))
    slots += [receive(j, j, at[j], expected[j], level=level) for j, level in peers if expected[j]]
    return assemble(
        collective,
        name,
        world,
        rank,
        elements_per_packet,
        sizes=(sum(send), sum(expected)),
        slots=slots,
        sign=signature(collective, name, *fields),
        levels=levels,
    )


_TO_EACH: Final = "every rank sends each other one its chunk"
_TO_ROOT: Final = {"traffic": lambda world: min(1, world - 1) / world}
for collective, name, build, summary, more in (
    ("all_to_all", "direct", all_to_all, _TO_EACH, {}),
    ("all_to_all_uneven", "uneven", all_to_all_uneven, f"{_TO_EACH}; chunks of any size", {}),
    ("gather", "direct", gather, "every rank sends its chunk to the root", _TO_ROOT),
    ("scatter", "direct", scatter, "the root sends every rank its chunk", {}),
):
    register(
        Algorithm(
            collective=collective,
            name=name,
            build=build,
            summary=summary,
            **DIRECT | more,
        )
    )
