"""Search of a newcomer for the directory in use: it asks all places at once, again and again.

A question is a heartbeat, which changes nothing at the other end. A directory that would take the
peer in answers by one, and one that stands by names others to ask. :func:`peers_of` is for somebody
who isn't a peer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.keys.secret import Secret

from . import protocol
from .directory_list import AGAIN_SECONDS, DirectoryList
from .directory_transport import Connection, DirectoryTransport, ZmqDirectoryTransport
from .protocol import MOST_DIRECTORIES, pack, unpack

STAGGER_SECONDS: Final = 0.05
"""Between the first questions to two places: where the first one answers, the others aren't
disturbed."""
REACH_SECONDS: Final = 2.0  # enough for a packet that has to come again
SILENT_SECONDS: Final = 10.0
"""For which a place counts as alive that is reached and says nothing: its machine may be busy, and
a second swarm would never become one with the first."""

ANSWER_SECONDS: Final = 2.0
"""For each directory: of one that stands by, the others that it names are asked, too."""


class FoundDirectory(NamedTuple):
    """Directory to join. ``connection``: None: another one is to be made."""

    place: Address
    connection: Connection | None


@dataclass(slots=True)
class _Question:
    """``began``: when the connection was; ``heard``: when something last came over it, that it is
    there included; ``asked``: when it was last asked; ``may_come``: until when the place may live
    though it isn't reached."""

    connection: Connection | None
    began: float
    may_come: float
    heard: float = -math.inf
    asked: float = -math.inf
    is_answered: bool = True

    def may_live(self, now: float) -> bool:
        reached = self.connection is not None and self.heard > -math.inf
        return now - self.heard < SILENT_SECONDS if reached else now < self.may_come


class DirectorySearch:
    """Search by one thread. ``directories``: whose places are asked; it hears of others."""

    def __init__(
        self,
        transport: DirectoryTransport,
        directories: DirectoryList,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._directories = directories
        self._clock = clock
        self._since = clock()
        self._pass = self._since  # when places began to be asked
        self._questions: dict[Address, _Question] = {}
        self.trouble = ""
        """Why a place wasn't reached, the last time that one wasn't."""
        self.malformed = 0

    def turn(self) -> FoundDirectory | None:
        """Ask whom it is time to ask, and take what has come. Returns a directory that takes
        peers."""
        now = self._clock()
        for at, place in enumerate(self._directories.places):
            if now < self._pass + STAGGER_SECONDS * at:
                break
            one = self._questions.get(place)
            if one is None or self._is_to_begin(one, now):
                one = self._begin(place, one, now)
            found = self._hear(place, one, now)
            if found is not None:
                self.close(but=place)
                return found
        alive = [place for place, one in self._questions.items() if one.may_live(now)]
        self._directories.may_begin(alive, now - self._since)
        return None

    def wakes(self) -> float:
        """When :meth:`turn` is due on the clock, if nothing comes before."""
        unasked = self._pass + STAGGER_SECONDS * len(self._questions)
        is_whole = len(self._questions) >= len(self._directories.places)
        return self._clock() + AGAIN_SECONDS / 4 if is_whole else unasked

    def close(self, but: Address | None = None) -> None:
        for place, one in self._questions.items():
            if one.connection is not None and place != but:
                one.connection.close()
        self._questions.clear()
        self._pass = self._clock()

    def _is_to_begin(self, one: _Question, now: float) -> bool:
        if one.connection is None:
            return now - one.began >= AGAIN_SECONDS
        is_late = one.heard == -math.inf and now - one.began >= REACH_SECONDS
        if is_late:
            self.trouble = "timed out"
        return is_late

    def _begin(self, place: Address, before: _Question | None, now: float) -> _Question:
        """Begin a connection with a place. ``before``: the one that it had; None: none."""
        one = _Question(None, now, now + REACH_SECONDS if before is None else before.may_come)
        if before is not None and before.connection is not None:
            before.connection.close()
        try:
            one.connection = self._transport.reach(place, "")
        except OSError as error:
            one.may_come, self.trouble = -math.inf, str(error)
        self._questions[place] = one
        return one

    def _hear(self, place: Address, one: _Question, now: float) -> FoundDirectory | None:
        connection = one.connection
        if connection is None:
            return None
        if connection.reached and one.heard == -math.inf:
            one.heard = now
        for body in connection.read():
            one.heard, one.is_answered = now, True
            try:
                message = unpack(body)
            except Malformed:
                self.malformed += 1
                continue
            if isinstance(message, protocol.Heartbeat):
                return FoundDirectory(place, connection)
            if isinstance(message, protocol.Directories):
                self._directories.learn(message.addresses)
        if connection.broken:
            return self._broken(place, one, now)
        if one.is_answered and now - one.asked >= AGAIN_SECONDS:
            one.asked, one.is_answered = now, False
            connection.write(pack(protocol.Heartbeat(0)))
        return None

    def _broken(self, place: Address, one: _Question, now: float) -> FoundDirectory | None:
        assert one.connection is not None
        self.trouble = one.connection.broken
        one.connection.close()
        one.connection = None
        if one.heard == -math.inf:
            one.may_come = -math.inf
            return None
        if not one.is_answered:
            # It takes connections and not the question: perhaps it is of another version, and
            # says so to one that joins.
            return FoundDirectory(place, None)
        # Perhaps the connection alone has ended: it is asked again at once.
        one.began, one.may_come = -math.inf, now + REACH_SECONDS
        return None


def peers_of(
    place: Address, secret: Secret | None, seconds: float = ANSWER_SECONDS
) -> tuple[Address, tuple[str, ...]] | None:
    """Return the directory in use and the names of all peers; None: no directory answers.
    ``place``: of any directory of the swarm, as peers join it."""
    transport = ZmqDirectoryTransport(secret)
    places = [place]
    try:
        for asked in range(1 + MOST_DIRECTORIES):
            if asked == len(places):
                return None
            answer = _ask(transport, places[asked], seconds)
            if isinstance(answer, tuple):
                return places[asked], answer
            places += [one for one in answer if one not in places]
    finally:
        transport.end()
    return None


def _ask(
    transport: DirectoryTransport, place: Address, seconds: float
) -> tuple[str, ...] | list[Address]:
    """The names of a directory's peers, or a list of directories to ask in its place: empty if it
    names none, or doesn't answer."""
    names: tuple[str, ...] = ()
    end = time.monotonic() + seconds
    try:
        connection = transport.reach(place, "")
    except OSError:
        return []
    with contextlib.closing(connection):
        connection.write(pack(protocol.Who()))
        while (left := end - time.monotonic()) > 0:
            transport.wait(left)
            for body in connection.read():
                try:
                    message = unpack(body)
                except Malformed:
                    return []
                if isinstance(message, protocol.Directories):
                    return list(message.addresses)
                if not isinstance(message, protocol.Peers):
                    return []
                names += message.names
                if not message.more:
                    return names
            if connection.broken:
                return []
    return []
