"""States of ranks, and what follows from them: a world's coordinator, and a group's survivors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from typing import Final

from .messages import View


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

    def sets(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What ranks tell one another: the lost, those of them whose processes have ended, and
        those that have left."""
        ended = self.ranks(RankState.ENDED) - {self._rank}
        return tuple(sorted(self.lost)), tuple(sorted(ended)), tuple(sorted(self.left))


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


def has_quorum(here: Collection[int], of: Collection[int]) -> bool:
    """True if ``here`` holds more than half of ``of``, or half with the lowest: of two parts
    without a common member at most one has a quorum."""
    mine = {*of} & {*here}
    return 2 * len(mine) > len({*of}) or (2 * len(mine) == len({*of}) > 0 and min(of) in mine)


class Survivors(RankStates):
    """One rank's table of its group, and its part in the agreement on who remains after a loss
    (docs/control.md).

    The proposer fixes the next *view*: the ranks that remain, and the first operation that is
    theirs alone, which no rank has submitted yet. So all ranks change over at the same operation;
    those before it count the dead as loss. Views travel as a whole, since a proposer may die while
    it tells of one. ``patience``: seconds from this rank's stop after which it no longer waits for
    an agreement.
    """

    def __init__(self, rank: int, world: int, patience: float) -> None:
        super().__init__(world, rank)
        self._patience = patience
        self.views: tuple[View, ...] = (View(0, tuple(range(world))),)
        self.next = 0
        """The operation before which this rank has stopped."""
        self._stopped_at = 0.0
        self._reported: dict[int, tuple[frozenset[int], int]] = {}

    @property
    def remaining(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.views[-1].members if not self.is_lost(rank))

    @property
    def agreed(self) -> bool:
        """True if the latest view knows of all that are lost."""
        return self.remaining == self.views[-1].members

    @property
    def proposer(self) -> int:
        """The rank that decides; who has said goodbye can't. This rank always remains."""
        left = self.left
        return min(rank for rank in self.remaining if rank not in left)

    def stopped(self, before: int, now: float) -> None:
        self.next = before
        self._stopped_at = now

    def report(self, rank: int, lost: Iterable[int], before: int) -> None:
        self._reported[rank] = (frozenset(lost), before)

    def learn(self, views: Sequence[View]) -> bool:
        """Takes over views that another rank has heard of and this one hasn't. False: not news."""
        if len(views) <= len(self.views):
            return False
        self.views = tuple(views)
        for rank in {*self.views[0].members} - {*self.views[-1].members}:
            self.move(rank, RankState.LOST)
        return True

    def decide(self) -> View | None:
        """At the proposer: the next view, once all that remain have told the same."""
        if self.agreed:
            return None
        given_up = frozenset(self.lost)
        self._reported[self._rank] = (given_up, self.next)
        firsts = [self.views[-1].first]
        for rank in self.remaining:
            lost, before = self._reported.get(rank, (frozenset[int](), 0))
            if lost != given_up:
                return None
            firsts.append(before)
        view = View(max(firsts), self.remaining)
        self.views = (*self.views, view)
        return view

    def must_stop(self, now: float) -> bool:
        """True if this rank must not go on: those that remain took too long to agree, or may be the
        smaller part of a network that fell apart. Ranks that have ended aren't a part of it."""
        late = not self.agreed and now - self._stopped_at > self._patience
        ended = self.ranks(RankState.ENDED)
        return late or not has_quorum(self.remaining, {*self.views[-1].members} - ended)
