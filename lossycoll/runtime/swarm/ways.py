"""How a peer and a directory reach each other: all that either needs of what carries messages.

The rules of both ends (client.py, reception.py) stand on :class:`Frames` alone. So a server that
passes frames on can take the place of a TCP connection, and no rule is there twice.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.sealed_framing import framed_with

from .whereabouts import Place

CONNECT_SECONDS: Final = 5.0


class Frames(Protocol):
    """A connection: whole messages both ways, in order, until it breaks."""

    @property
    def fd(self) -> int:
        """Readable when :meth:`read` may find something."""

    @property
    def broken(self) -> bool:
        """Nothing comes or goes any more."""

    @property
    def has_unsent(self) -> bool:
        """:meth:`flush` is to be called when ``fd`` is writable."""

    def read(self) -> list[bytes]:
        """The messages that have come."""

    def write(self, body: bytes) -> None:
        """Sends a message, now or by :meth:`flush`."""

    def flush(self) -> None:
        """Sends what can be sent."""

    def finish(self) -> None:
        """Nothing more is sent."""

    def close(self) -> None:
        """Ends it. Idempotent."""


Reach: TypeAlias = Callable[[Place, str, float], Frames]
"""Connects with the directory at a place within so many seconds, for a peer of a session ("": of
none yet). Raises OSError where there is none."""


def by_tcp(secret: Secret | None) -> Reach:
    """The way to directories that listen.

    Args:
        secret: The swarm's; None: all is in clear.
    """

    def reach(place: Place, session: str, seconds: float) -> Frames:
        end = socket.create_connection(place, seconds)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return framed_with(secret, end, connects=True)

    return reach
