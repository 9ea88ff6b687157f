"""All-gather and broadcast by tiers, and the barrier: each host and site is crossed to once.

A broadcast goes along a tree, that of a heap: with ranks counted from the root and a fanout of 2,
``v`` has the children ``2v + 1`` and ``2v + 2``. A barrier goes up and down the same tree from
rank 0. With hosts, what a rank has is sent to one holder in each unit (``tiers.holder``), which
passes it on within.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .assembly import add, assemble, copy_own, receive, send_fed, send_own
from .model import Edge, Plan, Slot, Target, signature
from .order import segments
from .registry import DIRECT, Algorithm, register
from .tiers import Tree, below, meeting, tree_of
from .topology import Topology
from .validation import (
    check_count,
    check_counts,
    check_rank,
    check_slots,
    check_topology,
    check_world,
    others,
    starts,
)

BARRIER_FANOUT: Final = 4
"""A barrier's: each rank sends one small packet to each child, which costs less than one more level
of the tree."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that one rank has and all are to get."""

    source: int  # the rank that has it
    offset: int  # first element, in the output
    length: int  # elements
    own_offset: int  # first element in the source's input
    first_slot: int  # number of the slots in which it is received, or passed on, in the lowest tier
    slots: int  # how much that number is larger in the next tier
    fanout: int  # the most parts of a unit that one of its parts sends to
    star: bool = False  # whether one sends to all parts in the lowest tier
    number: int | None = None  # the number by which units hold it; None: the source's chunk's

    def slot(self, tier: int) -> int:
        return self.first_slot + tier * self.slots

    def family(self, ranks: Sequence[int], rank: int, tier: int) -> tuple[int | None, list[int]]:
        """(parent, children) of a rank among those that pass the chunk on in a tier."""
        return _family(ranks, rank, len(ranks) if self.star and tier == 0 else self.fanout)


def _family(ranks: Sequence[int], rank: int, fanout: int) -> tuple[int | None, list[int]]:
    """(parent, children) of a rank in the heap of ``ranks``."""
    v, fanout = ranks.index(rank), min(fanout, len(ranks))
    parent = ranks[(v - 1) // fanout] if v else None
    return parent, [*ranks[fanout * v + 1 : fanout * (v + 1) + 1]]


def _sent(
    tree: Tree, t: int, number: int, peers: Iterable[int], offset: int, own_offset: int, length: int
) -> list[Slot]:
    """Slots by which the source sends in a tier. In the topmost it also stores, at ``offset``."""
    dests, level = [Edge(peer, number) for peer in peers], tree.tiers[t].up
    if tree.path[t] is tree.root:
        return [copy_own(number, offset, own_offset, length, *dests, level=level)]
    return [send_own(number, own_offset, length, *dests, level=level)] if dests else []


def _slots(tree: Tree, rank: int, chunk: _Chunk) -> list[Slot]:
    """A rank's slots for a chunk. Its source sends it in each tier. Another rank receives it in one
    tier, and passes it on in those of its units below, whose holder it is."""
    slots: list[Slot] = []
    if rank == chunk.source:
        place = (chunk.offset, chunk.own_offset, chunk.length)
        for t, unit in enumerate(tree.path):
            _, peers = chunk.family(meeting(unit, rank, chunk.number), rank, t)
            slots += _sent(tree, t, chunk.slot(t), peers, *place)
        return slots
    units = below(tree, rank, chunk.source, chunk.number)
    tier = len(units)
    units.append(meeting(tree.path[tier], chunk.source, chunk.number))
    for t in range(tier, -1, -1):
        if rank not in units[t]:
            continue
        level = tree.tiers[t].up if t == tier else tree.tiers[t].down
        parent, children = chunk.family(units[t], rank, t)
        number = chunk.slot(t)
        dests = [Edge(child, number) for child in children]
        if parent is not None:
            slots.append(receive(number, parent, chunk.offset, chunk.length, *dests, level=level))
        elif dests:
            slots.append(send_fed(number, slots[0].number, chunk.length, *dests, level=level))
    return slots


def all_gather(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    topology: Topology | None = None,
) -> Plan:
    """Every rank's chunk on every rank, one after another.

    Slot ``t * world + s`` receives chunk ``s`` in tier ``t``, or passes it on; one step for each
    tier. A packet that is lost on the way to a host is lost for all its ranks. ``counts`` are the
    elements of each rank's chunk; one number: of every chunk.
    """
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("counts", counts, world)
    begin = starts(sizes)
    topology = check_topology(topology, world)
    tree = tree_of(topology, rank, elements_per_packet)
    check_slots(len(tree.tiers) * world)
    if topology.is_flat:  # what the loop below makes, in a tenth of the time with 64 ranks
        peers = others(world, rank)
        slots = [copy_own(rank, begin[rank], 0, sizes[rank], *[Edge(peer, rank) for peer in peers])]
        slots += [receive(peer, peer, begin[peer], sizes[peer]) for peer in peers]
    else:
        slots = []
        for source in (rank, *others(world, rank)):
            chunk = _Chunk(
                source=source,
                offset=begin[source],
                length=sizes[source],
                own_offset=0,
                first_slot=source,
                slots=world,
                fanout=world,
            )
            slots += _slots(tree, rank, chunk)
    return assemble(
        "all_gather",
        "direct",
        world,
        rank,
        elements_per_packet,
        sizes=(sizes[rank], sum(sizes)),
        slots=slots,
        sign=signature("all_gather", "direct", world, sizes, elements_per_packet, *topology.fields),
        levels=tree.levels,
    )


def broadcast(
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    *,
    root: int = 0,
    fanout: int = 2,
    topology: Topology | None = None,
) -> Plan:
    """``root``'s buffer on all ranks, in place.

    Between hosts it goes along a tree of hosts, in as many pieces as a host has ranks, each to
    another one; within a host to all of its ranks at once. A packet that is lost is lost for all
    ranks behind it. ``fanout`` is the most hosts that one host sends to (or sites a site);
    ``world``: only the root sends, to every rank.
    """
    check_world(world, rank, elements_per_packet)
    check_rank("root", root, world)
    elements = check_count("elements", elements)
    topology = check_topology(topology, world)
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}, wanted 1 or more")
    tree = tree_of(topology, rank, elements_per_packet)
    slots: list[Slot] = []
    if fanout >= world > 1:
        slots = _from_root(tree, rank, root, elements)
    elif world > 1:
        most = 1 if topology.one_host else max(len(ranks) for ranks in topology.members_of_hosts)
        check_slots(len(tree.tiers) * most)
        for piece, (offset, length) in enumerate(segments(elements, most, elements_per_packet)):
            chunk = _Chunk(
                source=root,
                offset=offset,
                length=length,
                own_offset=offset,
                first_slot=piece,
                slots=most,
                number=piece,
                fanout=fanout,
                star=topology.shares_hosts,  # memory that is shared is read by all at once
            )
            slots += _slots(tree, rank, chunk)
    what = (world, elements, elements_per_packet, root, fanout)
    return assemble(
        "broadcast",
        "tree",
        world,
        rank,
        elements_per_packet,
        sizes=(elements, elements),
        slots=slots,
        sign=signature("broadcast", "tree", *what, *topology.fields),
        levels=tree.levels,
    )


def _from_root(tree: Tree, rank: int, root: int, elements: int) -> list[Slot]:
    """Only the root sends: one slot for each tier."""
    if rank != root:
        t = len(below(tree, rank, root))
        return [receive(t, root, 0, elements, level=tree.tiers[t].up)]
    slots: list[Slot] = []
    for t, unit in enumerate(tree.path):
        part = unit.part_of[root]
        others = [peer for one in unit.parts[part + 1 :] + unit.parts[:part] for peer in one.ranks]
        slots += _sent(tree, t, t, others, 0, 0, elements)
    return slots


def barrier(
    world: int, rank: int, elements_per_packet: int = 1, *, fanout: int = BARRIER_FANOUT
) -> Plan:
    """Ends on no rank before every rank has begun it. It must run with reliable delivery.

    One float32 element, in place, is added up the tree (slot number 0) and its sum is copied down
    (number 1): a buffer of 1.0 comes back as ``world``, which the caller may check. Costs twice the
    tree's depth in steps.
    """
    check_world(world, rank, elements_per_packet)
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}, wanted 1 or more")
    parent, children = _family(range(world), rank, fanout)
    down, sources = [Edge(child, 1) for child in children], tuple(children)
    slots: list[Slot] = []
    if parent is not None:
        up = Edge(parent, 0)
        if children:
            slots.append(add(0, 0, 0, 1, up, sources=sources, target=Target.SCRATCH))
        else:
            slots.append(send_own(0, 0, 1, up))
        slots.append(receive(1, parent, 0, 1, *down))
    elif children:
        slots.append(add(0, 0, 0, 1, *down, sources=sources))
    return assemble(
        "barrier",
        "tree",
        world,
        rank,
        elements_per_packet,
        sizes=(1, 1),
        slots=slots,
        sign=signature("barrier", "tree", world, elements_per_packet, fanout),
    )


def broadcast_steps(world: int, fanout: int = 2) -> int:
    """Hops from the root to the deepest of ``world`` ranks."""
    hops, deepest = 0, world - 1
    while deepest:
        hops, deepest = hops + 1, (deepest - 1) // fanout
    return hops


register(
    Algorithm(
        collective="all_gather",
        name="direct",
        build=all_gather,
        summary="every rank sends its chunk to every other",
        relays=True,
        **DIRECT,
    )
)
register(
    Algorithm(
        collective="broadcast",
        name="tree",
        build=broadcast,
        summary="a binary tree; where ranks may be lost, the root sends to every rank itself",
        steps=broadcast_steps,
        traffic=lambda world: min(2, world - 1),
        default=True,
        levels=True,
        relays=True,
    )
)
register(
    Algorithm(
        collective="barrier",
        name="tree",
        build=barrier,
        summary="up a tree and down again; no rank has more than four children",
        steps=lambda world: 2 * broadcast_steps(world, BARRIER_FANOUT),
        # The root's children down; or those of another rank, and up to one.
        traffic=lambda world: min(world - 1, BARRIER_FANOUT + (world > 2 * BARRIER_FANOUT)),
        default=True,
        partial_sums=True,
    )
)
