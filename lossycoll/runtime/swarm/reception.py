"""What a directory hears over its connections, and what it says, whatever carries them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.runtime.membership.messages import Malformed

from .directory import Directory
from .protocol import (
    MOST_DIRECTORIES,
    MOST_NAMES,
    PLACES,
    START,
    Agreed,
    Averages,
    Beat,
    Directories,
    Due,
    Found,
    Gone,
    Here,
    Join,
    Joined,
    Leave,
    Message,
    Offers,
    Peers,
    Present,
    Ready,
    Refused,
    Rival,
    Seek,
    Serves,
    Spare,
    Turn,
    Unmet,
    Who,
    pack,
    unpack,
)
from .reunion import Reunion
from .ways import Session
from .whereabouts import Place

JOIN_SECONDS: Final = 5.0
"""A stranger that hasn't joined by then is dropped."""
STRANGERS: Final = PLACES
"""All peers of another directory that has ended may come at once."""
PRESENT_AT_ONCE: Final = 128
LIST_SECONDS: Final = 1e-4
"""For each peer, between two lists of directories that all are told."""
log: Final = logging.getLogger("lossycoll")


@dataclass(slots=True, eq=False)
class Link:
    """A connection. ``number``: whose it is; -1: a stranger's."""

    session: Session
    since: float
    number: int = -1
    over: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """The peer whose directory one is.

    Attributes:
        name: The peer's.
        elsewhere: Whom it turns to in turn.
        others: Where it has heard of directories, now or earlier.
        stands_by: The directory takes nobody in before this peer has come: others hear whom to ask
            instead.
    """

    name: str
    elsewhere: Callable[[], Sequence[Place]]
    others: Callable[[], Sequence[Place]]
    stands_by: bool


NOBODY: Final = Owner("", tuple, tuple, stands_by=False)


@dataclass(frozen=True, slots=True)
class Beside:
    """How a directory that others of its swarm may find stands beside those.

    Attributes:
        reunion: Its.
        owner: Whose it is.
        place: Where the other end of a connection finds it.
    """

    reunion: Reunion
    owner: Owner
    place: Callable[[Link], Place]


class Reception:
    """Of one directory; one thread calls it.

    Args:
        directory: Who is there, and who meets whom.
        dropped: Called when a connection is over, to close it.
        strangers: Connections of whom has not joined, at most; of more the oldest is dropped.
        beside: None: there is no other directory of the swarm.
    """

    def __init__(
        self,
        directory: Directory,
        dropped: Callable[[Link], None],
        strangers: int = STRANGERS,
        beside: Beside | None = None,
    ) -> None:
        self._directory = directory
        self._dropped = dropped
        self._most = strangers
        self._beside = beside
        self._owner = NOBODY if beside is None else beside.owner
        self._stands_by = self._owner.stands_by
        self.counts: Counter[str] = Counter()
        """What came and was no message."""
        self._strangers: dict[int, Link] = {}
        """In the order in which they came."""
        self._of_peer: dict[int, Link] = {}
        self._listed: tuple[Place, ...] = ()
        """The directories that all have been told of, and when they may be told of others."""
        self._list_at = 0.0
        self._present = Present(())
        self._unaware: list[int] = []
        """Who hasn't been told yet who is present."""

    # ---- by what carries the connections ----

    def admit(self, session: Session) -> Link:
        """A stranger has connected."""
        link = Link(session, time.monotonic())
        self._strangers[id(link)] = link
        if len(self._strangers) > self._most:
            self._drop(next(iter(self._strangers.values())))
        return link

    def hear(self, link: Link) -> None:
        """Something has come over a connection, or it has broken."""
        try:
            for body in link.session.read():
                self._take(link, unpack(body))
                if link.over:
                    return
        except Malformed:
            self.counts["malformed"] += 1
            self.end(link)
        except Exception:  # of one peer, whose fault it is: all others go on
            log.exception("directory: a connection is dropped")
            self.end(link)
        self._check(link)

    def turn(self) -> None:
        """Time has passed, or something has been heard."""
        now = time.monotonic()
        while self._strangers:
            first = next(iter(self._strangers.values()))
            if now - first.since <= JOIN_SECONDS:
                break
            self._drop(first)
        for number in self._directory.overdue():
            self._remember(number)
            self._lose(number)
        if self._beside is not None and self._beside.reunion.ends():
            self._directory.adopt(self._directory.session)
            self._stands_by = bool(self._owner.name)
        self._tell_directories(now)
        self._tell_present()
        self._tell_each(self._directory.agreed(), Agreed(""))
        self._tell_each(self._directory.due(), Due())
        for group in self._directory.form():
            self._tell_each([one.number for one in group.members], group)
        for number, loans in self._directory.lends():
            for loan in loans:
                self._tell_each([one.number for one in loan.members], loan)
            self._tell(number, Found(len(loans)))

    def wait(self) -> float:
        """Seconds until :meth:`turn` is due, if nothing comes before."""
        wakes = self._directory.wakes()
        times = [] if wakes is None else [wakes]
        if self._directory.directories() != self._listed:
            times.append(self._list_at)
        if self._unaware:
            return 0.001
        return min(1.0, max(0.001, min(times) - time.monotonic())) if times else 1.0

    def end(self, link: Link) -> None:
        """The connection is over, and so is the peer, until it comes again."""
        if link.number >= 0:
            self._remember(link.number)
            self._lose(link.number)
        else:
            self._drop(link)

    def tell_all(self, message: Message) -> None:
        """To all peers."""
        self._tell_each(list(self._of_peer), message)

    # ---- messages ----

    def _take(self, link: Link, message: Message) -> None:
        if link.number < 0:
            self._take_first(link, message)
            return
        self._directory.beat(link.number)
        if isinstance(message, Here):
            self._directory.here(link.number, message)
        elif isinstance(message, Serves):
            self._directory.serves(link.number, (message.host, message.port))
        elif isinstance(message, Spare):
            self._directory.spare(link.number, (message.host, message.port))
        elif isinstance(message, Turn):
            self._lose(link.number, turns=True)
        elif isinstance(message, Averages):
            answer = self._directory.averages(link.number, message)
            if answer is not None:
                self._tell(link.number, answer)
        elif isinstance(message, Who):
            self._tell_names(link.number)
        elif isinstance(message, Ready):
            self._directory.ready(link.number, message.weight)
        elif isinstance(message, Unmet):
            self._directory.unmet(link.number, message.comings)
        elif isinstance(message, Offers):
            self._directory.offers(link.number, message)
        elif isinstance(message, Seek):
            self._directory.seeks(link.number, message.lenders)
        elif isinstance(message, Beat):
            self._tell(link.number, Beat(len(self._directory.peers)))
        elif isinstance(message, Leave):
            self._lose(link.number)

    def _take_first(self, link: Link, message: Message) -> None:
        """Of somebody who isn't a peer, or not yet."""
        if isinstance(message, Join):
            self._join(link, message)
        elif isinstance(message, Rival) and self._beside is not None:
            own = self._beside.place(link)
            link.session.write(pack(self._beside.reunion.asked(message, own)))
        else:
            self._drop(link)

    def _join(self, link: Link, wanted: Join) -> None:
        places = self._instead(wanted)
        if places is not None:
            link.session.write(pack(Directories(tuple(places[:MOST_DIRECTORIES]))))
            link.session.finish()
            self._drop(link)
            return
        self._stands_by = False
        if self._directory.is_again(wanted):  # its former connection has ended unseen
            self._lose(wanted.number)
        answer = self._directory.join(wanted)
        if isinstance(answer, Joined):
            link.number = answer.number
            del self._strangers[id(link)]
            self._of_peer[answer.number] = link
        link.session.write(pack(answer))
        if isinstance(answer, Joined):
            self._tell(answer.number, Directories(self._directory.directories()))
        if isinstance(answer, Refused):
            link.session.finish()
            self._drop(link)

    def _instead(self, wanted: Join) -> list[Place] | None:
        """Whom a peer that comes should ask; None: it is right here."""
        is_owner, is_new = wanted.name == self._owner.name, wanted.number == PLACES
        place = None
        if self._beside is not None and (is_new or not is_owner):
            place = self._beside.reunion.elsewhere(wanted)
        found = [] if place is None else [place]
        # Its owner itself may be new: then the swarm is elsewhere, if it is anywhere.
        if self._stands_by and (is_new or not is_owner):
            return found + [one for one in self._owner.elsewhere() if one not in found]
        return found or None

    def _tell_directories(self, now: float) -> None:
        """When the list has changed: of a large swarm that ends, it would else fill all time."""
        listed = self._directory.directories()
        if listed != self._listed and now >= self._list_at:
            self._listed, self._list_at = listed, now + LIST_SECONDS * len(self._of_peer)
            self.tell_all(Directories(listed))

    def _tell_present(self) -> None:
        """To some in each turn: of thousands, the list is long."""
        if self._directory.settles():
            here = self._directory.peers.values()
            self._present = Present(tuple(one.coming[:START] for one in here))
            self._unaware = list(self._of_peer)
        some, self._unaware = self._unaware[:PRESENT_AT_ONCE], self._unaware[PRESENT_AT_ONCE:]
        if some:
            self._tell_each(some, self._present)

    def _tell_names(self, number: int) -> None:
        names = self._directory.names()
        for at in range(0, len(names), MOST_NAMES):
            more = at + MOST_NAMES < len(names)
            self._tell(number, Peers(names[at : at + MOST_NAMES], int(more)))

    def _tell(self, number: int, message: Message) -> None:
        self._tell_each([number], message)

    def _tell_each(self, numbers: Sequence[int], message: Message) -> None:
        """The same to all of them: it is packed once."""
        packed = pack(message)
        for number in numbers:
            link = self._of_peer.get(number)
            if link is not None:
                link.session.write(packed)
                self._check(link)

    # ---- ends of connections ----

    def _check(self, link: Link) -> None:
        if link.session.broken and not link.over:
            self.end(link)

    def _remember(self, number: int) -> None:
        """A peer that is lost may live in another part of the swarm, and serve there."""
        peer, listed = self._directory.peers.get(number), self._directory.directories()
        if peer is None or self._beside is None:
            return
        for place in (peer.spare, peer.serves):
            if place is not None and place in listed:
                self._beside.reunion.learn(place)

    def _lose(self, number: int, *, turns: bool = False) -> None:
        """``turns``: to another directory; whoever may still need its packets has them."""
        link = self._of_peer.pop(number, None)
        if link is not None:
            link.number = -1
            self._drop(link)
        for other, coming in self._directory.lost(number):
            if not turns:
                self._tell(other, Gone(coming))

    def _drop(self, link: Link) -> None:
        self._strangers.pop(id(link), None)
        if not link.over:
            link.over = True
            self._dropped(link)
