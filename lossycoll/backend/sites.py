"""The sites of a host's ranks: as they name them, or as round trips tell. docs/topology.md."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from lossycoll.errors import RendezvousError
from lossycoll.plan import Topology
from lossycoll.plan.sites import Sites, find_sites, measured_by
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.net.round_trips import round_trips

from .sharing import Meeting

LEARNT: Final = "auto"
"""The value of the option ``site`` that has sites learnt."""

Measure: TypeAlias = Callable[[Mapping[int, tuple[str, int]]], Mapping[int, float]]


def compare_sites(where: Where, sites: Sequence[str]) -> None:
    """Raises RendezvousError, with the same content on every rank, if only some have a site, or
    some name theirs and others have it learnt."""
    _all_or_none(where, sites, [site != "" for site in sites], "one", "on all ranks, or on none")
    _all_or_none(
        where,
        sites,
        [site == LEARNT for site in sites],
        repr(LEARNT),
        f"to {LEARNT!r} on all ranks, or to the name of its site on each",
    )


def _all_or_none(
    where: Where, sites: Sequence[str], with_it: Sequence[bool], it: str, remedy: str
) -> None:
    """Raises RendezvousError if some ranks have ``it``, as ``with_it`` says, and others don't."""
    if all(with_it) or not any(with_it):
        return
    one, other = with_it.index(True), with_it.index(False)
    raise RendezvousError(
        f"{where}: option site is {sites[one]!r} on rank {one} and "
        f"{repr(sites[other]) if sites[other] else 'not set'} on rank {other} ({sum(with_it)} of "
        f"{len(sites)} ranks have {it}); set LOSSYCOLL_SITE {remedy}",
        peer=other if other != where.rank else one,
    )


def learn_sites(
    where: Where,
    meeting: Meeting,
    topology: Topology,
    places: Sequence[tuple[str, int]],
    measure: Measure | None = None,
) -> Topology:
    """Finds the sites by round trips: all ranks call it at the same place of their rendezvous.

    The lowest rank of each host measures to those of some others, and one round more tells all
    ranks what all have measured. There is none where there are fewer than three hosts.

    ``places``: address and TCP port at which each rank listens, by rank. ``measure``: how; None: by
    :func:`round_trips`.
    """
    hosts = topology.n_hosts
    first = [ranks[0] for ranks in topology.members_of_hosts]
    known: dict[tuple[int, int], float] = {}
    if hosts > 2:
        mine: list[int] = []
        host = topology.hosts[where.rank]
        if first[host] == where.rank:
            others = measured_by(host, hosts)
            found = (measure or round_trips)({other: places[first[other]] for other in others})
            mine = [round(1e6 * found.get(other, 0)) for other in others]
        said = meeting.exchange("round_trips", mine)
        for host, rank in enumerate(first):
            known |= _measured(host, hosts, said[rank])
    sites = find_sites(hosts, known)
    if where.rank == 0:
        _tell(where, topology, sites)
    return topology.with_sites(sites.of_hosts)


def _measured(host: int, hosts: int, said: Any) -> dict[tuple[int, int], float]:
    """Seconds by pair, of what a host's rank says: microseconds, 0 where there was no answer."""
    others = measured_by(host, hosts)
    if not isinstance(said, Sequence) or len(said) != len(others):
        return {}
    return {
        (host, other): value * 1e-6
        for other, value in zip(others, said, strict=True)
        if type(value) is int and value > 0
    }


def _tell(where: Where, topology: Topology, sites: Sites) -> None:
    found = topology.with_sites(sites.of_hosts)
    logfmt.event(
        logging.INFO,
        where,
        "sites",
        sites=found.n_sites,
        ranks=" ".join(",".join(map(str, ranks)) for ranks in found.members_of_sites),
        why=sites.why,
    )
