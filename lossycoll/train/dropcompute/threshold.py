"""The threshold of DropCompute at one rank: measured over a warm-up, and again when compute times
change. What the ranks tell each other passes through here as data: no torch, no clock."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from lossycoll.simulate.threshold import Choice, Cut, choose
from lossycoll.simulate.times import Times
from lossycoll.train.drop_ranks import Table

NANO = 1_000_000_000


class Threshold:
    """``given``: seconds, which are never measured. Else ``drop_rate`` is what is wanted, or None
    for the greatest effective speed-up; ``skip`` steps go by before ``warm_up`` steps are measured,
    in which nothing is dropped.

    Measured anew where the median over ``window`` steps of this rank's seconds for a micro-batch is
    off by more than ``tolerance`` (a share) from that of the warm-up. ``cut``: see ``choose``.
    """

    def __init__(
        self,
        micro_batches: int,
        given: float | None,
        drop_rate: float | None,
        skip: int,
        warm_up: int,
        window: int,
        tolerance: float,
        cut: Cut = "started",
    ) -> None:
        self._micro_batches = micro_batches
        self._drop_rate = drop_rate
        self._warm_up = warm_up
        self._tolerance = tolerance
        self._cut: Cut = cut
        self.measured = given is None
        self.seconds = math.inf if given is None else given
        """Of compute in a step, after which no micro-batch is begun."""
        self.choice: Choice | None = None
        """The last that was measured, with its prediction."""
        self.phase = skip + warm_up if self.measured else 0
        """Steps until the warm-up is over. The same at all ranks."""
        self.choices = 0
        self._rows: list[Sequence[float]] = []
        self._walls: list[float | None] = []
        self._reference: float | None = None
        self._recent: deque[float] = deque(maxlen=window)
        self._asked = False

    # ---- step by step ----

    def began(self, since: float | None) -> None:
        """A step begins, ``since`` seconds after the one before; None: that isn't known."""
        if len(self._walls) < len(self._rows):
            self._walls.append(since)

    def note(self, laps: Sequence[float]) -> None:
        """A step of this rank: seconds of each of its micro-batches."""
        if not self.measured:
            return
        if self.phase:
            if self.phase <= self._warm_up:
                self._rows.append(tuple(laps))
            self.phase -= 1
        elif laps:
            self._recent.append(_pace(laps))

    @property
    def due(self) -> bool:
        """Whether the warm-up is over, and the ranks are to share what they measured."""
        return self.measured and not self.phase and bool(self._rows)

    def ask(self) -> None:
        """Has it measured anew."""
        self._asked = True

    @property
    def stale(self) -> bool:
        """Whether this rank wants it to be measured anew."""
        if not self.measured or self.phase:
            return False
        if self._asked or len(self._recent) < (self._recent.maxlen or 0):
            return self._asked
        now = statistics.median(self._recent)
        if self._reference is None:
            self._reference = now
        return abs(now - self._reference) > self._tolerance * self._reference

    def restart(self) -> None:
        """Nothing is dropped from now on, until ``warm_up`` steps have been measured."""
        self.phase = self._warm_up
        self.seconds = math.inf
        self._rows, self._walls = [], []
        self._recent.clear()
        self._reference = None
        self._asked = False

    # ---- what the ranks share ----

    def table(self) -> Table:
        """This rank's warm-up: ns, int64 [steps, micro-batches + 1]. Last of a row is the whole
        step's time until the next one began; 0 is none."""
        out = np.zeros((self._warm_up, self._micro_batches + 1), np.int64)
        for row, laps in zip(out, self._rows, strict=True):
            row[: len(laps)] = [max(1, round(lap * NANO)) for lap in laps]
        for row, wall in zip(out, self._walls, strict=False):
            row[-1] = round((wall or 0.0) * NANO)
        return out

    def settle(self, tables: Table, rank: int) -> bool:
        """Takes the threshold from the tables of all ranks [ranks, steps, micro-batches + 1], a row
        of which is 0 for a rank that is lost. The same input gives the same threshold at all ranks.

        False: nothing was computed in the warm-up, and the next one has begun.
        """
        seconds = tables.transpose(1, 0, 2) / NANO
        times = np.where(seconds[..., :-1] > 0, seconds[..., :-1], np.nan)
        present = ~np.isnan(times).all(axis=(0, 2))
        worked = ~np.isnan(times).all(axis=(1, 2))
        if not worked.any():
            self.restart()
            return False
        walls = np.where(seconds[..., -1] > 0, seconds[..., -1], np.nan)[worked][:, present]
        times = times[worked][:, present]
        choice = choose(
            times, _communication(times, walls), drop_rate=self._drop_rate, cut=self._cut
        )
        own = [_begun(laps, choice.threshold) for laps in self._rows if laps]
        self._reference = statistics.median(map(_pace, own)) if own else None
        self._rows, self._walls = [], []
        self.seconds, self.choice = choice.threshold, choice
        self.choices += 1
        return True


def _communication(times: Times, walls: Times) -> float:
    """Seconds of a step that aren't compute, the median over steps. ``times`` [steps, ranks,
    micro-batches], ``walls`` [steps, ranks]; NaN is none."""
    compute = np.nanmax(np.nansum(times, axis=2), axis=1)
    known = ~np.isnan(walls).all(axis=1)
    if not known.any():
        return 0.0
    # A step in which something else was done beside (a validation, say) is longer, but not many.
    rest = np.nanmean(walls[known], axis=1) - compute[known]
    return max(0.0, float(np.median(rest)))


def _begun(laps: Sequence[float], threshold: float) -> Sequence[float]:
    """Those that are begun under ``threshold``, so that paces with and without one compare."""
    elapsed, count = 0.0, 0
    while count < len(laps) and (count == 0 or elapsed <= threshold):
        elapsed += laps[count]
        count += 1
    return laps[:count]


def _pace(laps: Sequence[float]) -> float:
    """Seconds for a micro-batch."""
    return sum(laps) / len(laps)
