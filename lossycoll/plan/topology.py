"""Topology: the ranks' hosts and sites, as given or as round trips tell (docs/topology.md).

Several sites are found only where there is no doubt: hosts of one site are all near one another,
all others are far, and nothing lies between. Everything else is one site, which costs bytes but is
never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import Final


@dataclass(frozen=True)
class Topology:
    """Hosts and sites of a group's ranks, the same on all of them.

    Attributes:
        hosts: Number of each rank's host, by rank. Hosts and sites are numbered by first
            appearance.
        sites: Number of each rank's site, by rank. The ranks of a host are at one site.
        host_packets: Number of network packets that fit in one packet within a host; 1: both have
            the same size.
        sum_packets: The same number for sums within a host, if these are not encoded while packets
            between hosts are; 0: they are encoded alike.

    Raises:
        ValueError: If a field isn't as described above.
    """

    hosts: tuple[int, ...]
    sites: tuple[int, ...]
    host_packets: int = 1
    sum_packets: int = 0

    def __post_init__(self) -> None:
        if not self.hosts or len(self.hosts) != len(self.sites):
            raise ValueError(
                f"{len(self.hosts)} ranks have a host and {len(self.sites)} a site, wanted one of "
                f"each per rank, and at least one rank"
            )
        for name, numbers in (("hosts", self.hosts), ("sites", self.sites)):
            if numbers != _numbered(numbers):
                raise ValueError(f"{name} are {numbers}, wanted them numbered by first appearance")
        found: dict[int, int] = {}
        for host, site in zip(self.hosts, self.sites, strict=True):
            if found.setdefault(host, site) != site:
                raise ValueError(
                    f"host {host} is of the sites {found[host]} and {site}, wanted one site for "
                    f"all ranks of a host"
                )
        if self.host_packets < 1:
            raise ValueError(f"host_packets is {self.host_packets}, wanted 1 or more")
        if self.sum_packets < 0:
            raise ValueError(f"sum_packets is {self.sum_packets}, wanted 0 or more")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans are kept by their topology, and looked up in every call.
        return hash(self.fields)

    @staticmethod
    def flat(world: int) -> Topology:
        """Return a topology in which every rank is a host of its own, all at one site.

        Args:
            world: Number of ranks.

        Returns:
            The same object for the same number.
        """
        return _flat(world)

    @staticmethod
    def of_labels(
        hosts: Sequence[Hashable], sites: Sequence[Hashable], host_packets: int = 1
    ) -> Topology:
        """Return the topology of arbitrary labels: equal labels mean the same host or site.

        Args:
            hosts: Label of each rank's host, by rank.
            sites: Label of each rank's site.
            host_packets: As the attribute.

        Returns:
            The topology, with numbered hosts and sites.

        Raises:
            ValueError: If a host is at two sites.
        """
        return Topology(_numbered(hosts), _numbered(sites), host_packets)

    def of_members(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of the ranks.

        Args:
            ranks: The ranks to keep; ``ranks[i]`` becomes rank ``i``.

        Returns:
            Their topology.
        """
        hosts, sites = [self.hosts[r] for r in ranks], [self.sites[r] for r in ranks]
        return replace(self, hosts=_numbered(hosts), sites=_numbered(sites))

    def with_sites(self, of_hosts: Sequence[Hashable]) -> Topology:
        """Return a topology of the same hosts at other sites.

        Args:
            of_hosts: Label of each host's site, by the number of the host.

        Returns:
            The new topology.
        """
        return replace(self, sites=_numbered([of_hosts[host] for host in self.hosts]))

    def without_sites(self) -> Topology:
        """Return a topology of the same hosts, all at one site.

        Returns:
            The same object each time.
        """
        return _without_sites(self)

    def with_sum_packets(self, sum_packets: int) -> Topology:
        """Return a copy with another ``sum_packets``.

        Args:
            sum_packets: As the attribute.

        Returns:
            The copy.
        """
        return replace(self, sum_packets=sum_packets)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @cached_property
    def n_hosts(self) -> int:
        """Number of hosts."""
        return len(set(self.hosts))

    @cached_property
    def n_sites(self) -> int:
        """Number of sites."""
        return len(set(self.sites))

    @cached_property
    def shares_hosts(self) -> bool:
        """True if some host has several ranks."""
        return self.n_hosts < self.world

    @cached_property
    def has_sites(self) -> bool:
        """True if sites are a level of their own: there are several, and one has several hosts."""
        return 1 < self.n_sites < self.n_hosts

    @cached_property
    def is_flat(self) -> bool:
        """True if every rank is a host of its own, and sites are no level."""
        return not self.shares_hosts and not self.has_sites

    @property
    def one_host(self) -> bool:
        """True if there are several ranks and all share a host."""
        return self.n_hosts == 1 and self.world > 1

    @property
    def fields(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Return the integers for a plan's signature."""
        return self.hosts, self.sites, self.host_packets, self.sum_packets

    @cached_property
    def members_of_hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host in ascending order, by the host's number."""
        return _members(self.hosts)

    @cached_property
    def members_of_sites(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each site in ascending order, by the site's number."""
        return _members(self.sites)


@lru_cache(maxsize=64)
def _without_sites(topology: Topology) -> Topology:
    return replace(topology, sites=(0,) * topology.world)


@lru_cache(maxsize=64)
def _flat(world: int) -> Topology:
    return Topology(tuple(range(world)), (0,) * world)


def _numbered(labels: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(label, len(numbers)) for label in labels])


def _members(numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for rank, number in enumerate(numbers):
        found[number].append(rank)
    return tuple(tuple(ranks) for ranks in found)


RATIO: Final = 5.0
"""A round trip between sites takes at least so many times as long as any within one."""
FAR: Final = 0.002
"""Seconds that a round trip between sites takes at least: that of 200 km of fibre."""


@dataclass(frozen=True, slots=True)
class Sites:
    """Sites that were found among the hosts."""

    of_hosts: tuple[int, ...]  # number of each host's site, by host; numbered by first appearance
    why: str  # the reason, for people


def measured_by(host: int, hosts: int) -> tuple[int, ...]:
    """The hosts to which ``host`` measures the round trip, ascending. Of each pair one measures,
    and each host as many as any other, or one more."""
    found = [(host + step) % hosts for step in range(1, (hosts + 1) // 2)]
    if hosts % 2 == 0 and host < hosts // 2:
        found.append(host + hosts // 2)
    return tuple(sorted(found))


def find_sites(hosts: int, round_trips: Mapping[tuple[int, int], float]) -> Sites:
    """Single linkage, cut at the widest gap, and refused unless all of its sites stand apart.

    ``round_trips``, in seconds, may lack pairs, or have a value for each direction, of which the
    smaller counts. What is no positive number counts as missing. A doubt leaves a single site.
    """
    known: dict[tuple[int, int], float] = {}
    for (a, b), seconds in round_trips.items():
        pair = min(a, b), max(a, b)
        if 0 <= pair[0] < pair[1] < hosts and math.isfinite(seconds) and seconds > 0:
            known[pair] = min(seconds, known.get(pair, math.inf))
    found = _divided(hosts, known)
    return found if isinstance(found, Sites) else Sites((0,) * hosts, found)


def _divided(hosts: int, known: Mapping[tuple[int, int], float]) -> Sites | str:
    """The sites, or why there is but one. ``known``: round trips that can be used, each pair's once
    and in rising order."""
    if hosts < 3:
        return "fewer than three hosts have nothing to gain by sites"
    if len(known) < 2:
        return f"only {len(known)} of {hosts * (hosts - 1) // 2} round trips are known"
    pairs = pairwise(sorted(known.values()))
    gaps = [(far / near, near, far) for near, far in pairs if far >= max(FAR, RATIO * near)]
    if not gaps:
        least, most = min(known.values()), max(known.values())
        return (
            f"round trips of {_ms(least)} to {_ms(most)} have no gap, from one to at least "
            f"{RATIO:g} times as much and {_ms(FAR)}"
        )
    _, near, far = max(gaps)
    of_hosts = _linked(hosts, [pair for pair, seconds in known.items() if seconds <= near])
    between = set()
    for (a, b), seconds in sorted(known.items()):
        if seconds > near and of_hosts[a] == of_hosts[b]:
            return (
                f"hosts {a} and {b} are {_ms(seconds)} apart, but linked by hosts that are at most "
                f"{_ms(near)} apart"
            )
        between.add((of_hosts[a], of_hosts[b]))
        between.add((of_hosts[b], of_hosts[a]))
    for one, other in combinations(range(max(of_hosts) + 1), 2):
        if (one, other) not in between:
            a, b = of_hosts.index(one), of_hosts.index(other)
            return f"no round trip is known between host {a}, or one near it, and host {b}"
    return Sites(
        of_hosts,
        f"round trips are at most {_ms(near)} within a site, and at least {_ms(far)} between two",
    )


def _linked(hosts: int, pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """Number of each host's set. A chain of pairs links the hosts of a set."""
    least = list(range(hosts))
    for a, b in pairs:
        one, other = sorted((least[a], least[b]))
        least = [one if found == other else found for found in least]
    return _numbered(least)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
