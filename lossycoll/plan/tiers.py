"""The ranks of a topology as a tree of units, and the levels of the plans that are made from it.

A *unit* is a rank, a host, a site, or all ranks; its *parts* are units of the tier below. A *tier*
is what all units of one size have in common: the tier of hosts, that of sites, that of all ranks.
Tiers that would say nothing are left out: that of hosts where each has one rank, that of sites
where there is one, or where each has one host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

from .model import Delivery, Level
from .topology import Topology
from .validation import others

RELIABLE: Final = Delivery(reliable=True)


@dataclass(frozen=True)
class Unit:
    """A rank (without parts), a host, a site, or all ranks."""

    ranks: tuple[int, ...]  # its ranks, those of each part together and in the order of the parts
    parts: tuple[Unit, ...] = ()  # the units of the tier below that it consists of

    # Kept: with many hosts each of these is asked for each rank.

    @cached_property
    def places(self) -> Mapping[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def part_of(self) -> Mapping[int, int]:
        """Number of each rank's part."""
        return {rank: i for i, part in enumerate(self.parts) for rank in part.ranks}


class Tier(NamedTuple):
    """Numbers of a plan's levels: of what goes up in the units of a tier, and of what comes down
    from tiers above."""

    up: int
    down: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A topology as units, seen from one rank."""

    path: tuple[Unit, ...]  # the rank's units, from its lowest to that of all ranks
    tiers: tuple[Tier, ...]  # as many, in the same order
    levels: tuple[Level, ...]  # those of the plan from level 1 on

    @property
    def root(self) -> Unit:
        return self.path[-1]


@lru_cache(maxsize=64)
def tree_of(topology: Topology, rank: int, elements_per_packet: int) -> Tree:
    """The tree of a topology.

    Within a host packets are ``host_packets`` times as large on the way up (``sum_packets``, where
    that is given: then what is added up there isn't encoded), and reliable. They are reliable
    within a site too: a mean of partial sums is unbiased, whatever the sizes of units, if
    only the topmost tier loses packets (docs/theory.md). On the topmost tier the call's delivery
    holds, unless all ranks share a host.
    """
    up = Level(elements_per_packet * topology.host_packets, RELIABLE)
    if topology.sum_packets:
        up = Level(elements_per_packet * topology.sum_packets, RELIABLE, plain=True)
    small = Level(elements_per_packet, RELIABLE)
    units = {rank: Unit((rank,)) for rank in range(topology.world)}
    lowest = [units[rank] for rank in range(topology.world)]
    levels: list[Level] = []
    tiers: list[Tier] = []
    tops: list[list[Unit]] = []
    if topology.shares_hosts:
        lowest = _grouped(lowest, topology.members_of_hosts)
        tops.append(lowest)
        levels.append(up)
        # A packet that comes down is one that came from another host.
        if not topology.one_host and up != small:
            levels.append(small)
        tiers.append(Tier(1, len(levels)))
    if topology.has_sites:
        lowest = _grouped(lowest, topology.members_of_sites)
        tops.append(lowest)
        levels.append(small)
        tiers.append(Tier(len(levels), len(levels)))
    if not topology.one_host:
        tops.append([Unit(_ranks(lowest), tuple(lowest))])
        tiers.append(Tier(0, 0))
    path = tuple(next(unit for unit in units if rank in unit.ranks) for units in tops)
    return Tree(path, tuple(tiers), tuple(levels))


def _grouped(units: Sequence[Unit], groups: Sequence[Sequence[int]]) -> list[Unit]:
    """One unit for each group of ranks, of those of ``units`` that lie in it."""
    by_rank = {unit.ranks[0]: unit for unit in units}
    parts = [tuple(by_rank[rank] for rank in group if rank in by_rank) for group in groups]
    return [Unit(_ranks(some), some) for some in parts]


def _ranks(units: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(rank for unit in units for rank in unit.ranks)


def holder(unit: Unit, number: int) -> int:
    """The rank of a unit that holds its sum of a chunk, or passes on a chunk from outside.

    Chunks are numbered; consecutive ones are held in different parts, and in these at different
    ranks. The holders of a unit's parts for the same chunk are ``holder(part, number // parts)``,
    the unit's own among them.
    """
    while unit.parts:
        number, at = divmod(number, len(unit.parts))
        unit = unit.parts[at]
    return unit.ranks[0]


def meeting(unit: Unit, source: int, number: int | None = None) -> tuple[int, ...]:
    """``source``, and the holders of its chunk in the parts of its unit that it isn't in, from the
    part behind its own on. ``number``: of the chunk where :func:`_outside` doesn't say it."""
    parts = others(len(unit.parts), unit.part_of[source])
    return (source, *[holder(unit.parts[i], _outside(unit, i, source, number)) for i in parts])


def below(tree: Tree, rank: int, source: int, number: int | None = None) -> list[tuple[int, ...]]:
    """Holders of ``source``'s chunk in the parts of the rank's units, by tier below the one in
    which the two ranks are in different parts of one unit; each unit's own holder first."""
    tier = next(t for t, unit in enumerate(tree.path) if source in unit.places)
    found: list[tuple[int, ...]] = []
    if tier:
        unit = tree.path[tier]
        number = _outside(unit, unit.part_of[rank], source, number)
        for unit in reversed(tree.path[:tier]):
            number, at = divmod(number, len(unit.parts))
            found.insert(0, tuple([holder(p, number) for p in unit.parts[at:] + unit.parts[:at]]))
    return found


def _outside(unit: Unit, part: int, source: int, number: int | None) -> int:
    """The number of ``source``'s chunk in a part of ``unit`` that doesn't have the rank: chunks
    from outside are counted from 0, so that they spread over the part's ranks."""
    if number is not None:
        return number
    place, inside = unit.places[source], unit.parts[part].ranks
    return place - len(inside) if unit.places[inside[0]] < place else place
