"""Whole messages over one TCP connection that never blocks: a length of 4 bytes, then the bytes."""

from __future__ import annotations

import socket
import struct
from typing import Final

LONGEST: Final = (1 << 20) + 16
"""Bytes of one message, and of the tag of a sealed one."""
MOST_UNSENT: Final = 8 << 20
"""Bytes that wait for a peer that doesn't read; of more, the connection is given up."""
READ: Final = 1 << 16
_LENGTH: Final = struct.Struct("!I")


class Framed:
    """``end`` belongs to it from then on. ``broken``: closed by the peer, or by an error."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.fd = end.fileno()
        self.broken = False
        self.longest = LONGEST
        """Bytes of a message that are waited for."""
        self.malformed = False
        """A length that can't be: nothing that follows can be made out."""
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def read(self) -> list[bytes]:
        """The messages that have come, of one read of the socket."""
        self._receive()
        return list(iter(self._next, None))

    def _receive(self) -> None:
        try:
            data = self.end.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.broken = not data
        self._received += data

    def _next(self) -> bytes | None:
        """The oldest message that is there as a whole."""
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > self.longest:
            self.malformed = self.broken = True
            return None
        if len(self._received) - _LENGTH.size < size:
            return None
        body = bytes(self._received[_LENGTH.size : _LENGTH.size + size])
        del self._received[: _LENGTH.size + size]
        return body

    def write(self, body: bytes) -> None:
        """Sends ``body``, now or by :meth:`flush`."""
        self._unsent += _LENGTH.pack(len(body)) + body
        self.flush()
        if len(self._unsent) > MOST_UNSENT:
            self.broken = True

    def flush(self) -> None:
        """Sends what the socket takes."""
        while self._unsent and not self.broken:
            try:
                sent = self.end.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                return
            del self._unsent[:sent]

    def finish(self) -> None:
        """Nothing more is sent; what comes is still read until the peer ends, too."""
        try:
            self.end.shutdown(socket.SHUT_WR)
        except OSError:
            self.broken = True

    def close(self) -> None:
        self.end.close()
