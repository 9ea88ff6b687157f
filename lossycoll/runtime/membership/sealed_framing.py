"""Whole messages over one TCP connection, sealed: each end draws a nonce, and both make the keys.

The first frame of each end is its nonce, in clear. Every later one is sealed under the key of its
direction, with its number as IV: none can be changed, left out, repeated or turned round, and what
was recorded of another connection opens in none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Final

from lossycoll.runtime.keys import aead
from lossycoll.runtime.keys.secret import Secret

from .framing import LONGEST, Framed

NONCE_BYTES: Final = 16
LONGEST_GREETING: Final = 4096
"""Bytes of the first sealed frame: until it opens, the other end may be anybody."""


def framed_with(secret: Secret | None, end: socket.socket, *, connects: bool) -> Framed:
    """A connection of those who have this ``secret``; in clear where there is none."""
    if secret is None:
        return Framed(end)
    return SealedFramed(end, secret.derived("control"), connects=connects)


class Sealing:
    """What one end of a connection seals with, and opens with, once it has the other's nonce.

    Args:
        key: ``KEY_BYTES`` that both ends have.
        connects: This end has made the connection.
    """

    def __init__(self, key: bytes, *, connects: bool) -> None:
        self._key = key
        self._connects = connects
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = 0
        self._opened = 0

    @property
    def met(self) -> bool:
        """Whether the other end's nonce is there."""
        return self._keys is not None

    def meet(self, nonce: bytes) -> bool:
        """Takes the other end's nonce. Returns whether it is one."""
        if len(nonce) != NONCE_BYTES:
            return False
        both = self.nonce + nonce if self._connects else nonce + self.nonce
        ways = [hmac.digest(self._key, way + both, hashlib.sha256) for way in (b"there", b"back")]
        self._keys = (ways[0], ways[1]) if self._connects else (ways[1], ways[0])
        return True

    def seal(self, body: bytes) -> bytes:
        """The next frame to the other end, which has been met."""
        assert self._keys is not None
        self._sent += 1
        return aead.seal(self._keys[0], _iv(self._sent - 1), body)

    def open(self, frame: bytes) -> bytes | None:
        """What the other end's next frame says; None: this isn't it."""
        assert self._keys is not None
        text = aead.open_sealed(self._keys[1], _iv(self._opened), frame)
        self._opened += text is not None
        return text


class SealedFramed(Framed):
    """A :class:`Framed` of which both ends know ``key``. What is written before the other end has
    said its nonce waits for that.

    Args:
        end: The connection, which belongs to it from then on.
        key: As for :class:`Sealing`.
        connects: As for :class:`Sealing`.
    """

    def __init__(self, end: socket.socket, key: bytes, *, connects: bool) -> None:
        super().__init__(end)
        self.longest = NONCE_BYTES
        self._sealing = Sealing(key, connects=connects)
        self._said = False
        self._waiting: list[bytes] = []

    def read(self) -> list[bytes]:
        """As :meth:`Framed.read`; a frame that doesn't open breaks the connection."""
        found = []
        self._receive()
        # One by one: each may change how long the next one may be.
        while not self.malformed and (body := self._next()) is not None:
            if not self._sealing.met:
                self._meet(body)
                continue
            text = self._sealing.open(body)
            if text is None:
                self.malformed = self.broken = True
            else:
                self.longest = LONGEST
                found.append(text)
        return found

    def write(self, body: bytes) -> None:
        """As :meth:`Framed.write`."""
        self._say_nonce()
        if self._sealing.met:
            super().write(self._sealing.seal(body))
        else:
            self._waiting.append(body)

    def _say_nonce(self) -> None:
        if not self._said:
            self._said = True
            super().write(self._sealing.nonce)

    def _meet(self, nonce: bytes) -> None:
        if not self._sealing.meet(nonce):
            self.malformed = self.broken = True
            return
        self.longest = LONGEST_GREETING
        self._say_nonce()
        waiting, self._waiting = self._waiting, []
        for body in waiting:
            self.write(body)


def _iv(number: int) -> bytes:
    return number.to_bytes(aead.IV_BYTES, "big")
