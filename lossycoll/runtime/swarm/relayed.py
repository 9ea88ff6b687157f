"""One end of a connection whose frames another server carries, each as a whole and in order.

Whoever can write to that server can put frames among them. With a secret those don't open: they are
counted and left out, and the connection goes on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from lossycoll.runtime.membership.framing import LONGEST
from lossycoll.runtime.membership.sealed_framing import Sealing

MOST_WAITING: Final = 4096
"""Frames that have come and nobody has read; of more, the connection is given up."""


class Relayed:
    """As :class:`.ways.Frames`. Another thread may :meth:`put` what comes.

    Args:
        send: Sends a frame; False: the other end isn't there.
        key: ``KEY_BYTES`` that both ends have; None: all is in clear.
        counts: Of what came and isn't believed, by why.
        connects: This end has made the connection.
    """

    has_unsent = False

    def __init__(
        self,
        send: Callable[[bytes], bool],
        key: bytes | None,
        counts: Counter[str],
        *,
        connects: bool,
    ) -> None:
        self.fd = -1
        self.broken = False
        self._send = send
        self._counts = counts
        self._sealing = None if key is None else Sealing(key, connects=connects)
        self._said = False
        self._waiting: list[bytes] = []
        """What is to be said when the other end's nonce has come."""
        self._came: deque[bytes] = deque()

    def put(self, frame: bytes) -> None:
        """A frame has come."""
        if len(self._came) >= MOST_WAITING:
            self.broken = True
        elif len(frame) > LONGEST:
            self._counts["malformed"] += 1
        else:
            self._came.append(frame)

    def read(self) -> list[bytes]:
        """The messages that have come."""
        found = []
        while self._came:
            text = self._opened(self._came.popleft())
            if text is not None:
                found.append(text)
        return found

    def _opened(self, frame: bytes) -> bytes | None:
        if self._sealing is None:
            return frame
        if self._sealing.met:
            text = self._sealing.open(frame)
            self._counts["forged"] += text is None
            return text
        if not self._sealing.meet(frame):
            self._counts["forged"] += 1
            return None
        self._say_nonce()
        waiting, self._waiting = self._waiting, []
        for body in waiting:
            self.write(body)
        return None

    def write(self, body: bytes) -> None:
        """Sends a message."""
        if self._sealing is None:
            self._give(body)
            return
        self._say_nonce()
        if self._sealing.met:
            self._give(self._sealing.seal(body))
        else:
            self._waiting.append(body)

    def _say_nonce(self) -> None:
        if self._sealing is not None and not self._said:
            self._said = True
            self._give(self._sealing.nonce)

    def _give(self, frame: bytes) -> None:
        if not self.broken and not self._send(frame):
            self.broken = True

    def flush(self) -> None:
        """Nothing is left to send."""

    def finish(self) -> None:
        """The other end hears it by a message."""

    def close(self) -> None:
        """This end has nothing to close."""
