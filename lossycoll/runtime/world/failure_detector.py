"""Failure detector: finds silent ranks and ended processes, without sockets or clock.

It is told what was heard of whom and which connections broke, and is asked (:meth:`tick`) what
follows from that at a given time. The coordinator has it judge all others, the others the
coordinator. How long a silence is borne, and why this rank's own sleep is nobody's silence, is in
docs/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

HEARTBEATS_PER_LIVENESS: Final = 8
SILENT_SHARE: Final = 0.7
"""Share of the liveness time; the rest is for the verdict to reach every rank."""
PROBE_SECONDS: Final = (0.002, 1.0)
"""A rank whose connection broke is looked for at once, again after the first of these, then ever
less often; and for how long. Its port may be open for a moment longer than its connections."""
ARRIVAL_SECONDS: Final = 0.02
"""Time for a rank to connect with a new coordinator before it is looked for."""
ARRIVAL_EACH: Final = 0.001
"""The same for each rank that connects, since each takes the coordinator's time. Questions would
take as much again."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a tick."""

    silent: dict[int, float]
    """Ranks to give up, and the seconds of their silence."""
    late: tuple[int, ...]
    """Ranks to be asked over a new connection, since the old one may be what is slow."""
    doubtful: tuple[int, ...]
    """Ranks to be looked for, since their processes may have ended."""


@dataclass(slots=True)
class _Search:
    """A rank that is looked for: since when, when next, and whether it is done once heard."""

    since: float
    at: float
    pause: float
    until_heard: bool


class FailureDetector:
    """One rank's judgement of others. Times are seconds of a clock that never runs backwards."""

    def __init__(self, liveness: float, silence: float, now: float) -> None:
        self.interval = liveness / HEARTBEATS_PER_LIVENESS
        """Between two heartbeats of the coordinator."""
        self.silence = silence
        """That is borne of a rank. May change."""
        self.due = now
        """When :meth:`tick` is to be called at the latest."""
        self._pause = self.interval
        self.heard_at: dict[int, float] = {}
        """The ranks that this one judges, and when each was heard."""
        self._searches: dict[int, _Search] = {}
        self._woke: float | None = None

    @property
    def in_doubt(self) -> bool:
        """True if this rank has slept so long that the others may have gone on without it: until it
        hears of one again, an ended process proves nothing."""
        return self._woke is not None

    def watch(self, ranks: Iterable[int], now: float, *, expected: int, pause: float) -> None:
        """From now on judges ``ranks`` and nobody else, as if heard just now. ``expected``: ranks
        of a world whose coordinator is new, so that those that are judged are looked for until
        heard; 0: it isn't."""
        self.heard_at = dict.fromkeys(ranks, now)
        self._pause = pause
        self._searches = {}
        if expected:
            first = max(ARRIVAL_SECONDS, ARRIVAL_EACH * expected)
            begin = now + first - ARRIVAL_SECONDS
            self._searches = {r: _Search(begin, now + first, first, True) for r in self.heard_at}
        self._plan(now)

    def forget(self, rank: int) -> None:
        """``rank`` has left or is lost: whether it is silent doesn't matter any more."""
        self.heard_at.pop(rank, None)
        self._searches.pop(rank, None)

    def heard(self, rank: int, now: float) -> None:
        """``rank`` has given a sign of life."""
        if rank not in self.heard_at:
            return
        self.heard_at[rank] = now
        if rank in self._searches and self._searches[rank].until_heard:
            del self._searches[rank]
        if self._woke is not None and now - self._woke > self.interval:
            self._woke = None

    def lives(self, rank: int, at: float) -> None:
        """``rank``'s engine gave a sign of life, though the rank itself may say nothing."""
        if rank in self.heard_at:
            self.heard_at[rank] = max(self.heard_at[rank], at)

    def suspect(self, rank: int, now: float) -> None:
        """The connection with ``rank`` broke, or others have given it up."""
        search = self._searches.get(rank)
        if search is None or search.until_heard:
            self._searches[rank] = _Search(now, now, PROBE_SECONDS[0], False)
            self.due = min(self.due, now)

    def tick(self, now: float) -> Findings:
        """Verdicts that follow from what was heard until ``now``."""
        self._forgive(now)
        silent = {r: now - at for r, at in self.heard_at.items() if now - at > self.silence}
        late = [r for r, at in self.heard_at.items() if 2 * self.interval < now - at]
        found = Findings(silent, tuple(r for r in late if r not in silent), self._search(now))
        self._plan(now)
        return found

    def _forgive(self, now: float) -> None:
        """Forgive others a sleep of this process: stopped or without the GIL, it heard nobody."""
        late = now - self.due
        if late > 2 * self.interval:
            for rank, at in self.heard_at.items():
                self.heard_at[rank] = min(now, at + late)
        if late > self.silence - 2 * self.interval:
            self._woke = now

    def _search(self, now: float) -> tuple[int, ...]:
        found = []
        for rank, search in list(self._searches.items()):
            if now - search.since > PROBE_SECONDS[1]:
                del self._searches[rank]
            elif now >= search.at:
                found.append(rank)
                search.at = now + search.pause
                search.pause *= 2
        return tuple(found)

    def _plan(self, now: float) -> None:
        heard = min(self.heard_at.values(), default=now)
        verdict = heard + self.silence
        pause = self._pause if now - heard <= 2 * self.interval else self.interval / 4
        search = min((entry.at for entry in self._searches.values()), default=now + pause)
        # Just after the verdict's time, since silence must be longer than that.
        self.due = min(now + pause, max(now, verdict) + 0.001, search)
