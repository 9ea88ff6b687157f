"""One end of a connection whose frames another server carries, each as a whole and in order.

Whoever can write to that server can put frames among them. With a secret those don't open: they are
counted and left out, and the connection goes on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from lossycoll.runtime.control.transport import LONGEST
from lossycoll.runtime.keys import aead

NONCE_BYTES: Final = 16
MOST_WAITING: Final = 4096
"""Frames that have come and nobody has read; of more, the connection is given up."""


class RelayedConnection:
    """A :class:`.directory_transport.Connection` of relayed frames. Another thread may :meth:`put`
    what comes. ``send``: sends a frame; False: the other end isn't there. ``key``: ``KEY_BYTES``
    that both ends have; None: all is in clear. ``counts``: of what came and isn't believed, by why.
    ``connects``: this end has made the connection. ``incarnation``: what tells it from others."""

    reached = True

    def __init__(
        self,
        send: Callable[[bytes], bool],
        key: bytes | None,
        counts: Counter[str],
        *,
        connects: bool,
        incarnation: bytes = b"",
    ) -> None:
        self.incarnation = incarnation
        self.broken = ""
        self._send, self._counts = send, counts
        self._key, self._connects = key, connects
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = key is None  # the nonce
        self._keys: tuple[bytes, bytes] | None = None
        """To send and to receive with, once the other end's nonce has come."""
        self._sent = self._opened = 0
        self._waiting: list[bytes] = []  # messages to send from then on
        self._came: deque[bytes] = deque()

    def put(self, frame: bytes) -> None:
        if len(self._came) >= MOST_WAITING:
            self.broken = "what came isn't read"
        elif len(frame) > LONGEST + aead.TAG_BYTES:
            self._counts["malformed"] += 1
        else:
            self._came.append(frame)

    def read(self) -> list[bytes]:
        found = []
        while self._came:
            text = self._open(self._came.popleft())
            if text is not None:
                found.append(text)
        return found

    def _open(self, frame: bytes) -> bytes | None:
        """Message of the other end's next frame; None: it is none."""
        if self._key is None:
            return frame
        if self._keys is None and len(frame) == NONCE_BYTES:
            self._take_nonce(self._key, frame)
            return None
        text = None
        if self._keys is not None:
            text = aead.open_sealed(self._keys[1], _iv(self._opened), frame)
        self._opened += text is not None
        self._counts["forged"] += text is None
        return text

    def _take_nonce(self, key: bytes, nonce: bytes) -> None:
        both = self._nonce + nonce if self._connects else nonce + self._nonce
        there, back = (
            hmac.digest(key, direction + both, hashlib.sha256) for direction in (b"there", b"back")
        )
        self._keys = (there, back) if self._connects else (back, there)
        self._say_nonce()
        waiting, self._waiting = self._waiting, []
        for body in waiting:
            self.write(body)

    def write(self, body: bytes) -> None:
        self._say_nonce()
        if self._key is None:
            self._give(body)
        elif self._keys is None:
            self._waiting.append(body)
        else:
            self._sent += 1
            self._give(aead.seal(self._keys[0], _iv(self._sent - 1), body))

    def _say_nonce(self) -> None:
        if not self._said:
            self._said = True
            self._give(self._nonce)

    def _give(self, frame: bytes) -> None:
        if not self.broken and not self._send(frame):
            self.broken = "the other end isn't there"

    def finish(self) -> None:
        """The other end hears it by a message."""

    def close(self) -> None:
        """This end has nothing to close."""


def _iv(number: int) -> bytes:
    return number.to_bytes(aead.IV_BYTES, "big")
