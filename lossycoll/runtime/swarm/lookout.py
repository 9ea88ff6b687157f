"""Questions of a directory to others of its swarm: a TCP connection for each, made and given up
without waiting."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.framing import Framed
from lossycoll.runtime.membership.messages import Malformed
from lossycoll.runtime.membership.sealed_framing import framed_with

from .protocol import Rival, pack, unpack
from .reunion import Reunion
from .whereabouts import Place

ANSWER_SECONDS: Final = 2.0
"""For a question, the connection included; far less than the other is bound for."""


@dataclass(slots=True)
class _Question:
    place: Place
    framed: Framed
    until: float
    asked: Rival | None = None
    """What was said; None: the connection isn't there yet."""


class Lookout:
    """Of a directory's thread, whose poller it uses.

    Args:
        reunion: Which says whom to ask, and what an answer means.
        secret: The swarm's; None: all is in clear.
        poller: Of the thread.
        host: Where the directory listens.
        port: And at which port.
    """

    def __init__(
        self, reunion: Reunion, secret: Secret | None, poller: select.epoll, host: str, port: int
    ) -> None:
        self._reunion = reunion
        self._secret = secret
        self._poller = poller
        self._host = host
        self._port = port
        self._questions: dict[int, _Question] = {}

    def place(self, end: socket.socket) -> Place:
        """Where the other end of a connection finds this directory.

        Args:
            end: Of the connection.
        """
        if self._host not in ("0.0.0.0", "::"):
            return self._host, self._port
        try:
            return str(end.getsockname()[0]).partition("%")[0], self._port
        except OSError:  # the connection is over
            return self._host, self._port

    def asks(self, fd: int) -> bool:
        """Whether a descriptor is one of a question's."""
        return fd in self._questions

    def wakes(self) -> float:
        """When :meth:`turn` may have something to do, on the clock."""
        return min([self._reunion.wakes(), *(one.until for one in self._questions.values())])

    def turn(self, others: Sequence[Place]) -> None:
        """Asks whom it is time to ask, and gives up what takes too long.

        Args:
            others: Directories that the peer knows whose this one is.
        """
        now = time.monotonic()
        for one in list(self._questions.values()):
            if now > one.until:
                self._end(one)
        for place in self._reunion.due((self._host, self._port), others):
            self._ask(place, now + ANSWER_SECONDS)

    def serve(self, fd: int, flags: int) -> bool:
        """Something has happened to a question.

        Returns:
            Whether this directory has yielded by it.
        """
        one = self._questions[fd]
        framed = one.framed
        if one.asked is None and flags & select.EPOLLOUT and not flags & select.EPOLLERR:
            one.asked = self._reunion.stands(self.place(framed.end))
            framed.write(pack(one.asked))
        framed.flush()
        found = framed.read() if flags & ~select.EPOLLOUT else []
        if found:
            return self._answered(one, found[0])
        if framed.broken:
            self._end(one)
        else:
            waits = select.EPOLLOUT if framed.has_unsent else 0
            self._poller.modify(fd, select.EPOLLIN | waits)
        return False

    def close(self) -> None:
        """Gives all questions up."""
        for one in list(self._questions.values()):
            self._end(one)

    def _ask(self, place: Place, until: float) -> None:
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        try:
            end = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # short of descriptors
            return
        end.setblocking(False)
        try:
            end.connect_ex(place)
        except OSError:  # no address
            end.close()
            return
        one = _Question(place, framed_with(self._secret, end, connects=True), until)
        self._questions[one.framed.fd] = one
        self._poller.register(one.framed.fd, select.EPOLLIN | select.EPOLLOUT)

    def _answered(self, one: _Question, said: bytes) -> bool:
        other = None
        with contextlib.suppress(Malformed):
            other = unpack(said)
        asked, in_time = one.asked, time.monotonic() <= one.until
        self._end(one)
        if not isinstance(other, Rival) or asked is None or not in_time:
            return False
        return self._reunion.answered(asked, other, one.place)

    def _end(self, one: _Question) -> None:
        if self._questions.pop(one.framed.fd, None) is None:
            return
        with contextlib.suppress(OSError):
            self._poller.unregister(one.framed.fd)
        one.framed.close()
