"""Questions of a directory to others of its swarm: a connection for each, by its transport."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.runtime.control.events import Event, Peer, Readable
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.membership.messages import Malformed

from .protocol import Rival, pack, unpack
from .reunion import Reunion
from .ways import TransportSession
from .whereabouts import Place

ANSWER_SECONDS: Final = 2.0
"""For a question, the connection included; far less than the other is bound for."""


@dataclass(slots=True)
class _Question:
    place: Place
    session: TransportSession
    until: float
    asked: Rival | None = None
    """What was said; None: the connection isn't there yet."""


class Lookout:
    """Of a directory's thread.

    Args:
        reunion: Which says whom to ask, and what an answer means.
        transport: The directory's.
        host: Where the directory listens.
        port: And at which port.
    """

    def __init__(self, reunion: Reunion, transport: Transport, host: str, port: int) -> None:
        self._reunion = reunion
        self._transport = transport
        self._host = host
        self._port = port
        self._questions: dict[Peer, _Question] = {}

    def place(self, own: str) -> Place:
        """Where the other end of a connection finds this directory.

        Args:
            own: The numeric address of the connection's end here.
        """
        if self._host not in ("0.0.0.0", "::"):
            return self._host, self._port
        return own.partition("%")[0] or self._host, self._port

    def asks(self, peer: Peer) -> bool:
        """Whether a connection is a question's."""
        return peer in self._questions

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
            elif one.asked is None and one.session.reached:
                one.asked = self._reunion.stands(self.place(one.session.own))
                one.session.write(pack(one.asked))
        for place in self._reunion.due((self._host, self._port), others):
            self._ask(place, now + ANSWER_SECONDS)

    def serve(self, event: Event) -> bool:
        """Something has happened to a question.

        Returns:
            Whether this directory has yielded by it.
        """
        assert not isinstance(event, Readable)
        one = self._questions[event.peer]
        one.session.take(event)
        found = one.session.read()
        if found:
            return self._answered(one, found[0])
        if one.session.broken:
            self._end(one)
        return False

    def _ask(self, place: Place, until: float) -> None:
        try:
            session = TransportSession(self._transport, self._transport.connect(place))
        except OSError:  # no address
            return
        self._questions[session.peer] = _Question(place, session, until)

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
        if self._questions.pop(one.session.peer, None) is not None:
            one.session.close()
