"""Directory list of a peer: the order in which it tries directories at failover. All peers have it
in common, so that they find the same one.

A newcomer searches for the directory in use: it asks all places at once, again and again. A
question is a heartbeat, which changes nothing at the other end. A directory that would take the
peer in answers by one, and one that stands by names others to ask. :func:`peers_of` is for somebody
who isn't a peer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.keys.secret import Secret

from . import protocol
from .directory_transport import Connection, DirectoryTransport, ZmqDirectoryTransport
from .protocol import MOST_DIRECTORIES, pack, unpack

AGAIN_SECONDS: Final = 0.5  # between two passes over the list
STANDING_TRIES: Final = 20  # tries of half a second for a standby directory: its lease
BEGIN_SECONDS: Final = 8.0
"""Time before a swarm is begun: one that continues elsewhere asks former directories more often
(:data:`partition_merge.ASK_SECONDS`)."""
LOOPBACK: Final = ("127.0.0.1", "::1")
ANY_ADDRESS: Final = ("0.0.0.0", "::")
MOST_HEARD: Final = 24
MOST_SERVED: Final = 8
STAGGER_SECONDS: Final = 0.05
"""Between the first questions to two places: where the first one answers, the others aren't
disturbed."""
REACH_SECONDS: Final = 2.0  # enough for a packet that has to come again
SILENT_SECONDS: Final = 10.0
"""For which a place counts as alive that is reached and says nothing: its machine may be busy, and
a second swarm would never become one with the first."""

ANSWER_SECONDS: Final = 2.0
"""For each directory: of one that stands by, the others that it names are asked, too."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Right of a peer that listens to begin a swarm, if nobody whom it was told to join has one.
    ``at``: its own directory, as it reaches it; ``known_as``: as the others name it. ``opens``: has
    the directory take peers; the client's thread calls it, maybe more than once."""

    at: Address
    known_as: Address
    opens: Callable[[], None]


def _rank(place: Address) -> tuple[int, bytes, int]:
    """Position in the order in which peers may begin a swarm: all sort alike."""
    address = ipaddress.ip_address(place[0].partition("%")[0])
    return address.version, address.packed, place[1]


def next_pass(before: float, now: float) -> float:
    """Time of a peer's next pass, without its delay. ``before``: that of the one that ends now, or
    when its directory was lost. All peers that lose one at the same time keep step, so that none
    opens its own before one that is earlier in the list."""
    return max(before + AGAIN_SECONDS, now + AGAIN_SECONDS / 4)


def delay(drawn: float) -> float:
    """Delay of a pass: thousands don't come at the same time. ``drawn``: at random, 0 to 1."""
    return AGAIN_SECONDS / 2 * drawn


class DirectoryList:
    """Ordered list of directories of one peer. ``places``: the connected one first, then the others
    in the order in which they are tried. ``first``: whom it was told to ask when it was started."""

    def __init__(self, first: Sequence[Address], begin: Begin | None = None) -> None:
        self._first = list(first)
        self.places = list(first)
        self._heard: dict[Address, None] = {}
        """Addresses of present, past or possible directories, latest news last."""
        self._served: dict[Address, None] = {}  # directories that this peer was with
        self._own: Address | None = None
        self._opens: Callable[[], None] = lambda: None
        self._begin = begin  # None: it has been in a swarm, or doesn't listen
        self.tries = 0  # number of passes over all since this peer was with one

    @property
    def heard(self) -> tuple[Address, ...]:
        """Addresses at which directories are, were or may be: last those that this peer was
        with."""
        return (*(one for one in self._heard if one not in self._served), *self._served)

    def may_open(self, place: Address, opens: Callable[[], None]) -> None:
        """A directory of this peer itself is there, or will be when ``opens`` was called: no other
        place has its port on this machine's loopback."""
        self._own, self._opens = place, opens
        same = [(host, place[1]) for host in LOOPBACK if host != place[0]]
        self._first = [one for one in self._first if one not in same]
        self.places = [one for one in self.places if one not in same]

    def learn(self, places: Sequence[Address], *, serves: bool = False) -> None:
        """Others have said whom to turn to, in this order. What was known before comes after.
        ``serves``: this peer is with the first of them."""
        if serves:
            self._begin = None
        known = list(dict.fromkeys(places))
        _remember(self._heard, known[::-1], MOST_HEARD)
        _remember(self._served, known[:serves], MOST_SERVED)
        rest = dict.fromkeys([*self._first, *reversed(self.heard)])
        self.places = known + [one for one in rest if one not in known]

    def prefer(self, *first: Address) -> None:
        self.places = [*first, *(one for one in self.places if one not in first)]

    @property
    def seeks(self) -> bool:
        """True if several places may have the swarm that it is to join, or it may begin one."""
        return self._begin is not None or len(self.places) > 1

    def may_begin(self, alive: Collection[Address], waited: float) -> bool:
        """Begin a swarm in place of one to join, if this peer is the first to, of those that listen
        and are alive. ``waited``: seconds for which all were asked. Returns whether it is."""
        begin = self._begin
        if begin is None or waited < BEGIN_SECONDS:
            return False
        own = _rank(begin.known_as)
        # Its own directory is alive as well, by an address that nobody else ranks it by.
        if any(one in alive and one != begin.at and _rank(one) < own for one in self._first):
            return False
        begin.opens()
        return True

    def is_next(self, place: Address, at: int, *, standby: bool) -> bool:
        """True if ``place``, number ``at`` of the list, may be tried. This peer's own comes after
        enough passes, and trying it opens its directory: so few directories open at once.
        ``standby``: one before it has said that it stands by. RendezvousError: its own can't be
        opened."""
        if place != self._own:
            return True
        # The first of all has just ended.
        if self.tries < max(at - 1, STANDING_TRIES * standby):
            return False
        self._opens()
        return True


def _remember(among: dict[Address, None], places: Sequence[Address], most: int) -> None:
    """The latest are last, and the first are forgotten."""
    for place in places:
        among.pop(place, None)
        among[place] = None
    for place in list(among)[: max(0, len(among) - most)]:
        del among[place]


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


@dataclass(eq=False)
class DirectorySearch:
    """Search by one thread. ``directories``: whose places are asked; it hears of others."""

    transport: DirectoryTransport
    directories: DirectoryList
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._pass = self._since  # when places began to be asked
        self._questions: dict[Address, _Question] = {}
        self.trouble = ""
        """Why a place wasn't reached, the last time that one wasn't."""
        self.malformed = 0

    def turn(self) -> FoundDirectory | None:
        """Ask whom it is time to ask, and take what has come. Returns a directory that takes
        peers."""
        now = self.clock()
        for at, place in enumerate(self.directories.places):
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
        self.directories.may_begin(alive, now - self._since)
        return None

    def wakes(self) -> float:
        """When :meth:`turn` is due on the clock, if nothing comes before."""
        unasked = self._pass + STAGGER_SECONDS * len(self._questions)
        is_whole = len(self._questions) >= len(self.directories.places)
        return self.clock() + AGAIN_SECONDS / 4 if is_whole else unasked

    def close(self, but: Address | None = None) -> None:
        for place, one in self._questions.items():
            if one.connection is not None and place != but:
                one.connection.close()
        self._questions.clear()
        self._pass = self.clock()

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
            one.connection = self.transport.reach(place, "")
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
                self.directories.learn(message.addresses)
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
