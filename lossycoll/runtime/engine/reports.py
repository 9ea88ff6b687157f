"""Figures, as typed data. The names are those of native/lossycoll.h, where both have them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Cause(IntEnum):
    """Why an operation ended."""

    COMPLETE = 0
    """Everything arrived."""
    LOSS = 1
    """Something was given up, no stream by its deadline."""
    DEADLINE = 2
    """At least one stream was ended by its deadline."""
    PEER = 3
    """A rank died while it still owed something, which was given up."""
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Report:
    """One operation of the engine at this rank. A contribution is one rank's addend in one packet.

    ``contributions`` is their number in the ``contribution_packets`` that this rank reduced (or
    received reduced), ``contributions_min`` the fewest in one of them. ``own_filled``, ``kept``,
    ``zero_filled`` and ``alone`` count packets that no reduction reached: filled with the rank's
    own, left as they were, made zero, and reduced without any other rank. ``lost``: ranks that
    had been lost before it, and took no part. Parity is among what was sent, not among what was
    received; ``packets_recovered`` are those of ``packets_received`` that came back by it. Bytes
    include headers.
    """

    op: int
    cause: Cause
    packets_sent: int
    packets_resent: int
    parity_sent: int
    parity_received: int
    packets_received: int
    packets_recovered: int
    packets_missing: int
    packets_injected: int
    bytes_sent: int
    bytes_received: int
    contribution_packets: int
    contributions: int
    contributions_min: int
    deadline_hits: int
    own_filled: int
    kept: int
    zero_filled: int
    alone: int
    elapsed_ns: int
    lost: tuple[int, ...] = ()

    @property
    def elapsed(self) -> float:
        """Seconds from submission to completion."""
        return self.elapsed_ns * 1e-9

    @property
    def contributions_mean(self) -> float:
        """Contributions per reduced packet; 0 when nothing was reduced."""
        return self.contributions / self.contribution_packets if self.contribution_packets else 0.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of an operation at its receiver: a slot's packets from one peer.

    ``first_ns`` and ``last_ns``: when the first and the last of the ``arrived`` packets came, since
    the operation was submitted; 0 if none did. ``gap_ns``: the longest silence between two.
    ``settled_ns``: when what had not come of all ``packets`` was given up, for ``cause``, or the
    last one came; 0 in an operation that failed before. ``slot``: its number at this rank.
    """

    slot: int
    peer: int
    packets: int
    arrived: int
    first_ns: int
    last_ns: int
    gap_ns: int
    settled_ns: int
    cause: Cause

    def in_seconds(self) -> dict[str, int | float | str]:
        """As fields of an event: times in seconds, the cause by its name."""
        return {
            "slot": self.slot,
            "peer": self.peer,
            "packets": self.packets,
            "arrived": self.arrived,
            "first": self.first_ns * 1e-9,
            "last": self.last_ns * 1e-9,
            "gap": self.gap_ns * 1e-9,
            "settled": self.settled_ns * 1e-9,
            "cause": self.cause.name,
        }


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What passed between this rank and one peer since the group was made.

    ``rtt_ns`` is 0 while unknown; ``deadline_ns`` is the deadline that a stream of one packet
    would get now; ``delivery_rate`` is received / (received + missing). ``offered`` are packets
    to be added up that might be lost, ``delivered`` those of them that came. ``rate`` is what the
    path delivers, bytes/s, 0 while unknown; ``queue_ns`` the queue that stands on it; ``window``
    how many packets may be in flight (docs/congestion.md).
    """

    rank: int
    address: str
    packets_sent: int
    packets_received: int
    packets_missing: int
    rtt_ns: int
    deadline_ns: int
    delivery_rate: float
    offered: int = 0
    delivered: int = 0
    rate: float = 0.0
    queue_ns: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums over all operations of an engine since it was opened (lc_stats)."""

    operations: int = 0
    packets_sent: int = 0
    packets_resent: int = 0
    bytes_sent: int = 0
    packets_received: int = 0
    bytes_received: int = 0
    parity_sent: int = 0
    parity_received: int = 0
    packets_recovered: int = 0
    packets_injected: int = 0
    packets_duplicated: int = 0
    packets_reordered: int = 0
    packets_missing: int = 0
    contributions: int = 0
    contribution_packets: int = 0
    deadline_hits: int = 0
    malformed: int = 0
    foreign: int = 0
    stale: int = 0
    repeated: int = 0
    eager_kept: int = 0
    eager_dropped: int = 0
    socket_overflow: int = 0
    send_calls: int = 0
    receive_calls: int = 0
    control_sent: int = 0
    control_received: int = 0
    operation_ns: int = 0


@dataclass(frozen=True, slots=True)
class Stats(EngineStats):
    """What :func:`lossycoll.stats` returns: the engine's sums, and what lies around the engine.

    ``calls`` are collectives issued in the group (point to point not counted); those that are not
    among ``operations`` went to gloo. ``control_foreign`` counts control messages without the
    group's token. ``lost``: ranks that the group goes on without. ``peers`` has an entry per rank,
    this one's with zeros.
    """

    rank: int = 0
    world: int = 1
    calls: int = 0
    control_foreign: int = 0
    lost: tuple[int, ...] = ()
    peers: tuple[PeerStats, ...] = ()

    @property
    def loss_rate(self) -> float:
        """Packets given up, of those expected here; 0 before the first."""
        expected = self.packets_received + self.packets_missing
        return self.packets_missing / expected if expected else 0.0


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """The engine's socket: buffers in bytes as the kernel gave them, fast paths by name."""

    receive_buffer: int
    send_buffer: int
    active: tuple[str, ...]
    port: int
    payload_bytes: int
