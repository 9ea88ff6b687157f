"""View agreement on the surviving ranks after a loss, as a state machine (docs/control.md).

The proposer fixes the next *view*: the ranks that remain, and the first operation that is theirs
alone, which no rank has submitted yet. So all ranks change over at the same operation; those before
it count the dead as loss. Views travel as a whole, since a proposer may die while it tells of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .messages import View
from .rank_states import RankState, RankStates


def has_quorum(here: Collection[int], of: Collection[int]) -> bool:
    """True if ``here`` holds more than half of ``of``, or half with the lowest: of two parts
    without a common member at most one has a quorum."""
    mine = {*of} & {*here}
    return 2 * len(mine) > len({*of}) or (2 * len(mine) == len({*of}) > 0 and min(of) in mine)


class Survivors(RankStates):
    """One rank's table of its group, and its part in the agreement. ``views`` begins with all
    ranks, from operation 0 on. ``patience``: seconds from this rank's stop after which it no longer
    waits for an agreement."""

    def __init__(self, rank: int, world: int, patience: float) -> None:
        super().__init__(world, rank)
        self._patience = patience
        self.views: tuple[View, ...] = (View(0, tuple(range(world))),)
        self.next = 0
        """The operation before which this rank has stopped."""
        self._stopped_at = 0.0
        self._reported: dict[int, tuple[frozenset[int], int]] = {}

    @property
    def ended(self) -> set[int]:
        return self.ranks(RankState.ENDED)

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
        return late or not has_quorum(self.remaining, {*self.views[-1].members} - self.ended)
