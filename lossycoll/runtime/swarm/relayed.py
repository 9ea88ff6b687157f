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


class Sealing:
    """Keys of one end of a connection, once it has the other's nonce. ``connects``: this end has
    made the connection."""

    def __init__(self, key: bytes, *, connects: bool) -> None:
        self._key = key
        self._connects = connects
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = 0
        self._opened = 0

    @property
    def is_ready(self) -> bool:
        return self._keys is not None

    def accept_nonce(self, nonce: bytes) -> bool:
        """Takes the other end's nonce. Returns whether it is one."""
        if len(nonce) != NONCE_BYTES:
            return False
        both = self.nonce + nonce if self._connects else nonce + self.nonce
        keys = [
            hmac.digest(self._key, direction + both, hashlib.sha256)
            for direction in (b"there", b"back")
        ]
        self._keys = (keys[0], keys[1]) if self._connects else (keys[1], keys[0])
        return True

    def seal(self, body: bytes) -> bytes:
        """The next frame to the other end, which has been is_ready."""
        assert self._keys is not None
        self._sent += 1
        return aead.seal(self._keys[0], _iv(self._sent - 1), body)

    def open(self, frame: bytes) -> bytes | None:
        """Open the other end's next frame; None: this isn't it."""
        assert self._keys is not None
        text = aead.open_sealed(self._keys[1], _iv(self._opened), frame)
        self._opened += text is not None
        return text


class RelayedConnection:
    """A :class:`.directory_transport.Connection` of relayed frames. Another thread may :meth:`put`
    what comes. ``send``: sends a frame; False: the other end isn't there. ``key``: ``KEY_BYTES``
    that both ends have; None: all is in clear. ``counts``: of what came and isn't believed, by why.
    ``connects``: this end has made the connection."""

    reached = True

    def __init__(
        self,
        send: Callable[[bytes], bool],
        key: bytes | None,
        counts: Counter[str],
        *,
        connects: bool,
    ) -> None:
        self.broken = ""
        self._send = send
        self._counts = counts
        self._sealing = None if key is None else Sealing(key, connects=connects)
        self._said = False
        self._waiting: list[bytes] = []  # messages to send once the other end's nonce has come
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
            text = self._opened(self._came.popleft())
            if text is not None:
                found.append(text)
        return found

    def _opened(self, frame: bytes) -> bytes | None:
        if self._sealing is None:
            return frame
        if self._sealing.is_ready:
            text = self._sealing.open(frame)
            self._counts["forged"] += text is None
            return text
        if not self._sealing.accept_nonce(frame):
            self._counts["forged"] += 1
            return None
        self._say_nonce()
        waiting, self._waiting = self._waiting, []
        for body in waiting:
            self.write(body)
        return None

    def write(self, body: bytes) -> None:
        if self._sealing is None:
            self._give(body)
            return
        self._say_nonce()
        if self._sealing.is_ready:
            self._give(self._sealing.seal(body))
        else:
            self._waiting.append(body)

    def _say_nonce(self) -> None:
        if self._sealing is not None and not self._said:
            self._said = True
            self._give(self._sealing.nonce)

    def _give(self, frame: bytes) -> None:
        if not self.broken and not self._send(frame):
            self.broken = "the other end isn't there"

    def finish(self) -> None:
        """The other end hears it by a message."""

    def close(self) -> None:
        """This end has nothing to close."""


def _iv(number: int) -> bytes:
    return number.to_bytes(aead.IV_BYTES, "big")
