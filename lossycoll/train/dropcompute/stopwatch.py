"""A stopwatch for a clock that may jump."""

from __future__ import annotations

import math
from collections.abc import Callable


class Stopwatch:
    """Laps of ``clock``, in seconds. One that took less than 0 s by the clock took 0 s, and where
    the clock says no number it stands still; both are counted in ``jumps``.

    ``settle`` is called before the clock is read, and returns when the work so far is done: for
    devices that compute while the program goes on.
    """

    def __init__(
        self, clock: Callable[[], float], settle: Callable[[], object] | None = None
    ) -> None:
        self._clock = clock
        self._settle = settle
        self._started: float | None = None
        self._last = 0.0
        self.elapsed = 0.0
        """Seconds of all laps since the start."""
        self.jumps = 0

    def start(self) -> float | None:
        """Begins anew; returns the seconds since it last began, or None if that isn't known."""
        now = self._read()
        since = None if self._started is None else now - self._started
        self._started = self._last = now
        self.elapsed = 0.0
        return since if since is not None and since >= 0 else None

    def lap(self) -> float:
        """The seconds since the last lap, or the start."""
        now = self._read()
        seconds = now - self._last
        self._last = now
        if seconds < 0:
            self.jumps += 1
            return 0.0
        self.elapsed += seconds
        return seconds

    def passed(self) -> float:
        """The seconds since the start, those of this lap so far included."""
        return self.elapsed + max(0.0, self._read() - self._last)

    def _read(self) -> float:
        if self._settle is not None:
            self._settle()
        now = self._clock()
        if math.isfinite(now):
            return now
        self.jumps += 1
        return self._last
