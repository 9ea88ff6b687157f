"""A stopwatch for a clock that may jump."""

from __future__ import annotations

import math
from collections.abc import Callable


class Stopwatch:
    """Measures laps, in seconds.

    A lap of less than 0 s by the clock counts as 0 s. A reading that isn't finite counts as no time
    since the last one. Both are counted in :attr:`jumps`. ``clock`` returns seconds;
    ``synchronize`` is called before each reading, and returns when the work so far is done, for
    devices that compute asynchronously.
    """

    def __init__(
        self, clock: Callable[[], float], synchronize: Callable[[], object] | None = None
    ) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._started: float | None = None
        self._last = 0.0
        self.elapsed = 0.0
        """Seconds of all laps since the start."""
        self.jumps = 0

    def start(self) -> float | None:
        """Starts again; returns the seconds since the last start, or None if they are unknown."""
        now = self._read()
        since = None if self._started is None else now - self._started
        self._started = self._last = now
        self.elapsed = 0.0
        return since if since is not None and since >= 0 else None

    def lap(self) -> float:
        """Ends a lap; returns the seconds since the last one, or since the start."""
        now = self._read()
        seconds = now - self._last
        self._last = now
        if seconds < 0:
            self.jumps += 1
            return 0.0
        self.elapsed += seconds
        return seconds

    def passed(self) -> float:
        """The seconds since the start, those of the current lap included."""
        return self.elapsed + max(0.0, self._read() - self._last)

    def _read(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if math.isfinite(now):
            return now
        self.jumps += 1
        return self._last
