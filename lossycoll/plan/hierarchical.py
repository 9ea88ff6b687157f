"""All-reduce by tiers: the ranks of a host add up, then the hosts of a site, then all sites.

On a flat topology there is one tier: every rank sends each owner its segment, and owners send the
mean back. Source: "Transpose AllReduce" in Warraich et al., "OptiReduce", NSDI 2025 (arXiv
2310.06993); the division by what arrived is that of Weintraub, Banner and Orda, arXiv 2507.07114.

With hosts, every element has one *holder* in each unit: the rank that gets the unit's sum of it,
one of the holders that the unit's parts have (docs/hierarchical.md). Source of the idea: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005), and Goyal et al., "Accurate, large minibatch SGD", arXiv
1706.02677. Here every packet goes its way singly, and sums carry how many contributions they have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd
from typing import Final, NamedTuple

from .assembly import Sums, add, assemble, from_input, from_slot, receive, send_fed, send_own
from .model import Edge, Finish, Missing, Plan, Slot, signature
from .order import segments
from .registry import Algorithm, register
from .tiers import Tree, Unit, tree_of
from .topology import Topology
from .validation import (
    check_count,
    check_finish,
    check_owners,
    check_slots,
    check_topology,
    check_world,
    others,
)

NAME: Final = "transpose"
GRAIN: Final = 1024
"""Elements below which ranks of one host don't share the work: so little is added up sooner than
more packets are sent."""
MOST_PIECES: Final = 4096
"""About how many pieces one tier may cut a buffer into: with units of many sizes, borders of their
pieces lie in many places, and each piece takes three slots."""


class Piece(NamedTuple):
    """Elements ``offset`` to ``offset + length`` of the buffer, in one unit."""

    offset: int  # first element
    length: int  # elements; at least 1
    holders: tuple[int, ...]  # the rank that holds it in each part of the unit
    owner: int  # the one of them that holds it in the unit
    inside: tuple[int, ...]  # by part: the number of the part's piece that it lies in


@dataclass(frozen=True, slots=True)
class Shares:
    """A unit's pieces in the order of their elements, without gaps, and those of its parts."""

    unit: Unit
    pieces: tuple[Piece, ...]
    parts: tuple[Shares, ...] = ()


@lru_cache(maxsize=64)
def shares(unit: Unit, elements: int, grain: int, turns: tuple[int, ...] | None = None) -> Shares:
    """A unit's pieces; all borders but the end are whole numbers of ``grain`` elements.

    ``turns`` are the parts in the order in which the topmost tier is cut among them, some of them
    several times (:func:`drawn_turns`). None: parts get as much of the buffer as each other.
    """
    if not unit.parts:
        whole = (Piece(0, elements, (), unit.ranks[0], ()),) if elements else ()
        return Shares(unit, whole)
    parts = _parts(unit, elements, grain)
    return Shares(unit, _pieces(parts, turns or range(len(parts)), grain), parts)


@lru_cache(maxsize=64)
def _parts(unit: Unit, elements: int, grain: int) -> tuple[Shares, ...]:
    # Kept, since the topmost tier is cut anew for each order.
    return tuple([shares(part, elements, grain) for part in unit.parts])


def drawn_turns(root: Unit, order: tuple[int, ...]) -> tuple[int, ...]:
    """Parts in the order of their ranks. Of each part as many ranks stand for it as it takes for
    one to be drawn as often as any rank: with parts of one size a single one.

    So each element goes to a part as if a rank were drawn and the part were the rank's: then the
    mean of what arrives is unbiased, whatever the parts' sizes. An ``order`` of some of the ranks
    has a turn for each of them.
    """
    every = len(order) == len(root.ranks)
    step = gcd(*[len(part.ranks) for part in root.parts]) if every else 1
    part_of = {rank: i for i, part in enumerate(root.parts) for rank in part.ranks[::step]}
    return tuple([part_of[rank] for rank in order if rank in part_of])


def _pieces(parts: Sequence[Shares], turns: Sequence[int], grain: int) -> tuple[Piece, ...]:
    """Cuts the ranges in which all parts' holders are constant among the parts, by ``turns``. Each
    range begins with another turn: if it is too small to be cut, another part gets it."""
    ranges = _common(parts)
    times = min(len(turns), max(1, MOST_PIECES // max(1, len(ranges))))
    found = []
    for number, (begin, end, inside) in enumerate(ranges):
        holders = tuple([part.pieces[at].owner for part, at in zip(parts, inside, strict=True)])
        for i, (offset, length) in enumerate(segments(end - begin, times, grain)):
            if length:
                owner = holders[turns[(number * times + i) % len(turns)]]
                found.append(Piece(begin + offset, length, holders, owner, inside))
    return tuple(found)


def _common(parts: Sequence[Shares]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first element, end, the pieces' numbers by part) of the ranges between all borders."""
    ends = [[piece.offset + piece.length for piece in part.pieces] for part in parts]
    borders = pairwise([0, *sorted(set().union(*ends))])
    return [(begin, end, tuple([bisect_left(of, end) for of in ends])) for begin, end in borders]


def all_reduce(
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    *,
    order: tuple[int, ...] | None = None,
    missing: Missing = Missing.OWN,
    finish: Finish = Finish.MEAN,
    topology: Topology | None = None,
) -> Plan:
    """Mean of all ranks' buffers, on all ranks, in place, by the tiers of ``topology``.

    Two steps for each tier. On a flat topology slot number ``s`` reduces segment ``s`` at
    ``order[s]``, and ``world + s`` is its copy back. ``order`` (:func:`~.order.draw_order`) is the
    permutation of ranks by which owners are drawn on the topmost tier, or its beginning: then these
    ranks alone own segments, which are longer. None: each host (or site) owns as much as any other.
    ``missing`` is what a reduced packet becomes at a rank that it never reaches. ValueError, but
    for arguments that the world doesn't allow: a topology whose plan would have too many slots.
    """
    check_finish(finish, Finish.MEAN, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    elements = check_count("elements", elements)
    topology = check_topology(topology, world)
    if order is not None:
        check_owners(order, world)
    tree = tree_of(topology, rank, elements_per_packet)
    if topology.is_flat:
        order = order or tuple(range(world))
        slots = _flat_slots(world, rank, order, elements, elements_per_packet, missing, finish)
    else:
        turns = None if order is None else drawn_turns(tree.root, order)
        how = (elements, elements_per_packet, turns, missing, finish)
        slots = _slots(topology, rank, *how)
    what = (world, elements, elements_per_packet, missing, order or ())
    hosts = () if topology.is_flat else topology.fields
    return assemble(
        "all_reduce",
        NAME,
        world,
        rank,
        elements_per_packet,
        sizes=(elements, elements),
        slots=slots,
        sign=signature("all_reduce", NAME, *what, *hosts),
        levels=tree.levels,
    )


def _flat_slots(
    world: int,
    rank: int,
    order: tuple[int, ...],
    elements: int,
    elements_per_packet: int,
    missing: Missing,
    finish: Finish,
) -> tuple[Slot, ...]:
    """A rank's slots where there is one tier: what :class:`_Rank` makes in twice the time, which a
    lossy call takes with each order that is drawn."""
    cut = segments(elements, len(order), elements_per_packet)
    owned = {owner: (s, *cut[s]) for s, owner in enumerate(order)}
    peers = others(world, rank)
    theirs = [(peer, *owned[peer]) for peer in peers if peer in owned]
    slots = [send_own(s, offset, length, Edge(peer, s)) for peer, s, offset, length in theirs]
    if rank in owned:
        mine, offset, length = owned[rank]
        back = [Edge(peer, world + mine) for peer in peers]
        slots.append(add(mine, offset, offset, length, *back, sources=peers, finish=finish))
    slots += [
        receive(world + s, peer, offset, length, missing=missing)
        for peer, s, offset, length in theirs
    ]
    return tuple(slots)


@lru_cache(maxsize=64)
def _slots(
    topology: Topology,
    rank: int,
    elements: int,
    elements_per_packet: int,
    turns: tuple[int, ...] | None,
    missing: Missing,
    finish: Finish,
) -> tuple[Slot, ...]:
    """A rank's slots. Kept, since hosts of very different sizes have many pieces and few turns: of
    1 and 7 ranks, 8."""
    tree = tree_of(topology, rank, elements_per_packet)
    grain = GRAIN if topology.one_host else elements_per_packet
    return _Rank(tree, rank, shares(tree.root, elements, grain, turns), missing, finish).slots()


_Held = tuple[int, int]
"""Sum that a rank holds for one of its units: its slot, and the first element of that."""


class _Rank(Sums):
    """One rank's slots. Number ``up[t] + i`` sums up piece ``i`` of the rank's unit in tier ``t``;
    ``down[t] + q`` is where piece ``q`` of all ranks is received in that tier."""

    def __init__(
        self, tree: Tree, rank: int, root: Shares, missing: Missing, finish: Finish
    ) -> None:
        super().__init__()
        self.tree, self.rank, self.root = tree, rank, root
        self.missing, self.finish = missing, finish
        self.reduced: dict[int, int] = {}
        """Numbers of the slots that reduce pieces of all ranks, by piece."""
        tiers: list[tuple[Shares, ...]] = [(root,)]
        while tiers[0][0].parts[0].parts:
            tiers.insert(0, tuple([part for unit in tiers[0] for part in unit.parts]))
        self.path = [next(u for u in units if rank in u.unit.ranks) for units in tiers]
        """The rank's units, from its lowest to that of all."""
        self.part = [unit.unit.part_of[rank] for unit in self.path]
        """Part of the unit that it is in, by tier."""
        sizes = [max(len(unit.pieces) for unit in units) for units in tiers]
        sizes += [len(root.pieces)] * len(tiers)
        *starts, end = accumulate(sizes, initial=0)
        check_slots(end)
        self.up, self.down = starts[: len(tiers)], starts[len(tiers) :]

    def slots(self) -> tuple[Slot, ...]:
        """All of them, each after the one that feeds it."""
        held: dict[int, _Held] = {}
        for t in range(len(self.path)):
            held = self._sums(t, held)
        for q in _from_own(self.root.pieces, self.rank):
            self._copies(q)
        return (*self.sent, *self.waiting)

    def _sums(self, t: int, below: dict[int, _Held]) -> dict[int, _Held]:
        """Slots by which the rank adds up or sends on in a tier.

        ``below``: the sums that it holds of its part's pieces; its own input if there is none.
        Returns those that it holds of its unit's.
        """
        held = {}
        unit, part = self.path[t], self.part[t]
        for i in _from_own(unit.pieces, self.rank):
            piece = unit.pieces[i]
            if piece.holders[part] != self.rank:
                continue
            own = below.get(piece.inside[part])
            if len(piece.holders) > 1:
                self._sum(t, i, piece, own)
                own = (self.up[t] + i, piece.offset)
            if own is not None and piece.owner == self.rank:
                held[i] = own
        return held

    def _sum(self, t: int, i: int, piece: Piece, below: _Held | None) -> None:
        number, level = self.up[t] + i, self.tree.tiers[t].up
        own = from_input(piece.offset)
        if below is not None:
            own = from_slot(below[0], piece.offset - below[1])
        if piece.owner != self.rank:
            self.send(number, piece.length, piece.owner, level, own)
            return
        others, how = _but(self.rank, piece.holders), {}
        if self.path[t] is self.root:
            back = tuple([Edge(peer, self.down[t] + i) for peer in others])
            how = {"offset": piece.offset, "finish": self.finish, "dests": back}
            self.reduced[i] = number
        self.add(number, piece.length, others, level, own, **how)

    def _copies(self, q: int) -> None:
        """Receives piece ``q`` of all ranks, unless the rank reduces it, and passes it on in those
        of its units whose holder it is."""
        piece = self.root.pieces[q]
        chain = self._chain(piece)
        t = len(chain) - 1
        while self.rank not in chain[t].holders:
            t -= 1
        feed = self.reduced.get(q)
        if feed is None:
            tier, feed, sender = self.tree.tiers[t], self.down[t] + q, chain[t].owner
            level = tier.up if chain[t] is piece else tier.down
            self.waiting.append(
                receive(feed, sender, piece.offset, piece.length, missing=self.missing, level=level)
            )
        for lower in range(t - 1, -1, -1):
            number = self.down[lower] + q
            dests = tuple([Edge(r, number) for r in _but(self.rank, chain[lower].holders)])
            if dests:
                level = self.tree.tiers[lower].down
                self.waiting.append(send_fed(number, feed, piece.length, *dests, level=level))

    def _chain(self, piece: Piece) -> list[Piece]:
        """The pieces of the rank's units in which a piece of all ranks lies, the lowest first."""
        chain = [piece]
        for t in range(len(self.path) - 1, 0, -1):
            piece = self.path[t - 1].pieces[piece.inside[self.part[t]]]
            chain.append(piece)
        return chain[::-1]


def _but(rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """``ranks`` without ``rank``, from the one behind it on and around."""
    at = ranks.index(rank)
    return (*ranks[at + 1 :], *ranks[:at])


def _from_own(pieces: Sequence[Piece], rank: int) -> Iterable[int]:
    """The pieces' numbers, from the first on that the rank owns: each begins with another one."""
    at = next((i for i, piece in enumerate(pieces) if piece.owner == rank), 0)
    return (*range(at, len(pieces)), *range(at))


register(
    Algorithm(
        collective="all_reduce",
        name=NAME,
        build=all_reduce,
        summary="two steps at every world, and a lost packet costs one contribution",
        steps=lambda world: 2 if world > 1 else 0,
        traffic=lambda world: 2 * (world - 1) / world,
        # Two steps rather than 2 (world - 1) at every world and size: docs/design.md.
        default=True,
        draws_order=True,
        few_owners=True,
        levels=True,
        relays=True,
    )
)
