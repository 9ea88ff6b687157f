"""Which lines of a grid are to be looked at, and when: nobody looks at the others."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .seats import Line


class Agenda:
    """Of a directory."""

    def __init__(self) -> None:
        self._now: set[Line] = set()
        self._times: dict[Line, float] = {}
        self._queue: list[tuple[float, Line]] = []
        """All times, those that don't hold any more among them."""

    def note(self, lines: Iterable[Line]) -> None:
        """Something has changed on lines."""
        self._now.update(lines)

    def later(self, line: Line, at: float | None) -> None:
        """Time alone changes something on a line, at ``at``; None: it doesn't."""
        if at is None:
            self._times.pop(line, None)
        elif self._times.get(line) != at:
            self._times[line] = at
            heapq.heappush(self._queue, (at, line))

    def take(self, now: float) -> list[Line]:
        """The lines that are to be looked at now; they are no more, then."""
        while self._queue and self._queue[0][0] <= now:
            at, line = heapq.heappop(self._queue)
            if self._times.get(line) == at:
                del self._times[line]
                self._now.add(line)
        found, self._now = sorted(self._now), set()
        return found

    def clear(self) -> None:
        """There are other lines from now on."""
        self._now, self._times, self._queue = set(), {}, []

    @property
    def is_due(self) -> bool:
        """Whether something has changed since the lines were looked at."""
        return bool(self._now)

    def wakes(self) -> float | None:
        """When time changes something; None: nowhere."""
        while self._queue and self._times.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None
