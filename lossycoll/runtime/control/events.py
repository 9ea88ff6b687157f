"""Events that a transport reports to its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Peer: TypeAlias = int
"""The number of a connection within its transport, which is never used again."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The other end of a connection has said something. ``peer``: the connection. ``address``: the
    other end's numeric address. ``own``: the numeric address of this end."""

    peer: Peer
    address: str
    own: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a peer."""

    peer: Peer
    body: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is over. ``why``: the reason, as errors tell it."""

    peer: Peer
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Nobody listens where ``peer`` was to be."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Readable:
    """A watched descriptor is readable."""

    fd: int


Event: TypeAlias = Connected | Received | Closed | Refused | Readable
