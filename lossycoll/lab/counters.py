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
    """A rate and the queue before it, or its policer."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    queue_max: int = 0  # in bytes, of a policer what was taken out of its bucket; 0 without a rate
    policed: int = 0  # dropped by the policer


@dataclass(frozen=True)
class LinkCounts:
    """One direction between two hosts."""

    offered: int  # packets that came past the port's and the link's queues
    lost: int  # of these, drawn to be lost
    delivered: int  # handed to the other host, doubles included
    delivered_bytes: int
    bursts: int = 0  # runs of lost packets
    doubled: int = 0
    reordered: int = 0
    queue: QueueCounts = QueueCounts()  # of the link's own rate


@dataclass(frozen=True)
class PortCounts:
    """The port of a host, or the gateway of a site: what left by it for others, and what came."""

    up: QueueCounts
    down: QueueCounts


@dataclass(frozen=True)
class HostCounts(PortCounts):
    """One host's port, and what the laboratory itself did wrong."""

    overrun: int = 0  # packets that the kernel dropped as the switch was too slow to read them
    shed: int = 0  # dropped as its memory was full
    refused: int = 0  # not taken by the kernel
    late_max_ms: float = 0.0  # the most by which a packet was late

    @property
    def unasked(self) -> int:
        """Loss that nobody asked for: unless it is 0, the run asked for more than the machine
        carries."""
        return self.overrun + self.shed + self.refused


@dataclass(frozen=True)
class LevelBytes:
    """Bytes offered to the ports of all hosts, or of all sites, by number: what left each of them,
    and what came."""

    out: tuple[int, ...]
    into: tuple[int, ...]


@dataclass(frozen=True)
class Counters:
    """All links by (sender, receiver), all hosts and sites by number."""

    links: Mapping[tuple[int, int], LinkCounts]
    hosts: tuple[HostCounts, ...]
    sites: tuple[PortCounts, ...]

    @property
    def levels(self) -> dict[str, LevelBytes]:
        """Bytes across the edge of each "host" and each "site". Ranks of one host send each other
        nothing that would be counted here."""
        return {
            name: LevelBytes(
                tuple(port.up.bytes for port in ports), tuple(port.down.bytes for port in ports)
            )
            for name, ports in (("host", self.hosts), ("site", self.sites))
        }

    def as_json(self) -> dict[str, Any]:
        """For json.dumps: links are named "0-1"."""
        return {
            "links": {f"{a}-{b}": asdict(counts) for (a, b), counts in self.links.items()},
            "hosts": [asdict(host) for host in self.hosts],
            "sites": [asdict(site) for site in self.sites],
            "levels": {name: asdict(level) for name, level in self.levels.items()},
        }


def crossing(
    sent: Mapping[tuple[int, int], QueueCounts], groups: Sequence[int]
) -> list[PortCounts]:
    """Traffic of each group of hosts to other groups, and from them, where their edges have no
    queues. ``sent``: from host to host. ``groups``: the group of each host, numbered from 0."""
    out, into = ([QueueCounts()] * (max(groups) + 1) for _ in range(2))
    for (sender, receiver), one in sent.items():
        a, b = groups[sender], groups[receiver]
        if a != b:
            out[a] = QueueCounts(out[a].packets + one.packets, out[a].bytes + one.bytes)
            into[b] = QueueCounts(into[b].packets + one.packets, into[b].bytes + one.bytes)
    return list(map(PortCounts, out, into))
