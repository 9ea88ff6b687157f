"""What a laboratory counted, as data.

Packets are those on the wire, however the kernel aggregates them; bytes are of Ethernet frames
without checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .network import Network


@dataclass(frozen=True)
class QueueCounts:
    """A rate and the queue before it. ``queue_max`` in bytes; it is 0 where no rate is set."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    queue_max: int = 0


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
        """Packets lost by the laboratory's own fault."""
        return self.overrun + self.shed + self.refused


@dataclass(frozen=True)
class Counters:
    """All links by (sender, receiver), all hosts by number."""

    links: Mapping[tuple[int, int], LinkCounts]
    hosts: tuple[HostCounts, ...]

    def as_json(self) -> dict[str, Any]:
        """For json.dumps: links are named "0-1"."""
        links = {f"{a}-{b}": asdict(counts) for (a, b), counts in self.links.items()}
        return {"links": links, "hosts": [asdict(host) for host in self.hosts]}


def read(shared: Any, network: Network) -> Counters:
    """From a lab_shared."""
    from .switch_memory import WIDTH

    links = {}
    for a, b in network.pairs():
        c = shared.link_counts[a * WIDTH + b]
        links[a, b] = LinkCounts(
            c.offered,
            c.lost,
            c.bursts,
            c.doubled,
            c.reordered,
            c.delivered,
            c.delivered_bytes,
            _queue(c.queue),
        )
    hosts = []
    for host in range(network.hosts):
        h = shared.host_counts[host]
        up, down = _queue(shared.up_counts[host]), _queue(shared.down_counts[host])
        late = h.late_max_ns / 1e6
        hosts.append(HostCounts(up, down, h.overrun, h.shed, h.refused, late))
    return Counters(links, tuple(hosts))


def _queue(c: Any) -> QueueCounts:
    return QueueCounts(c.packets, c.bytes, c.dropped, c.queue_max)
