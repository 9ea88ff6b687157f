"""An all-reduce over hosts of several ranks: a plan of two levels, which feeds slots from slots.

Segment ``s`` is reduced at rank ``order[s]``. Within each host, one rank adds up the host's
contributions to it (the *gatherer*: of the ranks from ``order[s]`` on, the first that the host
has). Gatherers send these partial sums to the owner, which sends the mean back to them, and they
pass it on within their hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lossycoll.plan import (
    Algorithm,
    Combine,
    Delivery,
    Edge,
    Finish,
    Level,
    Missing,
    Own,
    Plan,
    Slot,
    Target,
    segments,
    signature,
)
from lossycoll.plan.assembly import assemble

Hosts = tuple[tuple[int, ...], ...]
BETWEEN, UP, DOWN = range(3)
"""Levels: between hosts as the call says, and within them on the way up and on the way down."""


@dataclass(frozen=True)
class Topology:
    """``times``: packets up within a host are larger by this factor than those between hosts."""

    hosts: Hosts
    within: Delivery
    times: int = 1


def gatherer(host: tuple[int, ...], order: tuple[int, ...], s: int) -> int:
    return next(r for r in order[s:] + order[:s] if r in host)


def all_reduce(
    topology: Topology,
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    *,
    order: tuple[int, ...] | None = None,
    missing: Missing = Missing.OWN,
    finish: Finish = Finish.MEAN,
) -> Plan:
    """Mean of all ranks' buffers, in place; packets between hosts have a ``times``-th part of
    ``elements_per_packet``, so that those within a host fit into a payload."""
    order = tuple(range(world)) if order is None else order
    between = max(1, elements_per_packet // topology.times)
    within = between * topology.times
    make = _Segment(topology.hosts, rank, order, missing, finish)
    slots: list[Slot] = []
    scratch = 0
    for s, (offset, length) in enumerate(segments(elements, world, within)):
        slots += make.slots(s, offset, length, scratch)
        scratch += length if make.gathers(s) else 0
    return assemble(
        "all_reduce",
        "two_levels",
        world,
        rank,
        between,
        sizes=(elements, elements),
        slots=sorted(slots, key=lambda slot: bool(slot.sources or slot.own == Own.SLOT)),
        sign=signature(
            "all_reduce", "two_levels", world, elements, between, within, missing, order
        ),
        levels=(Level(within, topology.within), Level(between, topology.within)),
    )


@dataclass(frozen=True)
class _Segment:
    """One rank's slots of a segment. Six numbers belong to each segment: what is gathered within a
    host, handed on to the owner, reduced, received between hosts, handed on and received within."""

    hosts: Hosts
    rank: int
    order: tuple[int, ...]
    missing: Missing
    finish: Finish

    @property
    def host(self) -> tuple[int, ...]:
        return next(host for host in self.hosts if self.rank in host)

    def gathers(self, s: int) -> bool:
        """Whether it adds up others' contributions."""
        return len(self.host) > 1 and gatherer(self.host, self.order, s) == self.rank

    def slots(self, s: int, offset: int, length: int, scratch: int) -> list[Slot]:
        owner, local = self.order[s], gatherer(self.host, self.order, s)
        n = 6 * s
        part: Callable[..., Slot] = partial(Slot, length=length, offset=offset)
        sent = partial(part, own=Own.INPUT, own_offset=offset, target=Target.NONE)
        if local != self.rank:
            return [
                sent(n, dests=(Edge(local, n),), level=UP),
                part(n + 5, sources=(local,), missing=self.missing, level=DOWN),
            ]
        members = tuple(r for r in self.host if r != self.rank)
        remote = tuple(gatherer(h, self.order, s) for h in self.hosts if h != self.host)
        own: dict[str, Any] = {"own": Own.INPUT, "own_offset": offset}
        found: list[Slot] = []
        if members:
            gather = {"combine": Combine.ADD, "target": Target.SCRATCH, "level": UP, **own}
            found.append(Slot(n, scratch, length, sources=members, **gather))
            own = {"own": Own.SLOT, "feed": n}
        if owner == self.rank:
            back = tuple(Edge(peer, n + 3) for peer in remote)
            reduce = {"combine": Combine.ADD, "finish": self.finish, **own}
            found.append(part(n + 2, sources=remote, dests=back, **reduce))
        else:
            found.append(part(n + 1, dests=(Edge(owner, n + 2),), target=Target.NONE, **own))
            found.append(part(n + 3, sources=(owner,), missing=self.missing))
        if members:
            handed: dict[str, Any] = {"own": Own.SLOT, "feed": found[-1].number}
            down = tuple(Edge(peer, n + 5) for peer in members)
            found.append(part(n + 4, dests=down, level=DOWN, target=Target.NONE, **handed))
        return found


def algorithm(topology: Topology) -> Algorithm:
    """As one that could be registered, for groups of the topology's world."""
    world = sum(len(host) for host in topology.hosts)
    build: Callable[..., Plan] = partial(all_reduce, topology)
    return Algorithm(
        collective="all_reduce",
        name="two_levels",
        build=build,
        summary="a partial sum of each host, then their mean",
        steps=lambda world: 4,
        traffic=lambda world: 2.0,
        serves=lambda n: n == world,
        draws_order=True,
        partial_sums=True,
    )
