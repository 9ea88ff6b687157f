"""Threads that take turns on one virtual clock: one runs, until it sleeps or ends.

Code that waits by a clock and a sleep of its own runs here as on a machine without load, and a wait
takes no time. The order of turns follows from the times alone; or it is drawn, and is one that a
busy machine could have. It stands in for the module ``time``.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

STUCK_SECONDS: Final = 60.0
"""Of real time: a turn that lasts so long waits for something else than the clock."""
STARVED: Final = 0.2
"""Where the order is drawn: how often who could move doesn't, and the clock jumps."""


class VirtualTime:
    """A clock, and the threads that sleep by it; ``draw`` draws the order of those that are due."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.now = 1000.0
        self._draw = draw
        self._order = count()
        self._queue: list[tuple[float, int, threading.Event]] = []
        self._turn_is_over = threading.Event()

    def monotonic(self) -> float:
        """Seconds, of the virtual clock."""
        return self.now

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """A thread whose first turn is due now."""
        may_run = threading.Event()
        self._plan(0.0, may_run)

        def run() -> None:
            may_run.wait()
            try:
                work()
            finally:
                self._turn_is_over.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def sleep(self, seconds: float) -> None:
        """Ends a thread's turn; the next one is due after ``seconds``."""
        may_run = threading.Event()
        self._plan(seconds, may_run)
        self._turn_is_over.set()
        may_run.wait()

    def run(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Gives turns for ``seconds``, or until it is over, or all threads have ended."""
        end = self.now + seconds
        while not is_over() and self._queue:
            turn = self._next()
            if turn[0] > end:
                break
            self._queue.remove(turn)
            self.now = max(self.now, turn[0])
            self._turn_is_over.clear()
            turn[2].set()
            assert self._turn_is_over.wait(STUCK_SECONDS), "a thread doesn't end its turn"
        if math.isfinite(end) and not is_over():
            self.now = end

    def _next(self) -> tuple[float, int, threading.Event]:
        due = [turn for turn in self._queue if turn[0] <= self.now]
        later = [turn for turn in self._queue if turn[0] > self.now]
        if self._draw is None:
            return min(self._queue)
        # Time passes for those who sleep also while others that could move are starved.
        if not due or (later and self._draw.random() < STARVED):
            at = min(turn[0] for turn in later)
            due = [turn for turn in later if turn[0] == at]
        return self._draw.choice(due)

    def _plan(self, seconds: float, may_run: threading.Event) -> None:
        self._queue.append((self.now + seconds, next(self._order), may_run))
