"""A peer, as the directory knows it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from lossycoll.runtime.control.schema import Address

from .protocol import Averages, Here, Member

KNOWN: Final = 16  # rounds that it is learnt from how long peers take


class Rounds:
    """Counts of a directory's peers by their next round: nobody has to ask each of them."""

    def __init__(self) -> None:
        self._peers: Counter[int] = Counter()  # number of peers with each next round

    def move(self, before: int | None, after: int | None) -> None:
        """A peer has another round next; None: it isn't here, before or from then on."""
        if before is not None:
            self._peers[before] -= 1
            if not self._peers[before]:
                del self._peers[before]
        if after is not None:
            self._peers[after] += 1

    @property
    def furthest(self) -> int:
        """The round of the peer that is furthest; 0: nobody is here."""
        return max(self._peers, default=0)

    @property
    def least(self) -> int:
        """And of the one that is least far."""
        return min(self._peers, default=0)


@dataclass(slots=True, eq=False)
class Peer:
    number: int
    name: str
    incarnation: str
    rounds: Rounds  # round counts of its directory
    seen: float
    came: int  # number of peers that came before it
    cell: int = -1
    said: Averages | None = None  # tensors that it averages, or a draft
    schema: str = ""  # schema of its tensors; "": not all are announced
    serves: tuple[int, int, Address] | None = None
    """Its own directory, for the time after this one, or one that it would open: 0, the number of
    peers that came before it, and the address; or 1, its own number, and the address."""
    told: bool = False  # it is to turn to another directory: no round begins with it here
    place: Here | None = None
    weight: float | None = None  # weight of its ready tensors; None: none are ready
    ready_at: float = 0.0
    began: float = 0.0  # when its latest round began, or it said what it averages
    samples: int = 0  # that the swarm had had when its latest round began, or as its state says
    since: int = 0  # its own samples since then
    due: bool = False  # it has heard that a round is due by samples, and hasn't been in one since
    came_back: bool = False  # it has had a connection to a directory before: its state is no news
    behind: int = 0  # samples of another peer's state that it is to take; 0: none
    took: deque[float] = field(default_factory=lambda: deque(maxlen=KNOWN))
    """Seconds from the begin of a round until it was ready for the next."""
    came_late: bool = False
    """Others had had rounds before it said what it averages, and it none yet."""
    skipped: bool = False
    """Nobody waits for it until it is ready: a round has begun without it, or it came after the
    first one and hasn't said what it averages."""
    group: tuple[int, ...] = ()  # numbers of its latest group's members
    partners: set[int] = field(default_factory=set)
    """Numbers of the other ends of its state transfers."""
    _round: int | None = field(init=False, default=None)

    @property
    def round(self) -> int:
        """The one that it averages in next."""
        return self._round or 0

    @round.setter
    def round(self, number: int) -> None:
        self.rounds.move(self._round, number)
        self._round = number

    def go(self) -> None:
        self.rounds.move(self._round, None)
        self._round = None

    @property
    def is_ready(self) -> bool:
        """True if it has something to average, and others know where it is."""
        return self.weight is not None and self.place is not None

    @property
    def member(self) -> Member:
        assert self.place is not None
        weight, place, rate = self.weight or 0.0, self.place, self.said.rate if self.said else 0
        return Member(
            self.number, place.host, place.port, self.incarnation, weight, rate, place.others
        )
