"""Partition merge: directories of one swarm, which a split has made two, become one again.
:class:`PartitionMerge` is a state machine without sockets, with the rule that says which directory
yields. :class:`DirectoryProbe` carries its questions to others. docs/moshpit.md has it in words."""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lossycoll.runtime.control.schema import Address, Malformed

from .directory import LEASE, Directory
from .directory_list import ANY_ADDRESS
from .directory_transport import TransportConnection, ZmqDirectoryTransport
from .protocol import MOST_PEERS, DirectoryStatus, Join, pack, unpack

ASK_SECONDS: Final = 5.0  # between two times that others are asked, give or take a quarter
BOUND_SECONDS: Final = 15.0  # for which a directory that takes another's peers doesn't yield
HOLD_SECONDS: Final = 10.0  # for which those may come back that were told to turn to another
PATIENCE_SECONDS: Final = 60.0
MOST_PATIENCE: Final = 600.0
"""For which a directory doesn't yield again when some have come back; twice as long each time."""
HEARD_SECONDS: Final = 0.75 * LEASE
"""Peers count that were heard from so lately. They give a sign of life each half of a lease."""
MOST_KNOWN: Final = 24
ANSWER_SECONDS: Final = 2.0
"""For a question, the connection included; far less than the other is bound for."""


def yields(own: DirectoryStatus, other: DirectoryStatus) -> bool:
    """Which of two open directories of a swarm is to yield: the one with fewer peers, of equally
    many that of the later epoch, of equal ones that of the greater number. Returns whether it is
    the first. With the two exchanged it is the contrary, unless they are one."""
    return (-own.peers, own.epoch, own.id) > (-other.peers, other.epoch, other.id)


def takes(own: DirectoryStatus, other: DirectoryStatus) -> bool:
    """True if a directory of this status can have another's peers. ``own``: of the one that is
    asked."""
    same = own.session == other.session and own.id != other.id
    alike = (own.schema, own.wire) == (other.schema, other.wire)
    alike = alike or not (own.schema and other.schema)
    return same and alike and 0 < other.peers <= own.free and own.peers > 0 and yields(other, own)


class PartitionMerge:
    """Partition merge of one directory. ``directory``: whose peers turn to another, or to which
    others' come. ``name``: 16 to 64 hex digits, no other directory's; empty: drawn."""

    def __init__(self, clock: Callable[[], float], directory: Directory, *, name: str = "") -> None:
        self._clock = clock
        self._directory = directory
        self._id = name or secrets.token_hex(16)
        self._draw = random.Random(self._id)
        self._asks_at = clock() + self._period()
        self._bound_until = -math.inf
        self._patience = PATIENCE_SECONDS
        self._known: dict[Address, float] = {}
        """Other directories, the latest that were heard of last; when each has asked last."""
        self._redirect_to: tuple[Address, str, float] | None = None
        """Directory of a swarm that goes on elsewhere, while nobody is here: its session, and when
        it was heard of."""
        self.to: Address | None = None  # directory that this one has yielded to
        self._told: frozenset[str] = frozenset()  # names of those that were told so
        self._left = 0.0  # when one of them has last been here that hadn't gone yet

    # ---- whom to ask ----

    def learn(self, place: Address) -> None:
        """There is, or was, a directory of this swarm."""
        asked = self._known.pop(place, -math.inf)
        self._known[place] = asked
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def wakes(self) -> float:
        """When :meth:`due` or :meth:`ends` may say something new by themselves, on the clock."""
        if self.to is not None:
            return min(self._asks_at, self._left + HOLD_SECONDS)
        return self._asks_at

    def due(self, own: Address, others: Sequence[Address] = ()) -> list[Address]:
        """Return the directories to ask now: others whose peer isn't known to be here. ``others``:
        directories that the peer knows whose this one is."""
        now = self._clock()
        if now < self._asks_at:
            return []
        self._asks_at = now + self._period()
        if self.to is not None or now < self._bound_until or not self._directory.peers:
            return []
        here = {one.serves[-1] for one in self._directory.peers.values() if one.serves}
        for place in others:
            if place not in here:
                self.learn(place)
        return [
            place
            for place, asked in self._known.items()
            if place != own and (place not in here or now - asked < LEASE)
        ]

    def _period(self) -> float:
        return ASK_SECONDS * self._draw.uniform(0.75, 1.25)

    # ---- questions and answers ----

    def status(self, own: Address, takes: bool = False) -> DirectoryStatus:
        directory = self._directory
        peers = [one for one in directory.peers.values() if not one.told]
        since = self._clock() - HEARD_SECONDS
        said = next((one.said for one in peers if one.said and one.schema), None)
        return DirectoryStatus(
            session=directory.session,
            id=self._id,
            epoch=directory.epoch,
            peers=sum(one.seen >= since for one in peers),
            free=directory.free,
            round=directory.round,
            schema=said.schema if said else "",
            wire=said.wire if said else "same",
            host=own[0],
            port=own[1],
            takes=int(takes),
        )

    def asked(self, other: DirectoryStatus, own: Address) -> DirectoryStatus:
        """Another directory asks. Returns the answer. If it takes the other's peers, this one is
        bound: it doesn't even follow the answer to a question that is on its way."""
        now, place = self._clock(), (other.host, other.port)
        status = self.status(own)
        if not self._directory.peers and other.peers:
            self._redirect_to = place, other.session, now
        if other.session == status.session and other.id != self._id:
            self.learn(place)
            self._known[place] = now
        if self.to is not None or not takes(status, other):
            return status
        self._bound_until = now + BOUND_SECONDS
        self._directory.takes(other.round, BOUND_SECONDS)
        return self.status(own, takes=True)

    def answered(self, asked: DirectoryStatus, other: DirectoryStatus, place: Address) -> bool:
        """Another directory has answered. ``asked``: status of this one in its question. Returns
        whether this one has yielded: its peers are to hear that."""
        if other.id == self._id:
            self._known.pop(place, None)  # this one, by another address
        bound = self._clock() < self._bound_until
        if self.to is not None or bound or not other.takes or not takes(other, asked):
            return False
        self.to, self._left = place, self._clock()
        self._told = frozenset(self._directory.names())
        self._directory.tell_all()
        return True

    # ---- who comes ----

    def redirect(self, wanted: Join) -> Address | None:
        """Directory that a peer should join instead; None: this one."""
        if self.to is not None:
            return None if wanted.name in self._told else self.to
        if self._redirect_to is None or self._directory.peers:
            return None
        place, session, heard = self._redirect_to
        is_of_it = wanted.number == MOST_PEERS or wanted.session == session
        return place if is_of_it and self._clock() - heard < LEASE else None

    def ends(self) -> bool:
        """True if all have gone that were told to, and none has come back. If some have, the
        directory is open again, and yields no more for some time."""
        if self.to is None:
            return False
        now, peers = self._clock(), self._directory.peers
        if any(one.told for one in peers.values()):
            self._left = now
        if now - self._left < HOLD_SECONDS:
            return False
        to, self.to, self._told = self.to, None, frozenset()
        if peers:
            self._bound_until = now + self._patience
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            return False
        self._patience = PATIENCE_SECONDS
        self._redirect_to = to, self._directory.session, now
        return True


@dataclass(slots=True)
class _Query:
    place: Address
    connection: TransportConnection
    until: float
    asked: DirectoryStatus | None = None
    """The answer's status; None: the connection isn't there yet."""


@dataclass(eq=False)
class DirectoryProbe:
    """Questions of a directory to others of its swarm, each over a connection of its own.
    ``merge``: which says whom to ask, and what an answer means."""

    merge: PartitionMerge
    transport: ZmqDirectoryTransport
    host: str
    port: int
    _queries: list[_Query] = field(default_factory=list)

    def place(self, own: str) -> Address:
        """Address by which the other end of a connection finds this directory. ``own``: the numeric
        address of the connection's end here."""
        here = own.partition("%")[0] if self.host in ANY_ADDRESS else self.host
        return here or self.host, self.port

    def wakes(self) -> float:
        """When :meth:`turn` may have something to do, on the clock."""
        return min([self.merge.wakes(), *(one.until for one in self._queries)])

    def turn(self, others: Sequence[Address]) -> Address | None:
        """Take answers, ask the directories that are due, and give up questions that take too long.
        ``others``: directories that the peer knows whose this one is. Returns the directory to
        which this one yields now; None: it doesn't."""
        now, to = time.monotonic(), None
        for one in list(self._queries):
            found = one.connection.read()
            if found or one.connection.broken or now > one.until:
                self._queries.remove(one)
                one.connection.close()
                if found and now <= one.until and self._yields(one, found[0]):
                    to = one.place
            elif one.asked is None and one.connection.reached:
                one.asked = self.merge.status(self.place(one.connection.own))
                one.connection.write(pack(one.asked))
        for place in self.merge.due((self.host, self.port), others):
            with contextlib.suppress(OSError):  # no address
                connection = self.transport.reach(place, "")
                self._queries.append(_Query(place, connection, now + ANSWER_SECONDS))
        return to

    def _yields(self, one: _Query, said: bytes) -> bool:
        try:
            other = unpack(said)
        except Malformed:
            return False
        if not isinstance(other, DirectoryStatus) or one.asked is None:
            return False
        return self.merge.answered(one.asked, other, one.place)
