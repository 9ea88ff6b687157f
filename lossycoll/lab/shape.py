"""How many sites, hosts and ranks a laboratory has, and who is where, as pure data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ..errors import OptionError
from ..options.ranges import is_whole

HOSTS_MAX: Final = 64
"""In all."""
RANKS_MAX: Final = 64
"""On a host."""


def wrong(what: str, value: object, wanted: str) -> OptionError:
    """The error for a part of a network that can't be."""
    return OptionError(f"{what} is {value!r}, wanted {wanted}")


def check_whole(what: str, value: object, low: int, high: int) -> None:
    """Refuses what isn't a whole number of that range, by OptionError."""
    if not is_whole(value, low, high):
        raise wrong(what, value, f"a whole number from {low} to {high}")


@dataclass(frozen=True)
class Shape:
    """Sites, their hosts, and the hosts' ranks.

    Numbers count from 0 through all sites: the hosts of a site follow each other, and so do the
    ranks of a host.

    Args:
        sites: How many there are.
        hosts: How many each site has; 2 to 64 in all.
        ranks: How many each host has in a job of the whole laboratory; a tuple has a number for
            each host.

    Raises:
        OptionError: A number is out of range, or there isn't one for each host.
    """

    sites: int = 1
    hosts: int = 2
    ranks: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        check_whole("sites", self.sites, 1, HOSTS_MAX)
        check_whole("hosts", self.hosts, 2 if self.sites == 1 else 1, HOSTS_MAX // self.sites)
        if not isinstance(self.ranks, tuple):
            check_whole("ranks", self.ranks, 1, RANKS_MAX)
            return
        if len(self.ranks) != self.total_hosts:
            wanted = f"one number, or one for each of {self.total_hosts} hosts"
            raise wrong("ranks", self.ranks, wanted)
        for number in self.ranks:
            check_whole("ranks", number, 1, RANKS_MAX)

    @property
    def total_hosts(self) -> int:
        """The hosts of all sites."""
        return self.sites * self.hosts

    @cached_property
    def ranks_by_host(self) -> tuple[int, ...]:
        """How many ranks each host has."""
        if isinstance(self.ranks, tuple):
            return self.ranks
        return (self.ranks,) * self.total_hosts

    @property
    def world(self) -> int:
        """The ranks of all hosts."""
        return sum(self.ranks_by_host)

    @property
    def has_levels(self) -> bool:
        """Whether there are several sites, or hosts with several ranks."""
        return self.sites > 1 or self.world > self.total_hosts

    def site_of(self, host: int) -> int:
        """The site of a host."""
        return host // self.hosts

    def hosts_of(self, site: int) -> range:
        """The hosts of a site."""
        return range(site * self.hosts, (site + 1) * self.hosts)

    def place_of(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its number among the ranks of that host."""
        host = 0
        while rank >= self.ranks_by_host[host]:
            rank -= self.ranks_by_host[host]
            host += 1
        return host, rank
