"""Service of a directory: takes peers' messages and sends its own, whatever carries them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.runtime.control.schema import Address, Malformed, OtherVersion

from . import protocol
from .client import DirectoryClient
from .directory import Directory
from .directory_transport import Connection
from .partition_merge import PartitionMerge
from .protocol import MOST_NAMES, MOST_PEERS, START, VERSION, Message, pack, unpack

JOIN_SECONDS: Final = 5.0  # a stranger that hasn't joined by then is dropped
PROBE_SECONDS: Final = 2.0
"""A peer that is silent for so long loses its name to a process that asks for it. Less than
JOIN_SECONDS."""
STRANGERS: Final = MOST_PEERS  # all peers of another directory that has ended may come at once
PRESENT_AT_ONCE: Final = 128
LIST_SECONDS: Final = 1e-4  # for each peer, between two lists of directories that all are told
NEWCOMER: Final = protocol.Join(VERSION, "?", "0" * 16, MOST_PEERS, "0" * 16, 0, 0)
"""One that hasn't said yet who it is."""
log: Final = logging.getLogger("lossycoll")


@dataclass(slots=True, eq=False)
class PeerSession:
    """Session of a directory with one peer. ``dropped``: called when it is over. ``place``: the
    address by which the peer finds the directory. ``number``: the peer's; -1: a stranger's."""

    connection: Connection
    dropped: Callable[[], object]
    place: Callable[[], Address]
    since: float
    number: int = -1
    over: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Wish of a stranger for the name of a peer that is here, and may have died unseen. ``holder``:
    the peer's number; ``asked``: when that was asked whether it lives."""

    wanted: protocol.Join
    holder: int
    asked: float


@dataclass(frozen=True, slots=True)
class Owner:
    """The peer whose directory one is. ``client``: its own, once it is there. ``standby``: the
    directory takes nobody in before this peer has come, and names others to ask."""

    name: str = ""
    client: Callable[[], DirectoryClient | None] = lambda: None
    standby: bool = False


NOBODY: Final = Owner()


class DirectoryService:
    """Service of one directory; one thread calls it. ``strangers``: sessions that haven't joined,
    at most; of more the oldest is dropped. ``merge``: None: there is no other directory of the
    swarm. ``waits``: seconds for which newcomers wait for peers that a former directory at this
    place may have had, or for the directory that these have by now."""

    def __init__(
        self,
        directory: Directory,
        strangers: int = STRANGERS,
        *,
        owner: Owner = NOBODY,
        merge: PartitionMerge | None = None,
        waits: float = 0.0,
    ) -> None:
        self._directory = directory
        self._most = strangers
        self._owner, self._merge = owner, merge
        self._stands_by = owner.standby
        self._waits_until = time.monotonic() + waits
        self.counts: Counter[str] = Counter()
        """Counts of malformed messages, and of silent peers whose names others have taken."""
        self._strangers: dict[PeerSession, None] = {}  # in the order in which they came
        self._claims: dict[PeerSession, Claim] = {}
        self._sessions: dict[int, PeerSession] = {}
        self._listed: tuple[Address, ...] = ()
        """The directories that all have been told of, and when they may be told of others."""
        self._list_at = 0.0
        self._present = protocol.Present(())
        self._unaware: list[int] = []  # peers that don't have the list of peers yet
        self._takes: dict[type[Message], Callable[[int, Any], object]] = {
            protocol.Here: directory.here,
            protocol.Serves: directory.serves,
            protocol.Offers: directory.offers,
            protocol.Averages: self._take_averages,
            protocol.Ready: lambda peer, said: directory.ready(peer, said.weight),
            protocol.Seek: lambda peer, said: directory.seeks(peer, said.donors),
            protocol.Unreachable: lambda peer, said: directory.report_unreachable(
                peer, said.incarnations
            ),
            protocol.Who: lambda peer, _: self._tell(peer, *self._names()),
            protocol.Heartbeat: lambda peer, _: self._tell(peer, self._heartbeat()),
            protocol.Redirect: lambda peer, _: self._lose(peer, redirected=True),
            protocol.Leave: lambda peer, _: self._lose(peer),
        }

    # ---- by what carries the connections ----

    def admit(
        self,
        connection: Connection,
        dropped: Callable[[], object] = lambda: None,
        place: Callable[[], Address] = lambda: ("", 0),
    ) -> PeerSession:
        session = PeerSession(connection, dropped, place, time.monotonic())
        self._strangers[session] = None
        if len(self._strangers) > self._most:
            self._drop(next(iter(self._strangers)))
        return session

    def hear(self, session: PeerSession) -> None:
        try:
            for body in session.connection.read():
                self._take(session, unpack(body))
                if session.over:
                    return
        except Malformed as error:
            self.counts["malformed"] += 1
            if isinstance(error, OtherVersion):
                refused = protocol.Refused(f"{error}; install the same lossycoll on all peers")
                self._last(session, refused)
            self.end(session)
        except Exception:  # of one peer, whose fault it is: all others go on
            log.exception("directory: a connection is dropped")
            self.end(session)
        self._check(session)

    def begin(self) -> None:
        """Takes peers from now on: the owner begins a swarm. Any thread may call it."""
        self._stands_by = False

    def turn(self) -> None:
        now = time.monotonic()
        while (first := next(iter(self._strangers), None)) and now - first.since > JOIN_SECONDS:
            self._drop(first)
        for session, claim in list(self._claims.items()):
            self._settle(session, claim, now)
        for number in self._directory.overdue():
            if number in self._sessions:
                self.end(self._sessions[number])
        if self._merge is not None and self._merge.ends():
            self._directory.adopt(self._directory.session)
            self._stands_by = bool(self._owner.name)
        self._tell_directories(now)
        self._tell_present()
        self._tell_each(self._directory.agreed(), protocol.Agreed(""))
        self._tell_each(self._directory.due(), protocol.Due())
        for group in self._directory.form():
            self._tell_each([one.number for one in group.members], group)
        for number, transfers in self._directory.transfers():
            for transfer in transfers:
                self._tell_each([one.number for one in transfer.members], transfer)
            self._tell(number, protocol.Found(len(transfers)))

    def wait(self) -> float:
        """Seconds until :meth:`turn` is due, if nothing comes before."""
        wakes = self._directory.wakes()
        times = [] if wakes is None else [wakes]
        if self._directory.directories() != self._listed:
            times.append(self._list_at)
        if self._unaware:
            return 0.001
        times += [claim.asked + PROBE_SECONDS for claim in self._claims.values()]
        return min(1.0, max(0.001, min(times) - time.monotonic())) if times else 1.0

    def end(self, session: PeerSession) -> None:
        """The connection is over, and so is the peer, until it comes again."""
        peer = self._directory.peers.get(session.number)
        if peer is None:
            self._drop(session)
            return
        if self._merge is not None and peer.serves is not None:
            _, _, place = peer.serves  # it may live in another part of the swarm, and serve there
            if place in self._directory.directories():
                self._merge.learn(place)
        self._lose(session.number)

    def tell_all(self, message: Message) -> None:
        self._tell_each(list(self._sessions), message)

    # ---- messages ----

    def _take(self, session: PeerSession, message: Message) -> None:
        if session.number < 0:
            self._take_first(session, message)
        else:
            self._directory.beat(session.number)
            if take := self._takes.get(type(message)):
                take(session.number, message)

    def _take_averages(self, number: int, wanted: protocol.Averages) -> None:
        answer = self._directory.averages(number, wanted)
        if answer is not None:
            self._tell(number, answer)

    def _take_first(self, session: PeerSession, message: Message) -> None:
        """Take a message of a stranger: a peer that joins, another directory, or somebody who
        looks who is there."""
        claims = session in self._claims
        if isinstance(message, protocol.Join) and not claims:
            self._join(session, message, may_claim=True)
        elif isinstance(message, protocol.DirectoryStatus) and self._merge is not None:
            session.connection.write(pack(self._merge.asked(message, session.place())))
        elif isinstance(message, protocol.Who):
            # The peers, or the directories that have them.
            places = [] if self._directory.peers else self._instead(NEWCOMER)
            self._last(session, *([_others(places)] if places else self._names()))
        elif isinstance(message, protocol.Heartbeat) and not claims:
            self._say_who_serves(session)
        else:
            self._drop(session)

    def _say_who_serves(self, session: PeerSession) -> None:
        """Answer a newcomer that looks for the directory in use, and may ask again."""
        places = self._instead(NEWCOMER)
        answer = self._heartbeat() if places is None else _others(places)
        session.connection.write(pack(answer))
        session.since = time.monotonic()
        self._strangers[session] = self._strangers.pop(session)

    def _join(self, session: PeerSession, wanted: protocol.Join, *, may_claim: bool) -> None:
        places = self._instead(wanted)
        if places is not None:
            self._last(session, _others(places))
            return
        self._stands_by = False
        if self._directory.is_again(wanted):  # its former connection has ended unseen
            self._lose(wanted.number)
        holder = self._directory.holder(wanted.name)
        if holder is not None and may_claim:
            self._claims[session] = Claim(wanted, holder.number, time.monotonic())
            self._tell(holder.number, protocol.Probe())
            return
        answer = self._directory.join(wanted)
        if isinstance(answer, protocol.Refused):
            self._last(session, answer)
            return
        session.number = answer.number
        del self._strangers[session]
        self._sessions[answer.number] = session
        session.connection.write(pack(answer))
        self._tell(answer.number, protocol.Directories(self._directory.directories()))

    def _settle(self, session: PeerSession, claim: Claim, now: float) -> None:
        """Give a name to whoever claims it, once its holder has gone or is silent; or refuse it."""
        holder = self._directory.holder(claim.wanted.name)
        if holder is not None and holder.number == claim.holder and holder.seen <= claim.asked:
            if now < claim.asked + PROBE_SECONDS:
                return
            self.counts["replaced"] += 1
            self.end(self._sessions[claim.holder])
        del self._claims[session]
        self._join(session, claim.wanted, may_claim=False)

    def _instead(self, wanted: protocol.Join) -> list[Address] | None:
        """Return the directories that a peer should ask instead; None: it is right here."""
        is_owner, is_new = wanted.name == self._owner.name, wanted.number == MOST_PEERS
        place = None
        if self._merge is not None and (is_new or not is_owner):
            place = self._merge.redirect(wanted)
        found = [] if place is None else [place]
        # Its owner itself may be new: then the swarm is elsewhere, if it is anywhere.
        if self._stands_by and (is_new or not is_owner):
            client = self._owner.client()
            others = client.directories.places if client else ()
            return found + [one for one in others if one != place]
        if is_new and not self._directory.peers and time.monotonic() < self._waits_until:
            return found  # of none, it asks again
        return found or None

    def _tell_directories(self, now: float) -> None:
        """Send the directory list when it has changed, not too often: a large swarm that ends
        changes it all the time."""
        listed = self._directory.directories()
        if listed != self._listed and now >= self._list_at:
            self._listed, self._list_at = listed, now + LIST_SECONDS * len(self._sessions)
            self.tell_all(protocol.Directories(listed))

    def _tell_present(self) -> None:
        """Tell some peers in each turn who is present: of thousands, the list is long."""
        if self._directory.has_just_settled():
            here = self._directory.peers.values()
            self._present = protocol.Present(tuple(one.incarnation[:START] for one in here))
            self._unaware = list(self._sessions)
        some, self._unaware = self._unaware[:PRESENT_AT_ONCE], self._unaware[PRESENT_AT_ONCE:]
        if some:
            self._tell_each(some, self._present)

    def _heartbeat(self) -> protocol.Heartbeat:
        return protocol.Heartbeat(len(self._directory.peers))

    def _names(self) -> list[protocol.Peers]:
        names = self._directory.names()
        return [
            protocol.Peers(names[at : at + MOST_NAMES], int(at + MOST_NAMES < len(names)))
            for at in range(0, max(1, len(names)), MOST_NAMES)
        ]

    def _last(self, session: PeerSession, *messages: Message) -> None:
        for message in messages:
            session.connection.write(pack(message))
        session.connection.finish()
        self._drop(session)

    def _tell(self, number: int, *messages: Message) -> None:
        for message in messages:
            self._tell_each([number], message)

    def _tell_each(self, numbers: Sequence[int], message: Message) -> None:
        """The same to all of them: it is packed once."""
        packed = pack(message)
        for number in numbers:
            session = self._sessions.get(number)
            if session is not None:
                session.connection.write(packed)
                self._check(session)

    # ---- ends of connections ----

    def _check(self, session: PeerSession) -> None:
        if session.connection.broken and not session.over:
            self.end(session)

    def _lose(self, number: int, *, redirected: bool = False) -> None:
        """``redirected``: to another directory; whoever may still need its packets has them."""
        session = self._sessions.pop(number, None)
        if session is not None:
            session.number = -1
            self._drop(session)
        for other, incarnation in self._directory.lost(number):
            if not redirected:
                self._tell(other, protocol.Gone(incarnation))

    def _drop(self, session: PeerSession) -> None:
        self._strangers.pop(session, None)
        self._claims.pop(session, None)
        if not session.over:
            session.over = True
            session.connection.close()
            session.dropped()


def _others(places: Sequence[Address]) -> protocol.Directories:
    return protocol.Directories(tuple(places[: protocol.MOST_DIRECTORIES]))
