"""The order of a group's operations, and the ranks that each of them is for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from lossycoll.runtime.membership.view_agreement import View


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part: ``members`` (ranks, ascending) of ``world``, ``rank`` among them."""

    world: int
    rank: int
    members: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return len(self.members) == self.world

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world) if rank not in self.members)


class Sequencer:
    """Numbers the operations: inside ``with sequencer as roster:``, one caller submits ``next``.

    During a view change nobody submits; ``check`` is called meanwhile and may raise. Other threads
    may call ``stop`` and ``resume``.
    """

    def __init__(self, rank: int, world: int, check: Callable[[], None]) -> None:
        self.next = 0
        self._rank = rank
        self._world = world
        self._check = check
        self._submitting = threading.Condition(threading.Lock())
        self._stopped = False
        everyone = Roster(world, rank, tuple(range(world)))
        self._rosters: list[tuple[int, Roster]] = [(0, everyone)]

    def __enter__(self) -> Roster:
        self._submitting.acquire()
        try:
            while self._stopped:
                self._submitting.wait(0.1)
                self._check()
        except BaseException:
            self._submitting.release()
            raise
        return self.at(self.next)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._submitting.release()

    def at(self, number: int) -> Roster:
        """Who operation ``number`` is for."""
        rosters = self._rosters
        for first, roster in reversed(rosters):
            if number >= first:
                return roster
        return rosters[0][1]

    @property
    def latest(self) -> Roster:
        return self._rosters[-1][1]

    def stop(self) -> int:
        """Lets nobody submit until ``resume``; returns the number of the next operation."""
        self._stopped = True  # before the lock, which a thread that submits anew may win each time
        with self._submitting:
            return self.next

    def resume(self, views: Sequence[View], *, agreed: bool) -> None:
        """Takes over the views; callers may submit again if the last one is ``agreed``."""
        with self._submitting:
            self._rosters = [
                (view.first, Roster(self._world, self._rank, view.members)) for view in views
            ]
            if agreed:
                self._stopped = False
                self._submitting.notify_all()
