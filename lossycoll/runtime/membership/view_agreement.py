"""Who is left of a group: the agreement after a rank was lost, as a state machine without sockets.

Every rank that hears of a loss stops submitting, and tells the *hub* (the lowest rank that is left)
the number of its next operation. When all that are left have told, the hub fixes the next *view*:
the ranks that are left, and the first operation that is theirs alone, which no rank has submitted
yet. So all ranks change over at the same operation; those before it count the dead as loss.

The views travel as a whole, since a hub may die while it tells of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """Operations from number ``first`` on are those of ``members`` (ranks, ascending)."""

    first: int
    members: tuple[int, ...]


class Survivors:
    """One rank's part in the agreement. ``views`` begins with all ranks, from operation 0 on."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self.views: list[View] = [View(0, tuple(range(world)))]
        self.lost: set[int] = set()
        """Ranks that this one gives up, in the latest view or since."""
        self.proven: set[int] = set()
        """Ranks whose processes are known to have ended."""
        self._told: dict[int, tuple[frozenset[int], int]] = {}

    @property
    def left(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.views[-1].members if rank not in self.lost)

    @property
    def agreed(self) -> bool:
        """Whether the latest view knows of all that are lost."""
        return self.left == self.views[-1].members

    def lose(self, rank: int, *, proven: bool) -> bool:
        """Gives ``rank`` up; ``proven``: its process is known to have ended. False: not news."""
        if proven:
            self.proven.add(rank)
        if rank in self.lost or rank == self._rank:
            return False
        self.lost.add(rank)
        return True

    def told(self, rank: int, lost: Iterable[int], following: int, views: Sequence[View]) -> None:
        """``rank`` has stopped before operation ``following``, and gives ``lost`` up."""
        self._told[rank] = (frozenset(lost), following)
        self.learn(views)

    def learn(self, views: Sequence[View]) -> bool:
        """Takes over views that another rank has heard of and this one hasn't. False: not news."""
        if len(views) <= len(self.views):
            return False
        self.views = list(views)
        self.lost |= set(self.views[0].members) - set(self.views[-1].members)
        return True

    def decide(self) -> View | None:
        """At the hub: the next view, once all that are left have told the same; else None."""
        if self.agreed:
            return None
        nexts = []
        for rank in self.left:
            lost, following = self._told.get(rank, (frozenset[int](), 0))
            if lost != self.lost:
                return None
            nexts.append(following)
        view = View(max([*nexts, self.views[-1].first]), self.left)
        self.views.append(view)
        return view

    def may_go_on(self) -> bool:
        """Whether those that are left can't be the smaller part of a network that fell apart.

        They must be more than half of the latest view's ranks, or half of them with its lowest.
        Ranks whose processes have ended don't count.
        """
        rest = [rank for rank in self.views[-1].members if rank not in self.proven]
        here = len(self.left)
        return 2 * here > len(rest) or (2 * here == len(rest) and rest[0] in self.left)
