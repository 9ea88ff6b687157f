"""The order of a group's operations, and the ranks that each of them is for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.runtime.world.messages import View


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that take part: ``ranks`` (ascending) of ``world``, ``rank`` among them."""

    world: int
    rank: int
    ranks: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)


POLL_SECONDS: Final = 0.005
"""How often a caller looks whether the view change is over."""


class Sequencer:
    """Numbers the operations: whoever holds ``lock`` may submit operation ``next``.

    ``lock`` is a plain lock, to be used in a ``with`` statement: only there can't Ctrl-C come
    between taking it and what gives it back. ``check`` is called while callers wait for
    a view change, and may raise. Other threads may call ``stop`` and ``resume``.
    """

    def __init__(self, rank: int, world: int, check: Callable[[], None]) -> None:
        self.next = 0
        self.lock: Final = threading.Lock()
        self._rank = rank
        self._world = world
        self._check = check
        self._stopped = False
        everyone = Members(world, rank, tuple(range(world)))
        self._views: list[tuple[int, Members]] = [(0, everyone)]

    def members(self) -> Members:
        """Who operation ``next`` is for. The caller holds ``lock``; a view change is waited for."""
        while self._stopped:
            try:
                self.lock.release()  # in here: whatever interrupts the sleep takes it back
                time.sleep(POLL_SECONDS)
            finally:
                self.lock.acquire()
            self._check()
        return self.at(self.next)

    def at(self, number: int) -> Members:
        """Who operation ``number`` is for."""
        views = self._views
        if number >= views[-1][0]:  # nearly always, and this is asked for each operation
            return views[-1][1]
        for first, members in reversed(views):
            if number >= first:
                return members
        return views[0][1]

    @property
    def latest(self) -> Members:
        return self._views[-1][1]

    def stop(self) -> int:
        """Lets nobody submit until ``resume``; returns the number of the next operation."""
        self._stopped = True  # before the lock, which a thread that submits anew may win each time
        with self.lock:
            return self.next

    def resume(self, views: Sequence[View], *, agreed: bool) -> None:
        """Takes over the views; callers may submit again if the last one is ``agreed``."""
        with self.lock:
            self._views = [
                (view.first, Members(self._world, self._rank, view.members)) for view in views
            ]
            if agreed:
                self._stopped = False
