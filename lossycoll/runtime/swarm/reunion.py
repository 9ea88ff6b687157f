"""How directories of one swarm, which a split has made two, become one again: a state machine
without sockets, and the rule that says which of them yields. docs/moshpit.md has it in words.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from lossycoll.plan.rng import key_of

from .directory import LEASE, Directory
from .protocol import PLACES, Join, Rival
from .whereabouts import Place

ASK_SECONDS: Final = 5.0
"""Between two times that others are asked, give or take a quarter."""
BOUND_SECONDS: Final = 15.0
"""For which a directory that takes another's peers doesn't yield."""
HOLD_SECONDS: Final = 10.0
"""For which those may come back that were told to turn to another."""
PATIENCE_SECONDS: Final = 60.0
MOST_PATIENCE: Final = 600.0
"""For which a directory doesn't yield again when some have come back; twice as long each time."""
HEARD_SECONDS: Final = 0.75 * LEASE
"""Peers count that were heard from so lately. They give a sign of life each half of a lease."""
MOST_KNOWN: Final = 24


def yields(own: Rival, other: Rival) -> bool:
    """Which of two open directories of a swarm is to yield: the one with fewer peers, of equally
    many that of the later epoch, of equal ones that of the greater number.

    Args:
        own: How the one stands.
        other: And the other.

    Returns:
        Whether it is the first. With the two exchanged it is the contrary, unless they are one.
    """
    return (-own.peers, own.epoch, own.id) > (-other.peers, other.epoch, other.id)


def takes(own: Rival, other: Rival) -> bool:
    """Whether a directory that stands so can have another's peers.

    Args:
        own: Of the one that is asked.
        other: Of the one that asks.
    """
    same = own.session == other.session and own.id != other.id
    alike = (own.schema, own.wire) == (other.schema, other.wire)
    alike = alike or not (own.schema and other.schema)
    return same and alike and 0 < other.peers <= own.free and own.peers > 0 and yields(other, own)


class Reunion:
    """Of one directory.

    Args:
        clock: In seconds.
        directory: Whose peers turn to another, or to which others' come.
        name: 16 to 64 hex digits, no other directory's; empty: drawn.
    """

    def __init__(self, clock: Callable[[], float], directory: Directory, *, name: str = "") -> None:
        self._clock = clock
        self._directory = directory
        self._id = name or secrets.token_hex(16)
        self._asked = 0
        self._asks_at = clock() + self._period()
        self._bound_until = -math.inf
        self._patience = PATIENCE_SECONDS
        self._known: dict[Place, float] = {}
        """Other directories, the latest that were heard of last; when each has asked last."""
        self._rival: tuple[Place, str, float] | None = None
        """Of a swarm that goes on elsewhere, while nobody is here: its session, and when it was
        heard of."""
        self._to: Place | None = None
        """Whom this one has yielded to."""
        self._told: frozenset[str] = frozenset()
        """Names of those that were told so."""
        self._left = 0.0
        """When one of them has last been here that hadn't gone yet."""

    # ---- whom to ask ----

    def learn(self, place: Place) -> None:
        """There is, or was, a directory of this swarm."""
        asked = self._known.pop(place, -math.inf)
        self._known[place] = asked
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def wakes(self) -> float:
        """When :meth:`due` or :meth:`ends` may say something new by themselves, on the clock."""
        if self._to is not None:
            return min(self._asks_at, self._left + HOLD_SECONDS)
        return self._asks_at

    def due(self, own: Place, others: Sequence[Place] = ()) -> list[Place]:
        """Whom to ask now: others that aren't known to have no peers because theirs is here.

        Args:
            own: Where this directory is.
            others: Directories that the peer knows whose this one is.
        """
        now = self._clock()
        if now < self._asks_at:
            return []
        self._asks_at = now + self._period()
        if self._to is not None or now < self._bound_until or not self._directory.peers:
            return []
        here = {p for one in self._directory.peers.values() for p in (one.serves, one.spare)}
        for place in others:
            if place not in here:
                self.learn(place)
        return [
            place
            for place, asked in self._known.items()
            if place != own and (place not in here or now - asked < LEASE)
        ]

    def _period(self) -> float:
        self._asked += 1
        drawn = key_of(int(self._id[:16], 16), int(self._id[16:32] or "0", 16), self._asked)
        return ASK_SECONDS * (0.75 + 0.5 * (drawn % 1000) / 1000)

    # ---- questions and answers ----

    def stands(self, own: Place, takes: bool = False) -> Rival:
        """How this directory stands now."""
        directory = self._directory
        peers = [one for one in directory.peers.values() if not one.told]
        since = self._clock() - HEARD_SECONDS
        schema, wire = next(((one.schema, one.wire) for one in peers if one.schema), ("", "same"))
        return Rival(
            session=directory.session,
            id=self._id,
            epoch=directory.epoch,
            peers=sum(one.seen >= since for one in peers),
            free=directory.free,
            round=directory.round,
            schema=schema,
            wire=wire,
            host=own[0],
            port=own[1],
            takes=int(takes),
        )

    def asked(self, other: Rival, own: Place) -> Rival:
        """Another directory asks.

        Args:
            other: How it stands.
            own: Where this one is.

        Returns:
            The answer. If it takes the other's peers, this one is bound: it doesn't even follow the
            answer to a question that is on its way.
        """
        now, place = self._clock(), (other.host, other.port)
        stands = self.stands(own)
        if not self._directory.peers and other.peers:
            self._rival = place, other.session, now
        if other.session == stands.session and other.id != self._id:
            self.learn(place)
            self._known[place] = now
        if self._to is not None or not takes(stands, other):
            return stands
        self._bound_until = now + BOUND_SECONDS
        self._directory.takes(other.round, BOUND_SECONDS)
        return self.stands(own, takes=True)

    def answered(self, asked: Rival, other: Rival, place: Place) -> bool:
        """Another directory has answered.

        Args:
            asked: How this one stood in its question.
            other: How the other one does.
            place: Where it was asked.

        Returns:
            Whether this one has yielded: its peers are to hear that.
        """
        if other.id == self._id:
            self._known.pop(place, None)  # this one, by another address
        bound = self._clock() < self._bound_until
        if self._to is not None or bound or not other.takes or not takes(other, asked):
            return False
        self._to, self._left = place, self._clock()
        self._told = frozenset(self._directory.names())
        self._directory.tell_all()
        return True

    # ---- who comes ----

    @property
    def to(self) -> Place | None:
        """Whom this directory has yielded to; None: nobody."""
        return self._to

    def elsewhere(self, wanted: Join) -> Place | None:
        """Where a peer that comes should go instead; None: nowhere."""
        if self._to is not None:
            return None if wanted.name in self._told else self._to
        if self._rival is None or self._directory.peers:
            return None
        place, session, heard = self._rival
        is_of_it = wanted.number == PLACES or wanted.session == session
        return place if is_of_it and self._clock() - heard < LEASE else None

    def ends(self) -> bool:
        """Whether all have gone that were told to, and none has come back. If some have, the
        directory is open again, and yields no more for some time."""
        if self._to is None:
            return False
        now, peers = self._clock(), self._directory.peers
        if any(one.told for one in peers.values()):
            self._left = now
        if now - self._left < HOLD_SECONDS:
            return False
        to, self._to, self._told = self._to, None, frozenset()
        if peers:
            self._bound_until = now + self._patience
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            return False
        self._patience = PATIENCE_SECONDS
        self._rival = to, self._directory.session, now
        return True
