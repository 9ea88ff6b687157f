"""Failover of the coordinator: succession, and a replay log; without sockets or clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .messages import Addressed
from .rank_states import LOST_STATES, RankState, RankStates

MOST_REPLAYED: Final = 4096


class Succession(RankStates):
    """One rank's table of its world, and so who is the coordinator: the lowest rank that is neither
    lost nor has left. This rank, which is LOST when the others have given it up, is always left to
    itself."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(world)
        self._rank = rank
        self.coordinator = 0

    @property
    def is_coordinator(self) -> bool:
        return self.coordinator == self._rank

    @property
    def lost(self) -> list[int]:
        """The other ranks that were given up."""
        return sorted(self.ranks(LOST_STATES) - {self._rank})

    @property
    def left(self) -> list[int]:
        return sorted(self.ranks([RankState.LEFT]))

    def is_gone(self, rank: int) -> bool:
        """True if another rank is lost or has left."""
        return rank != self._rank and not self.is_present(rank)

    @property
    def others(self) -> list[int]:
        """The ranks that are here, but for this one."""
        return [r for r in range(self._world) if r != self._rank and not self.is_gone(r)]

    def lose(self, rank: int, *, ended: bool) -> bool:
        """``rank`` is lost. False: not news, as that a rank is lost that has left."""
        if rank == self._rank or self[rank] == RankState.LEFT:
            return False
        return super().lose(rank, ended=ended)

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
        ended = [rank for rank in self.lost if self[rank] == RankState.ENDED]
        return tuple(self.lost), tuple(ended), tuple(self.left)


class ReplayLog:
    """Messages that are said once, kept for as long (``seconds``) as a coordinator may have died
    with them. The next coordinator hears them again from their senders, and tells all that connect
    what it has itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: OrderedDict[tuple[int, int, str], tuple[float, Addressed]] = OrderedDict()

    def note(self, message: Addressed, now: float) -> bool:
        """Keeps ``message``. False: it is known."""
        key = message.sender, message.group, repr(message.body)
        if key in self._kept:
            return False
        self._prune(now)
        self._kept[key] = now, message
        return True

    def of(self, sender: int, now: float) -> list[Addressed]:
        """Messages that ``sender`` has said, oldest first."""
        self._prune(now)
        return [message for _, message in self._kept.values() if message.sender == sender]

    def to(self, rank: int, now: float) -> list[Addressed]:
        """Messages that others have said to ``rank``, oldest first."""
        self._prune(now)
        return [m for _, m in self._kept.values() if m.to >> rank & 1 and m.sender != rank]

    def _prune(self, now: float) -> None:
        while self._kept:
            at, _ = next(iter(self._kept.values()))
            if now - at <= self._seconds and len(self._kept) < MOST_REPLAYED:
                return
            self._kept.popitem(last=False)
