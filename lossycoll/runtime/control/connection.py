"""One connection of a transport: its names in libzmq, and the numbers of sealed messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .descriptors import Ends
from .events import Peer
from .schema import Address

NUMBER_BYTES: Final = 8
"""Bytes of the number, from 0, at the start of a sealed message."""
NEVER: Final = float("inf")


@dataclass(slots=True, eq=False)
class Connection:
    """A connection of a transport.

    Attributes:
        peer: Its number.
        since: When it began.
        endpoint: Of one that was made here; "": it came.
        place: Where that leads.
        routing: How ROUTER calls it; b"": it came, and has said nothing yet.
        fd: Its descriptor in libzmq's hands; -1: not known yet, or no more.
        ends: The addresses of both ends.
        sent: Messages that were; the next one's number.
        taken: And those that came.
        gone: The user has been told, or doesn't want to be.
        admitted: The user knows whose it is.
        until: When it is cut off.
    """

    peer: Peer
    since: float
    endpoint: str = ""
    place: Address = ("", 0)
    routing: bytes = b""
    fd: int = -1
    ends: Ends | None = None
    sent: int = 0
    taken: int = 0
    gone: bool = False
    admitted: bool = False
    until: float = NEVER

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

    def sealed(self, body: bytes) -> bytes:
        """The next message of a sealed connection: CURVE doesn't find what is left out."""
        return self.sent.to_bytes(NUMBER_BYTES, "big") + body

    def opened(self, bodies: Sequence[bytes], *, is_sealed: bool) -> bytes | None:
        """Body of a message; None: no transport has sent it, or not now."""
        if len(bodies) != 1:
            return None
        if not is_sealed:
            return bodies[0]
        number, body = bodies[0][:NUMBER_BYTES], bodies[0][NUMBER_BYTES:]
        return body if number == self.taken.to_bytes(NUMBER_BYTES, "big") else None
