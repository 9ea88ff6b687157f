"""Reports and stats as typed data, by the names of native/lossycoll.h where both have them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final, TypeVar

_Data = TypeVar("_Data")
_SHARED: Final[dict[type[Any], tuple[str, ...]]] = {}
"""Fields that a dataclass and the struct that it stands for both have: asked at every call."""


def data_of(cls: type[_Data], c: Any, **rest: Any) -> _Data:
    """The struct ``c`` as a dataclass whose fields have the same names, but for ``rest``."""
    names = _SHARED.get(cls)
    if names is None:
        made: Any = cls
        known = [entry.name for entry in fields(made) if entry.name not in rest]
        names = _SHARED[cls] = tuple(name for name in known if hasattr(c, name))
    values = {name: getattr(c, name) for name in names}
    if "cause" in values:
        values["cause"] = Cause(values["cause"])
    return cls(**values, **rest)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters of one operation, or of all.

    Attributes:
        packets_sent: Packets sent, resent ones and parity included.
        packets_resent: Packets that were sent again.
        resent_reliable: Packets that reliable delivery sent again; in a lossy call, those within
            hosts and sites.
        parity_sent: Parity packets that were sent.
        parity_received: Parity packets that arrived.
        packets_received: Packets that arrived or were recovered.
        packets_recovered: Packets that parity restored.
        nan_groups: Groups of elements with a NaN or an infinity that this rank encoded in few bits
            (option ``wire``). Each such group arrives as NaN as a whole.
        packets_missing: Packets that were given up.
        packets_injected: Packets that injection dropped here.
        bytes_sent: Bytes sent.
        bytes_received: Bytes received.
        contribution_packets: Packets that this rank reduced, or received reduced.
        contributions: Contributions in all ``contribution_packets``.
        deadline_hits: Streams that a deadline ended.
        order_kept: Packets that waited for those of lower ranks (option ``deterministic``).
    """

    packets_sent: int = 0
    packets_resent: int = 0
    resent_reliable: int = 0
    parity_sent: int = 0
    parity_received: int = 0
    packets_received: int = 0
    packets_recovered: int = 0
    nan_groups: int = 0
    packets_missing: int = 0
    packets_injected: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    contribution_packets: int = 0
    contributions: int = 0
    deadline_hits: int = 0
    order_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Counters):
    """Report of one engine operation at this rank, as :func:`lossycoll.last_report` returns it.

    A contribution is one rank's addend in one packet. Parity packets count as sent, but not as
    received. Bytes include headers.

    Attributes:
        op: The operation's number in the group.
        cause: Reason why the operation ended.
        contributions_min: The fewest contributions in one of ``contribution_packets``.
        own_filled: Packets without a reduction that got the rank's own contribution.
        kept: Packets without a reduction that stayed as they were.
        zero_filled: Packets without a reduction that became zero.
        alone: Packets of a reduce-scatter to which no other rank contributed.
        order_bytes: Peak memory in bytes of packets that waited for those of lower ranks.
        elapsed_ns: Nanoseconds from submission to completion.
        max_missing: Maximum share of missing packets that it allowed; below 0: no maximum was set.
        lost: Ranks lost before the operation, which took no part.
    """

    op: int
    cause: Cause
    contributions_min: int
    own_filled: int
    kept: int
    zero_filled: int
    alone: int
    order_bytes: int
    elapsed_ns: int
    max_missing: float = -1.0
    lost: tuple[int, ...] = ()

    @property
    def elapsed(self) -> float:
        """Seconds from submission to completion."""
        return self.elapsed_ns * 1e-9

    @property
    def missing_share(self) -> float:
        """Share of given-up packets among those expected here; 0 if none was expected."""
        expected = self.packets_received + self.packets_missing
        return self.packets_missing / expected if expected else 0.0

    @property
    def beyond_max_missing(self) -> float:
        """Share missing in excess of ``max_missing``; 0 if that was met, or not set."""
        return max(0.0, self.missing_share - self.max_missing) if self.max_missing >= 0 else 0.0

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
    ``code``: of its parity (plan.sets.code_of), as far as is known; 0 for none. ``rounds``: of
    resending, unless the level is reliable.
    """

    slot: int
    peer: int
    code: int
    rounds: int
    packets: int
    arrived: int
    first_ns: int
    last_ns: int
    gap_ns: int
    settled_ns: int
    cause: Cause

    def in_seconds(self) -> dict[str, int | float | str]:
        """Fields of a log event: times in seconds, the cause by its name."""
        return {
            "slot": self.slot,
            "peer": self.peer,
            "packets": self.packets,
            "arrived": self.arrived,
            "first": self.first_ns * 1e-9,
            "last": self.last_ns * 1e-9,
            "gap": self.gap_ns * 1e-9,
            "end": self.settled_ns * 1e-9,
            "cause": self.cause.name,
        }


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Counters of the traffic between this rank and one peer since the group was made.

    Attributes:
        rank: The peer's rank in the group.
        address: The peer's host and port.
        packets_sent: Packets sent to the peer.
        packets_received: Packets from the peer that arrived or were recovered.
        packets_missing: Packets from the peer that were given up.
        rtt_ns: Smoothed round trip in nanoseconds; 0 while unknown.
        deadline_ns: Current deadline in nanoseconds of a stream of one packet.
        delivery_rate: Received over received plus missing, after recovery by resending, parity or
            reliable delivery; 1 while unknown.
        offered: Packets to be added up that might be lost.
        delivered: Packets of ``offered`` that arrived.
        rate: Bytes per second that the path delivers; 0 while unknown.
        queue_ns: Delay in nanoseconds of the standing queue on the path (docs/congestion.md).
        window: Number of packets that may be in flight.
        link_loss: Current share of packets to the peer that the link loses, before recovery; 0
            while unknown, 1 for a dead link.
        link_burst: Mean number of packets lost in a row: 1 to 64.
        max_missing: Maximum share of missing packets in the last stream to the peer, if parity or
            resending was chosen for it; below 0: neither was.
        expected_missing: The share expected to stay missing with the chosen code and rounds.
        code: Chosen parity code (plan.sets.code_of); 0 for none.
        rounds: Chosen rounds of resending.
        silence: Direction in which the link is dead, though both ranks live. 0: none. 1: nothing
            arrives from the peer. 2: nothing of this rank arrives at the peer. 3: the peer's
            control packets arrive, its data doesn't.
        silences: Number of times that calls have found the link dead.
        silent_ns: Nanoseconds for which the link has been dead.
        silent_packets: Datagrams sent to the peer meanwhile without an answer. For silence 3: data
            packets that the peer has sent.
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
    link_loss: float = 0.0
    link_burst: float = 1.0
    max_missing: float = -1.0
    expected_missing: float = 0.0
    code: int = 0
    rounds: int = 0
    silence: int = 0
    silences: int = 0
    silent_ns: int = 0
    silent_packets: int = 0

    @property
    def link_is_dead(self) -> bool:
        """True if nothing passes in one direction between this rank and the peer."""
        return self.silence in (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(Counters):
    """Sums over all operations of an engine since it was opened (lc_stats).

    Attributes:
        operations: Operations that ended.
        packets_duplicated: Packets that injection doubled.
        packets_reordered: Packets that injection delayed.
        malformed: Datagrams that are no packet of ours, or damaged.
        foreign: Packets of another session, or from an address that is not the sender's.
        forged: Sealed datagrams that were changed on the way, or sealed with another key.
        replayed: Sealed datagrams that had come before, or were too old to tell.
        stale: Packets of an operation that had ended, or of a round that was over.
        repeated: Packets that had arrived before.
        eager_kept: Packets that came before this rank had posted their operation, and waited.
        eager_dropped: The same, dropped because there was no room for them.
        socket_overflow: Packets that the kernel dropped because the socket buffer was full.
        fast_path_refusals: Times that the kernel refused a fast path.
        send_failures: Times that the host could not send, and it was put off.
        send_calls: System calls to send.
        receive_calls: System calls to receive.
        control_sent: Control datagrams sent.
        control_received: Control datagrams received.
        operation_ns: Nanoseconds of all operations, added up.
        messages_sent: Messages (point to point) that this rank sent; done at both ends.
        messages_received: Messages that it received.
    """

    operations: int = 0
    packets_duplicated: int = 0
    packets_reordered: int = 0
    malformed: int = 0
    foreign: int = 0
    forged: int = 0
    replayed: int = 0
    stale: int = 0
    repeated: int = 0
    eager_kept: int = 0
    eager_dropped: int = 0
    socket_overflow: int = 0
    fast_path_refusals: int = 0
    send_failures: int = 0
    send_calls: int = 0
    receive_calls: int = 0
    control_sent: int = 0
    control_received: int = 0
    operation_ns: int = 0
    messages_sent: int = 0
    messages_received: int = 0

    @property
    def resent_rate(self) -> float:
        """Share of resent packets among all that this rank has sent; 0 before the first.

        In reliable calls, and with enough rounds of ``repair``, each lost packet is sent once more.
        The rate is then the raw loss of the links from this rank, before recovery.
        """
        return self.packets_resent / self.packets_sent if self.packets_sent else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(EngineStats):
    """Result of :func:`lossycoll.stats`: the engine's sums, and counts from outside the engine.

    The sums are those of :class:`EngineStats`, of one group or of all groups of the process. For
    all groups, ranks are numbered as in the job.

    Attributes:
        rank: This rank in the group.
        world: The group's world size.
        group: The group's name in torch; empty for all groups.
        description: Purpose of the group in torch's words, such as ``mesh_tp``.
        calls: Collectives issued in the group, without point to point.
        control_foreign: Control messages of this process that were malformed or without its token.
        lost: Ranks without which the group continues.
        peers: An entry per rank; this rank's has zeros.
        groups: Figures of each group, if the sums are of all groups.
    """

    rank: int = 0
    world: int = 1
    calls: int = 0
    control_foreign: int = 0
    lost: tuple[int, ...] = ()
    peers: tuple[PeerStats, ...] = ()
    group: str = ""
    description: str = ""
    groups: tuple[Stats, ...] = ()

    @property
    def loss_rate(self) -> float:
        """Share of given-up packets among those expected here; 0 before the first. It excludes
        packets that resending, parity or reliable delivery restored: see :attr:`resent_rate`."""
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
