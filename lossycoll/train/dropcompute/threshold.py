"""Arguments of a DropCompute, and its threshold: measured in a warm-up, and again later.

No torch, no clock: times come in by :meth:`Threshold.step_ended`, tables that the ranks exchange
by :meth:`Threshold.adopt`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import OptionError
from lossycoll.options.ranges import is_number, is_whole
from lossycoll.simulate.threshold import Choice, Cut, choose
from lossycoll.simulate.times import Times

LEAST: Final = {"micro_batches": 1, "warm_up": 2, "skip": 0, "window": 1}
"""The smallest value of each whole number."""


@dataclass(frozen=True)
class DropSettings:
    micro_batches: int
    threshold: float | str = "auto"
    drop_rate: float | None = None
    divisor: str = "completed"
    warm_up: int = 44
    skip: int = 5
    window: int = 32
    tolerance: float = 0.25
    cut: Cut = "started"

    def __post_init__(self) -> None:
        self._check_threshold()
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not is_whole(value, least):
                raise OptionError(f"{name} is {value!r}, wanted a whole number, at least {least}")
        if self.divisor not in ("completed", "fixed"):
            raise OptionError(f"divisor is {self.divisor!r}, wanted 'completed' or 'fixed'")
        if self.cut not in get_args(Cut):
            raise OptionError(f"cut is {self.cut!r}, wanted one of {', '.join(get_args(Cut))}")
        if not is_number(self.tolerance) or not self.tolerance > 0:
            raise OptionError(f"tolerance is {self.tolerance!r}, wanted a share above 0")

    def _check_threshold(self) -> None:
        threshold, rate = self.threshold, self.drop_rate
        if threshold == "auto":
            if rate is not None and not (is_number(rate) and 0 <= rate < 1):
                raise OptionError(f"drop_rate is {rate!r}, wanted a share, at least 0 and below 1")
            return
        if not is_number(threshold) or not threshold > 0:
            raise OptionError(f"threshold is {threshold!r}, wanted seconds above 0, or 'auto'")
        if rate is not None:
            raise OptionError(
                f"threshold is {threshold!r} and drop_rate {rate!r}, wanted one of them; a drop "
                f"rate goes with threshold='auto'"
            )

    @property
    def seconds(self) -> float | None:
        return None if self.threshold == "auto" else float(self.threshold)

    @property
    def fixed_divisor(self) -> bool:
        return self.divisor == "fixed"

    def shared(self) -> Mapping[str, Any]:
        """What all ranks must have alike."""
        each_by_itself = ("window", "tolerance")
        return {name: value for name, value in vars(self).items() if name not in each_by_itself}


Table = NDArray[np.float64]


class Threshold:
    """Seconds of compute in a step, after which no micro-batch begins.

    One that is given stays. One that is measured goes through warm-up (nothing is dropped), due
    (the ranks exchange their tables and :meth:`adopt` them) and use, and back to the warm-up once
    any rank finds it :attr:`outdated`.
    """

    def __init__(self, settings: DropSettings) -> None:
        self._settings = settings
        given = settings.seconds
        self.measured = given is None
        self.seconds = math.inf if given is None else given
        self.choice: Choice | None = None  # the last measured threshold, with its prediction
        self.choices = 0  # number of times that it was measured
        self.warm_up_left = settings.skip + settings.warm_up if self.measured else 0
        """Steps until the warm-up is over; the same on all ranks."""
        self._laps: list[Sequence[float]] = []  # the warm-up: each step's seconds by micro-batch
        self._walls: list[float | None] = []
        """The warm-up: the seconds from each step's begin to the next one's, None if unknown."""
        self._recent: deque[float] = deque(maxlen=settings.window)
        """Seconds of a micro-batch in the last steps."""
        self._reference: float | None = None
        """Seconds of a micro-batch when the threshold was adopted."""
        self._requested = False

    # ---- step by step ----

    def step_began(self, since: float | None) -> None:
        if len(self._walls) < len(self._laps):
            self._walls.append(since)

    def step_ended(self, laps: Sequence[float]) -> None:
        """Takes in that a step of this rank ends, with the seconds of each of its micro-batches."""
        if not self.measured:
            return
        if self.warm_up_left:
            if self.warm_up_left <= self._settings.warm_up:
                self._laps.append(tuple(laps))
            self.warm_up_left -= 1
        elif laps:
            self._recent.append(statistics.fmean(laps))

    @property
    def due(self) -> bool:
        """True if the warm-up is over, and the ranks are to exchange their tables."""
        return self.measured and not self.warm_up_left and bool(self._laps)

    def request(self) -> None:
        self._requested = True

    @property
    def outdated(self) -> bool:
        """True if the threshold is to be measured again: on request, or because the median seconds
        of a micro-batch over ``window`` steps have changed by more than ``tolerance``."""
        if not self.measured or self.warm_up_left:
            return False
        if self._requested or len(self._recent) < self._settings.window:
            return self._requested
        now = statistics.median(self._recent)
        if self._reference is None:
            self._reference = now
        return abs(now - self._reference) > self._settings.tolerance * self._reference

    def restart(self) -> None:
        self.warm_up_left = self._settings.warm_up
        self.seconds = math.inf
        self._laps, self._walls = [], []
        self._recent.clear()
        self._reference = None
        self._requested = False

    # ---- what the ranks exchange ----

    def table(self) -> Table:
        """This rank's warm-up for the exchange: seconds (steps, micro-batches + 1).

        A row ends with the time until the next step began. 0 is no micro-batch, or unknown.
        """
        settings = self._settings
        out = np.zeros((settings.warm_up, settings.micro_batches + 1))
        for row, laps in zip(out, self._laps, strict=True):
            row[: len(laps)] = np.maximum(laps, 1e-9)
        for row, wall in zip(out, self._walls, strict=False):
            row[-1] = wall or 0.0
        return out

    def adopt(self, tables: Table) -> bool:
        """Chooses the threshold, the same on all ranks, by all ranks' tables.

        False: nothing was computed in the warm-up, and the next one has begun.
        """
        seconds = tables.transpose(1, 0, 2)
        times = np.where(seconds[..., :-1] > 0, seconds[..., :-1], np.nan)
        present = ~np.isnan(times).all(axis=(0, 2))
        worked = ~np.isnan(times).all(axis=(1, 2))
        if not worked.any():
            self.restart()
            return False
        walls = np.where(seconds[..., -1] > 0, seconds[..., -1], np.nan)[worked][:, present]
        times = times[worked][:, present]
        choice = choose(
            times,
            _communication(times, walls),
            drop_rate=self._settings.drop_rate,
            cut=self._settings.cut,
        )
        own = [_begun(laps, choice.threshold) for laps in self._laps if laps]
        self._reference = statistics.median(map(statistics.fmean, own)) if own else None
        self._laps, self._walls = [], []
        self.seconds, self.choice = choice.threshold, choice
        self.choices += 1
        return True


def _communication(times: Times, walls: Times) -> float:
    """Seconds of a step that are not compute, the median over steps.

    ``times``: [steps, ranks, micro-batches]; ``walls``: [steps, ranks]; NaN where there is none.
    """
    compute = np.nanmax(np.nansum(times, axis=2), axis=1)
    known = ~np.isnan(walls).all(axis=1)
    if not known.any():
        return 0.0
    # A step in which something else was done beside (a validation, say) is longer, but not many.
    rest = np.nanmean(walls[known], axis=1) - compute[known]
    return max(0.0, float(np.median(rest)))


def _begun(laps: Sequence[float], threshold: float) -> Sequence[float]:
    """The laps that begin under ``threshold``, so that steps with and without one compare."""
    return laps[: 1 + sum(elapsed <= threshold for elapsed in accumulate(laps[:-1]))]
