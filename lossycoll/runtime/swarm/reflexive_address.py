"""Reflexive address server: a directory's UDP port, which tells peers their addresses as STUN
does."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.runtime.control.schema import Malformed

from .connectivity import (
    CONNECTIVITY_BYTES,
    DIRECTORY,
    ConnectivityMessage,
    Forged,
    Kind,
    pack,
    unpack,
)
from .protocol import MOST_PEERS

RATE: Final = 500.0
"""Answers per second at most, in the long run: a full swarm asks for 273;"""
BURST: Final = float(MOST_PEERS)
"""and at once: all peers may come together."""
TAKEN_AT_ONCE: Final = 64
"""Datagrams that are looked at before the directory turns to its peers again."""
IP_PKTINFO: Final = 8
_INFO: Final = struct.Struct("@i4s4s")


@dataclass(slots=True)
class ReflexiveAddressCounts:
    """Counts of datagrams. ``forged``: nobody of this swarm has made it. ``malformed``: no message,
    or not one for a directory. ``over_rate``: there had been too many. ``unsent``: the system took
    no more."""

    answered: int = 0
    forged: int = 0
    malformed: int = 0
    over_rate: int = 0
    unsent: int = 0


class ReflexiveAddressServer:
    """STUN-like server beside a listener of TCP, on the same address and port. ``bound``: a socket
    that has the address (ports.py); the server's from then on. ``key``: authenticates the swarm's
    connectivity messages, at present."""

    def __init__(
        self,
        bound: socket.socket,
        key: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._clock = clock
        self._credit, self._credited = BURST, clock()
        self.counts = ReflexiveAddressCounts()
        self._socket = bound
        # An answer has to leave from the address that was asked, of several that the host may have.
        with contextlib.suppress(OSError):
            if bound.family == socket.AF_INET:
                self._socket.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
            else:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)

    def fileno(self) -> int:
        """Readable when there is something to :meth:`serve`."""
        return self._socket.fileno()

    def serve(self) -> None:
        """Answers what has come. An answer is as long as its question."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                data, info, _, source = self._socket.recvmsg(CONNECTIVITY_BYTES + 1, 256)
            except OSError:  # nothing more, or what a router says of an answer
                return
            answer = self._answer(data, source)
            if answer is None:
                continue
            try:
                self._socket.sendmsg([answer], _back(info), 0, source)
                self.counts.answered += 1
            except OSError:
                self.counts.unsent += 1

    def _answer(self, data: bytes, source: tuple[Any, ...]) -> bytes | None:
        counts, key = self.counts, self._key()
        try:
            message = unpack(data, key)
        except Forged:
            counts.forged += 1
            return None
        except Malformed:
            counts.malformed += 1
            return None
        to, sender = message.receiver, message.sender
        if message.kind != Kind.CHECK or to != DIRECTORY or sender == DIRECTORY:
            counts.malformed += 1
            return None
        if not self._may_answer():
            counts.over_rate += 1
            return None
        reflexive = str(source[0]), int(source[1])
        return pack(
            ConnectivityMessage(
                Kind.ANSWER, DIRECTORY, message.sender, echo=message.nonce, reflexive=reflexive
            ),
            key,
        )

    def _may_answer(self) -> bool:
        now = self._clock()
        self._credit = min(BURST, self._credit + RATE * (now - self._credited))
        self._credited = now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def _back(info: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """Return the ancillary data that makes an answer leave from the address that was asked."""
    for level, kind, data in info:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO) and len(data) == _INFO.size:
            _, own, _ = _INFO.unpack(data)
            return [(level, kind, _INFO.pack(0, own, bytes(4)))]
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and len(data) == 20:
            return [(level, kind, data[:16] + bytes(4))]
    return []
