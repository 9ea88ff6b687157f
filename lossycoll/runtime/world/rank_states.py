"""States of ranks: the enum, its transitions, and the table that a world or a group keeps.

A group's, for the agreement on who is left, is in view_agreement.py.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class RankState(IntEnum):
    """State of a rank, as one process knows it. The numbers are those of the status page."""

    PRESENT = 0
    """Takes part, as far as is known."""
    ENDED = 1
    """Lost: its process has ended."""
    LOST = 2
    """Lost: silent for too long, so it is dead, stopped or cut off."""
    LEFT = 3
    """Has said goodbye."""
    ABORTED = 4
    """Has given the group up."""
    STOPPED = 5
    """A signal or a debugger has stopped its process; only its own machine knows that."""
    SILENT = 6
    """Nothing was heard of it for a while, but it isn't given up."""
    UNKNOWN = 7
    """No process runs, of those that were asked, that could have heard of it."""

    @property
    def word(self) -> str:
        """The state in what ``lossycoll status`` prints."""
        return _WORDS.get(self, self.name.lower())


_WORDS: Final = {RankState.PRESENT: "alive", RankState.ENDED: "dead", RankState.LOST: "dead"}
LOST_STATES: Final = frozenset((RankState.ENDED, RankState.LOST))
_TRANSITIONS: Final = {
    RankState.PRESENT: {RankState.ENDED, RankState.LOST, RankState.LEFT, RankState.ABORTED},
    RankState.LOST: {RankState.ENDED},
    RankState.ABORTED: {RankState.ENDED, RankState.LOST, RankState.LEFT},
    # A group that needs a rank that has left continues without it.
    RankState.LEFT: {RankState.ENDED, RankState.LOST},
}


class RankStates:
    """The table of one world or group: the state of each rank. ``rank``: whose table it is, who
    isn't lost to itself; -1: nobody's."""

    def __init__(self, world: int, rank: int = -1) -> None:
        self._world = world
        self._rank = rank
        self._others: dict[int, RankState] = {}
        """The ranks that aren't PRESENT: few of many."""

    def __getitem__(self, rank: int) -> RankState:
        return self._others.get(rank, RankState.PRESENT)

    def move(self, rank: int, news: RankState) -> bool:
        """Takes ``news`` of a rank. False: they are too old to change anything."""
        is_news = news in _TRANSITIONS.get(self[rank], ())
        if is_news:
            self._others[rank] = news
        return is_news

    def lose(self, rank: int, *, ended: bool) -> bool:
        """Gives another rank up; ``ended``: its process has ended. False: that isn't news."""
        known = rank == self._rank or self.is_lost(rank)
        if rank != self._rank:
            self.move(rank, RankState.ENDED if ended else RankState.LOST)
        return not known

    def is_present(self, rank: int) -> bool:
        return rank not in self._others

    def is_lost(self, rank: int) -> bool:
        """True if a rank was given up, for whichever reason."""
        return self[rank] in LOST_STATES

    def ranks(self, *states: RankState) -> set[int]:
        some = range(self._world) if RankState.PRESENT in states else self._others
        return {rank for rank in some if self[rank] in states}

    @property
    def lost(self) -> set[int]:
        """The other ranks that were given up."""
        return self.ranks(*LOST_STATES) - {self._rank}

    @property
    def left(self) -> set[int]:
        """The other ranks that have said goodbye."""
        return self.ranks(RankState.LEFT) - {self._rank}


class Succession(RankStates):
    """One rank's table of its world, and so who is the coordinator: the lowest rank that is neither
    lost nor has left. This rank, which is LOST when the others have given it up, is always left to
    itself."""

    coordinator = 0

    @property
    def is_coordinator(self) -> bool:
        return self.coordinator == self._rank

    def is_gone(self, rank: int) -> bool:
        """True if another rank is lost or has left."""
        return rank != self._rank and not self.is_present(rank)

    @property
    def others(self) -> list[int]:
        """The ranks that are here, but for this one."""
        return [r for r in range(self._world) if r != self._rank and self.is_present(r)]

    def lose(self, rank: int, *, ended: bool) -> bool:
        """The same, unless the rank has left."""
        return self[rank] != RankState.LEFT and super().lose(rank, ended=ended)

    def leave(self, rank: int) -> bool:
        """``rank`` has left in order. False: not news."""
        return rank != self._rank and self.move(rank, RankState.LEFT)

    def succeed(self) -> bool:
        """True if the coordinator is another one from now on, since the last one is gone."""
        before = self.coordinator
        while self.is_gone(self.coordinator):  # for good, so the next one is a higher rank
            self.coordinator += 1
        return before != self.coordinator

    def sets(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What a rank and a new coordinator tell each other: the lost, those of them whose
        processes have ended, and those that have left."""
        ended = self.ranks(RankState.ENDED) - {self._rank}
        return tuple(sorted(self.lost)), tuple(sorted(ended)), tuple(sorted(self.left))
