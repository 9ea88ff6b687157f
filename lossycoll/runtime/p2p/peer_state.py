"""The other ranks as point to point knows them, and how this one is reached."""

from __future__ import annotations

import socket
from typing import Final, NamedTuple

from lossycoll.errors import LossyError, no_port

from .connection import Frame, Kind, Stream
from .request import Transfer

WINDOW_BYTES: Final = 1 << 20
"""What a rank may send another one before it is wanted, all small messages together."""
CHARGE_BYTES: Final = 256
"""What a message counts against the window besides its bytes."""
LEFT_SECONDS: Final = 5.0
"""How long what a rank sent before it left in order may still be under way."""


class Arrival:
    """A message that came before it was wanted. ``data``: None if it was only announced."""

    __slots__ = ("complete", "data", "frame", "receive", "source")

    def __init__(self, source: int, frame: Frame) -> None:
        self.source = source
        self.frame = frame
        self.data = bytearray(frame.nbytes) if frame.kind == Kind.EAGER else None
        self.complete = self.data is None
        self.receive: Transfer | None = None


class Hello(NamedTuple):
    rank: int
    token: bytearray


class Peer:
    """What is known of one other rank. ``sent`` and ``heard`` count messages each way."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outbound: Stream | None = None
        self.inbound: Stream | None = None
        self.sent = self.heard = 0
        self.window = WINDOW_BYTES
        """What may still go to it before it is wanted."""
        self.held = self.consumed = 0
        """What came from it and is not taken, and what is taken but not yet told."""
        self.announced: dict[int, Transfer] = {}
        self.granted: dict[int, Transfer] = {}
        self.lost: LossyError | None = None
        self.broken = ""
        """Why a connection with it ended."""
        self.broken_since = self.left_since = 0.0

    def has_sent_all(self, now: float) -> bool:
        """Whether nothing more can come, since it is lost or has left."""
        late = now - self.left_since > LEFT_SECONDS
        return self.lost is not None or (self.left_since > 0 and (self.inbound is None or late))


def listen(rank: int, world: int, address: str, ports: tuple[int, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(ports[0], ports[1] + 1):
        listener = socket.socket(family)
        try:
            listener.bind((address, port))
            listener.listen(128 + 2 * world)
        except OSError:
            listener.close()
            continue
        listener.setblocking(False)
        return listener
    raise no_port(rank, world, address, ports)
