"""Connections of a transport, and the events that it reports of them to its user."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final, TypeAlias

from .descriptors import Ends
from .schema import Address

Peer: TypeAlias = int
"""The number of a connection within its transport, which is never used again."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The other end has said its first message, which follows, and has the job's secret if there is
    one. ``address``: its numeric one; ``own``: this end's."""

    peer: Peer
    address: str
    own: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a peer, in order, whole, and of at most ``LONGEST`` bytes."""

    peer: Peer
    body: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is over; all that came over it has been told. ``why``: as errors say it."""

    peer: Peer
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Nobody listens where ``peer`` was to be: a process that did has ended."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Readable:
    """A watched descriptor is readable."""

    fd: int


Event: TypeAlias = Connected | Received | Closed | Refused | Readable


NUMBER_BYTES: Final = 8
"""Bytes of a sealed message's number, from 0: CURVE doesn't find what is left out."""
NEVER: Final = float("inf")


@dataclass(slots=True, eq=False)
class Connection:
    """A connection of a transport: its names in libzmq, and the numbers of sealed messages."""

    peer: Peer
    since: float
    endpoint: str = ""  # of one that was made here
    place: Address = ("", 0)  # where that leads
    routing: bytes = b""  # how ROUTER calls it, once it is known
    fd: int = -1  # in libzmq's hands; -1: not known yet, or no more
    ends: Ends | None = None
    sent: int = 0  # messages; the next one's number
    taken: int = 0
    probe: socket.socket | None = None  # another connection there, which learns why this one failed
    until: float = NEVER  # when it is cut off

    @property
    def is_ours(self) -> bool:
        """True if it was made here."""
        return bool(self.endpoint)

    @property
    def heard(self) -> bool:
        """True if a message has come."""
        return self.taken > 0

    @property
    def address(self) -> str:
        return "" if self.ends is None else str(self.ends[1][0])

    @property
    def own(self) -> str:
        return "" if self.ends is None else str(self.ends[0][0])
