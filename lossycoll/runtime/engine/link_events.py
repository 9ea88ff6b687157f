"""Events of the engine's link that a person should know, as sentences that are logged once.

The engine goes on by itself in all of these cases; docs/engine.md says how.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from lossycoll.runtime.engine.payload import IP_UDP_BYTES

from .failures import Where

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


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """One lc_event.

    Attributes:
        kind: What happened.
        errno: The system's reason.
        peer: The rank that packets could not be sent to; -1: all.
        fast_path: The name of the fast path that was refused, or "".
        waited: Seconds for which nothing could be sent, for WORKS.
        link: The number of the host's link that it happened to.
        bytes: Of the largest datagram that the path carries, for SIZE.
        wanted: Of the group's largest packet, for SIZE.
    """

    kind: LinkEventKind
    errno: int
    peer: int = -1
    fast_path: str = ""
    waited: float = 0.0
    link: int = 0
    bytes: int = 0
    wanted: int = 0


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
    """What the rank of ``where`` logs of ``event``."""
    why = os.strerror(event.errno)
    who = f"{where}, link {event.link}" if event.link else f"{where}"
    if event.kind == LinkEventKind.REFUSED:
        way = f" to {where.peer(event.peer)}" if event.peer >= 0 else ""
        return (
            f"{who}: the kernel refused the fast path {event.fast_path}{way} ({why}); packets go "
            "without it, and it is tried again later"
        )
    if event.kind == LinkEventKind.SIZE:
        to = where.peer(event.peer) if event.peer >= 0 else "a process outside this group"
        headers = IP_UDP_BYTES[6 if _own(where).startswith("[") else 4]
        return (
            f"{who}: the path to {to} carries UDP datagrams of {event.bytes} bytes and none of "
            f"{event.wanted} (a tunnel or a router has a smaller MTU), so packets go there in "
            f"pieces; LOSSYCOLL_MTU={event.bytes + headers} on all ranks avoids that. "
            "Other such paths aren't named"
        )
    if event.kind == LinkEventKind.LOST:
        remedy = _LOST_REMEDIES.get(event.errno, "see `ip route get`")
        to = where.peer(event.peer) if event.peer >= 0 else "a process outside this group"
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
            what = f"this host no longer has the address {_own(where)} ({why})"
        return (
            f"{who}: nothing can be sent: {what}; packets wait and it is tried again, until the "
            "timeouts of the group end its calls"
        )
    return f"{who}: sending works again after {event.waited:.3g} s ({why})"


def _own(where: Where) -> str:
    return where.addresses[where.rank] if where.rank < len(where.addresses) else "that it bound"


class LinkLog:
    """Logs each event of one engine once, however often it happens."""

    def __init__(self) -> None:
        self._told: set[tuple[int, int, int, int, str]] = set()

    def tell(self, events: Callable[[], LinkEvent | None], where: Where) -> None:
        """Logs what ``events`` gives, until it gives None."""
        while (event := events()) is not None:
            peer = -1 if event.kind == LinkEventKind.SIZE else event.peer
            name = (event.link, event.kind, event.errno, peer, event.fast_path)
            if name not in self._told:
                self._told.add(name)
                works = event.kind == LinkEventKind.WORKS
                log.log(logging.INFO if works else logging.WARNING, "%s", sentence(event, where))
