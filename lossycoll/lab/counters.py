"""Counts of a laboratory, as data.

Packets are those on the wire, however the kernel aggregates them; bytes are of Ethernet frames
without checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class QueueCounts:
    """A rate and the queue before it, or its policer, which dropped ``policed`` packets.

    ``queue_max`` in bytes, of a policer what was taken out of its bucket; 0 where no rate is set.
    """

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    queue_max: int = 0
    policed: int = 0


@dataclass(frozen=True)
class LinkCounts:
    """One direction between two hosts.

    ``offered``: packets that came past the port's and the link's queues. Of these ``lost`` were
    drawn to be lost, in ``bursts`` runs. ``delivered`` were handed to the other host, doubles
    included. ``queue``: of the link's own rate.
    """

    offered: int
    lost: int
    bursts: int
    doubled: int
    reordered: int
    delivered: int
    delivered_bytes: int
    queue: QueueCounts

    @property
    def loss(self) -> float:
        """The fraction lost of what was offered; 0 of nothing."""
        return self.lost / self.offered if self.offered else 0.0

    @property
    def burst(self) -> float:
        """The mean number of packets lost in a row; 0 if none was."""
        return self.lost / self.bursts if self.bursts else 0.0


@dataclass(frozen=True)
class HostCounts:
    """One host's port, and what the laboratory itself did wrong.

    ``overrun`` (the kernel dropped packets that the switch was too slow to read), ``shed`` (its
    memory was full) and ``refused`` (the kernel didn't take a packet) are loss that nobody asked
    for: runs in which they aren't 0 asked for more than the machine carries. ``late_max_ms`` is the
    most by which a packet was late.
    """

    up: QueueCounts
    down: QueueCounts
    overrun: int
    shed: int
    refused: int
    late_max_ms: float

    @property
    def unasked(self) -> int:
        return self.overrun + self.shed + self.refused


@dataclass(frozen=True)
class SiteCounts:
    """One site's gateway: what its hosts sent to other sites, and were sent from there."""

    up: QueueCounts
    down: QueueCounts


@dataclass(frozen=True)
class LevelBytes:
    """Bytes offered to the ports of all hosts, or of all sites, by number: what left each of them,
    and what came."""

    out: tuple[int, ...]
    into: tuple[int, ...]

    def since(self, before: LevelBytes) -> LevelBytes:
        return LevelBytes(_less(self.out, before.out), _less(self.into, before.into))


@dataclass(frozen=True)
class Counters:
    """All links by (sender, receiver), all hosts and sites by number."""

    links: Mapping[tuple[int, int], LinkCounts]
    hosts: tuple[HostCounts, ...]
    sites: tuple[SiteCounts, ...]

    @property
    def levels(self) -> dict[str, LevelBytes]:
        """Bytes across the edge of each "host" and each "site". Ranks of one host send each other
        nothing that would be counted here."""
        return {
            "host": _level([(host.up, host.down) for host in self.hosts]),
            "site": _level([(site.up, site.down) for site in self.sites]),
        }

    def as_json(self) -> dict[str, Any]:
        """For json.dumps: links are named "0-1"."""
        return {
            "links": {f"{a}-{b}": asdict(counts) for (a, b), counts in self.links.items()},
            "hosts": [asdict(host) for host in self.hosts],
            "sites": [asdict(site) for site in self.sites],
            "levels": {name: asdict(level) for name, level in self.levels.items()},
        }


def _level(ports: Sequence[tuple[QueueCounts, QueueCounts]]) -> LevelBytes:
    return LevelBytes(tuple(up.bytes for up, _ in ports), tuple(down.bytes for _, down in ports))


def _less(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(after, before, strict=True))


def crossing(
    sent: Mapping[tuple[int, int], QueueCounts], groups: Sequence[int]
) -> list[tuple[QueueCounts, QueueCounts]]:
    """Traffic of each group of hosts to other groups, and from them.

    For networks without queues at the edges of groups. ``sent``: from host to host. ``groups``: the
    group of each host, numbered from 0.
    """
    out, into = ([QueueCounts()] * (max(groups) + 1) for _ in range(2))
    for (sender, receiver), counts in sent.items():
        a, b = groups[sender], groups[receiver]
        if a != b:
            out[a], into[b] = _sum(out[a], counts), _sum(into[b], counts)
    return list(zip(out, into, strict=True))


def _sum(a: QueueCounts, b: QueueCounts) -> QueueCounts:
    return QueueCounts(a.packets + b.packets, a.bytes + b.bytes, a.dropped + b.dropped)
