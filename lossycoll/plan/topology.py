"""Topology: the ranks' hosts and sites, from which plans with levels are made."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Topology:
    """The hosts and sites of a group's ranks, the same on all of them.

    Attributes:
        hosts: Number of each rank's host, by rank. Hosts are numbered by first appearance, as
            sites are.
        sites: Number of each rank's site. The ranks of a host are of one site.
        host_packets: How many packets of the network one packet within a host stands for; 1: it is
            as large.
        sum_packets: The same of what is added up within a host, where that travels as it is while
            what leaves the host is encoded; 0: it travels like the rest.

    Raises:
        ValueError: If the fields are not as above.
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
        """Every rank is a host of its own, all at one site.

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
        """From any labels: equal ones mean the same host, or the same site.

        Args:
            hosts: Label of each rank's host, by rank.
            sites: Label of each rank's site.
            host_packets: As the attribute.

        Returns:
            The topology, its hosts and sites numbered.

        Raises:
            ValueError: If a host is of two sites.
        """
        return Topology(_numbered(hosts), _numbered(sites), host_packets)

    def of_members(self, ranks: Sequence[int]) -> Topology:
        """The topology of some of the ranks.

        Args:
            ranks: Those; ``ranks[i]`` becomes rank ``i``.

        Returns:
            Their topology.
        """
        hosts, sites = [self.hosts[r] for r in ranks], [self.sites[r] for r in ranks]
        return replace(self, hosts=_numbered(hosts), sites=_numbered(sites))

    def with_sites(self, of_hosts: Sequence[Hashable]) -> Topology:
        """The same hosts at other sites.

        Args:
            of_hosts: Label of each host's site, by the number of the host.

        Returns:
            That topology.
        """
        return replace(self, sites=_numbered([of_hosts[host] for host in self.hosts]))

    def without_sites(self) -> Topology:
        """The same hosts, all at one site.

        Returns:
            The same object each time.
        """
        return _without_sites(self)

    def with_sum_packets(self, sum_packets: int) -> Topology:
        """The same, but for ``sum_packets``.

        Args:
            sum_packets: As the attribute.

        Returns:
            The same object for the same number.
        """
        return _with_sum_packets(self, sum_packets)

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
        """Whether some host has several ranks."""
        return self.n_hosts < self.world

    @cached_property
    def has_sites(self) -> bool:
        """Whether sites are a level of their own: there are several, one of them of several
        hosts."""
        return 1 < self.n_sites < self.n_hosts

    @cached_property
    def is_flat(self) -> bool:
        """Whether no level lies below that between all ranks: every rank is a host of its own, and
        sites tell nothing."""
        return not self.shares_hosts and not self.has_sites

    @property
    def one_host(self) -> bool:
        """Whether all ranks share a host, and are several."""
        return self.n_hosts == 1 and self.world > 1

    @property
    def fields(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Integers for a plan's signature."""
        return self.hosts, self.sites, self.host_packets, self.sum_packets

    @cached_property
    def members_of_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ascending; by the number of the host."""
        return _members(self.hosts)

    @cached_property
    def members_of_sites(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each site, ascending; by the number of the site."""
        return _members(self.sites)


@lru_cache(maxsize=64)
def _without_sites(topology: Topology) -> Topology:
    return replace(topology, sites=(0,) * topology.world)


@lru_cache(maxsize=64)
def _with_sum_packets(topology: Topology, sum_packets: int) -> Topology:
    return replace(topology, sum_packets=sum_packets)


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
