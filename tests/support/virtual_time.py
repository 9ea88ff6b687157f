"""Threads that take turns on one virtual clock: one runs, until it sleeps or ends.

Code that waits by a clock and a sleep of its own runs here as on a machine without load: the order
of the turns follows from the times alone, and a wait takes no time.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

STUCK_SECONDS: Final = 60.0
"""Of real time: a turn that lasts so long waits for something else than the clock."""


class VirtualTime:
    """A clock, and the threads that sleep by it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._order = count()
        self._queue: list[tuple[float, int, threading.Event]] = []
        self._turn_is_over = threading.Event()

    def clock(self) -> float:
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
        """Gives turns for ``seconds``, or until it is over."""
        end = self.now + seconds
        while not is_over() and self._queue and self._queue[0][0] <= end:
            due, _, may_run = heapq.heappop(self._queue)
            self.now = max(self.now, due)
            self._turn_is_over.clear()
            may_run.set()
            assert self._turn_is_over.wait(STUCK_SECONDS), "a thread doesn't end its turn"
        if not is_over():
            self.now = end

    def _plan(self, seconds: float, may_run: threading.Event) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), may_run))
