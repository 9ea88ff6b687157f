"""States of the engine's links that a person should know, as sentences that are logged once.

Three logs: what a link reports, paths that are dead in a direction, and how losses are recovered.
The engine goes on by itself in all of these cases; docs/engine-reference.md says how.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from lossycoll.plan.sets import code_of

from .failures import DATA_SILENT, RDMA_SILENT, UDP_SILENT, Where
from .payload import IP_UDP_BYTES
from .reports import PeerStats

log: Final = logging.getLogger("lossycoll")


class LinkEventKind(IntEnum):
    """lc_event_kind."""

    REFUSED = 1
    """The kernel refused a fast path to a peer."""
    LOST = 2
    """Packets to a peer are dropped in this host."""
    FAILING = 3
    """Nothing can be sent."""
    WORKS = 4
    """Sending works again."""
    SIZE = 5
    """A path carries no packets as large as the group's."""
    SINGLE = 6
    """What is sent to a peer as one (GSO) vanishes, while single packets come."""


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """One lc_event."""

    kind: LinkEventKind  # What happened
    errno: int  # The system's reason
    peer: int = -1  # The rank that packets could not be sent to; -1: all
    fast_path: str = ""  # The name of the fast path that was refused, or ""
    waited: float = 0.0  # Seconds for which nothing could be sent, for WORKS
    link: int = 0  # The number of the host's link that it happened to
    bytes: int = 0  # Of the largest datagram that the path carries, for SIZE
    wanted: int = 0  # Of the group's largest packet, for SIZE


_LOST_REMEDIES: Final = {
    errno.EPERM: "a firewall of this host forbids them: allow UDP to that address",
    errno.EACCES: "a route of this host forbids them: see `ip route get`",
    errno.EMSGSIZE: "they are larger than the interface takes: lower LOSSYCOLL_MTU on all ranks",
    errno.ENETUNREACH: "this host has no route there: see `ip route get`",
    errno.EHOSTUNREACH: "nobody answers there: see `ip route get` and `ip neigh`",
    errno.EIO: "the device couldn't send one, and goes on with the next: see `dmesg`",
    errno.EPROTO: "the memory that it shares holds nonsense, and nothing of it is read any more; "
    "do all ranks run the same build? LOSSYCOLL_LINK=udp does without shared memory",
}


def sentence(event: LinkEvent, where: Where) -> str:
    why = os.strerror(event.errno)
    who = f"{where}, link {event.link}" if event.link else f"{where}"
    to = where.peer(event.peer) if event.peer >= 0 else "a process outside this group"
    if event.kind == LinkEventKind.REFUSED:
        way = f" to {to}" if event.peer >= 0 else ""
        return (
            f"{who}: the kernel refused the fast path {event.fast_path}{way} ({why}); packets go "
            "without it, and it is tried again later"
        )
    if event.kind == LinkEventKind.SIZE:
        headers = IP_UDP_BYTES[6 if ":" in where.numeric(where.rank) else 4]
        return (
            f"{who}: the path to {to} carries UDP datagrams of {event.bytes} bytes and none of "
            f"{event.wanted} (a tunnel or a router has a smaller MTU), so packets go there in "
            f"pieces; LOSSYCOLL_MTU={event.bytes + headers} on all ranks avoids that. "
            "Other such paths aren't named"
        )
    if event.kind == LinkEventKind.SINGLE:
        return (
            f"{who}: packets to {to} that are sent together (GSO) vanish, and single ones come, so "
            "they go one by one, which costs CPU time: a device or a filter on the way drops what "
            "is larger than its MTU (see `ip -s link`; `ethtool -K DEVICE tx-udp-segmentation off` "
            "makes this host cut them). LOSSYCOLL_DISABLE=gso avoids the search. Other such paths "
            "aren't named"
        )
    if event.kind == LinkEventKind.LOST:
        remedy = _LOST_REMEDIES.get(event.errno, "see `ip route get`")
        return (
            f"{who}: this host drops what it sends to {to} ({why}), which counts as loss; {remedy}"
        )
    if event.kind == LinkEventKind.FAILING:
        what = why
        if event.errno == errno.ENETDOWN and event.link:
            return (
                f"{who}: the port of RDMA has no link ({why}), and what it sends is lost until it "
                "has one again, or until the timeouts of the group end its calls; see `rdma link`"
            )
        if event.errno == errno.EADDRNOTAVAIL:
            own = where.addresses[where.rank] if where.addresses else "that it bound"
            what = f"this host no longer has the address {own} ({why})"
        return (
            f"{who}: nothing can be sent: {what}; packets wait and it is tried again, until the "
            "timeouts of the group end its calls"
        )
    return f"{who}: sending works again after {event.waited:.3g} s ({why})"


_ONCE: Final = (LinkEventKind.SIZE, LinkEventKind.SINGLE)
"""Of these, one path stands for all of a machine: they have one cause."""


class LinkLog:
    """Logs each event of one engine once, however often it happens."""

    def __init__(self) -> None:
        self._told: set[tuple[int, int, int, int, str]] = set()

    def tell(
        self,
        events: Callable[[], LinkEvent | None],
        where: Where,
        claim: Callable[[str], bool],
    ) -> None:
        """Logs what ``events`` gives, until it gives None. ``claim``: whether this rank is the one
        of its machine that logs what all of them see."""
        while (event := events()) is not None:
            peer = -1 if event.kind in _ONCE else event.peer
            name = (event.link, event.kind, event.errno, peer, event.fast_path)
            if name not in self._told:
                self._told.add(name)
                if event.kind in _ONCE and not claim(event.kind.name):
                    continue
                works = event.kind == LinkEventKind.WORKS
                log.log(logging.INFO if works else logging.WARNING, "%s", sentence(event, where))


class Silence(IntEnum):
    """lc_silence."""

    HEARD = 0
    FROM = 1
    """Nothing comes from the peer."""
    TO = 2
    """The peer says that nothing comes to it."""
    NO_DATA = 3
    """Control comes from the peer, and none of its data."""


def silence_sentence(peer: PeerStats, where: Where) -> str:
    """Describe the dead link between the rank of ``where`` and ``peer``, with a remedy."""
    who = where.peer(peer.rank)
    remedy = RDMA_SILENT if "(RDMA " in who else UDP_SILENT
    seconds = f"{peer.silent_ns / 1e9:.3g} s"
    seen = f"{peer.packets_received} packets came from it before"
    if peer.silence == Silence.TO:
        what = (
            f"{who} hears nothing of this rank, though its own packets come here: none of "
            f"{peer.silent_packets} datagrams that were sent to it in {seconds} has arrived"
        )
    elif peer.silence == Silence.NO_DATA:
        what = (
            f"only control comes from {who}: of {peer.silent_packets} packets of data that it sent "
            f"in {seconds} none has arrived; {seen}"
        )
        remedy = DATA_SILENT
    else:
        what = (
            f"nothing comes from {who}, though it isn't lost: no packet for {seconds}, and no "
            f"answer to {peer.silent_packets} datagrams; {seen}"
        )
        stopped = "is its process stopped (`lossycoll status` says so on its machine)? If not, "
        remedy = stopped + remedy
    return (
        f"{where}: {what}. Lossy calls continue without what is missing, and reliable ones end "
        f"with LinkError. Repair the link: {remedy}"
    )


class SilenceLog:
    """Logs once for each peer and kind of silence, and once that the peer is heard again.

    Where one kind follows another, it is logged when it is seen twice: while a link heals, what
    the peer said last is older than the packets that pass again.
    """

    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()
        self._silent: dict[int, int] = {}
        """The kind of silence that was last seen of each silent peer."""

    def tell(self, peers: Iterable[PeerStats], where: Where) -> None:
        for peer in peers:
            if not peer.silence:
                if self._silent.pop(peer.rank, None):
                    log.info("%s: packets pass to and from %s again", where, where.peer(peer.rank))
                continue
            before = self._silent.get(peer.rank, peer.silence)
            self._silent[peer.rank] = peer.silence
            if peer.silence == before and (peer.rank, peer.silence) not in self._told:
                self._told.add((peer.rank, peer.silence))
                log.warning("%s", silence_sentence(peer, where))


PERIOD_SECONDS, MOST_SECONDS = 10.0, 3600.0
"""The least between two lines about one peer: at first, and after many, as each line doubles it."""
SLACK: Final = 1.25
"""A choice that expects up to so many times what may be missing is as good as one that keeps it."""


def recovery_sentence(peer: PeerStats, where: Where) -> str:
    """The line that the rank of ``where`` logs of its means against loss on the way to ``peer``."""
    means, code = "no parity", code_of(peer.code)
    if peer.code:
        means = f"{code.rows} parity packets for {code.size} ({code.rows / code.size:.0%} more)"
    if peer.rounds:
        times = "once" if peer.rounds == 1 else f"{peer.rounds} times"
        means += f", lost packets resent {times}"
    text = (
        f"{where}: to {where.peer(peer.rank)} {peer.link_loss:.2%} of packets are lost, in runs of "
        f"{peer.link_burst:.2g}: {means}; {peer.expected_missing:.2%} expected missing, "
        f"{peer.max_missing:.2%} allowed"
    )
    if is_missed(peer):
        text += ", which can't be kept: raise max_missing, or set repair or delivery=reliable"
    return text


def is_missed(peer: PeerStats) -> bool:
    return peer.expected_missing > SLACK * peer.max_missing


class RecoveryLog:
    """Logs the means of each peer once they are other ones, and not too often. ``clock``:
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[int, tuple[tuple[int, int, bool], float, float]] = {}
        """By peer: the choice, the earliest time of the next line, and the wait after it."""

    def tell(self, peers: Iterable[PeerStats], where: Where) -> None:
        """Logs what has changed; nothing of a peer for which nothing has to be done."""
        for peer in peers:
            means = (peer.code, peer.rounds, is_missed(peer))
            before, due, wait = self._told.get(peer.rank, ((0, 0, False), -1.0, PERIOD_SECONDS))
            now = self._clock()
            if peer.max_missing < 0 or means == before or now < due:
                continue
            self._told[peer.rank] = (means, now + wait, min(2 * wait, MOST_SECONDS))
            level = logging.WARNING if is_missed(peer) else logging.INFO
            log.log(level, "%s", recovery_sentence(peer, where))
