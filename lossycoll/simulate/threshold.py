"""The threshold of DropCompute from measured times: which one, and what it is predicted to gain.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute
variance reduction" (NeurIPS 2023, arXiv 2306.10598), algorithm 2, in the form of the authors' code
(get_best_threshold of their BERT-1.5B example).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from ..errors import OptionError
from .times import Times, checked, ends, usual

Cut = Literal["finished", "threshold", "started"]
"""What a threshold does to a micro-batch that it falls into, and how long the cut step takes:

- ``finished``: it is lost; the step takes until the last micro-batch that was finished in time.
  As the authors' code has it.
- ``threshold``: it is lost; the step takes min(threshold, time without one). As the paper has it.
- ``started``: it is finished and counts; the step takes until the last such one is done. As for
  a loop that looks at the clock between micro-batches.
"""

GRID: Final = 200
"""Thresholds that are tried, as in the authors' code."""
LEAST_GAIN: Final = 0.01
"""A smaller predicted gain is none: without communication, doing fewer micro-batches for all ranks
costs nothing, so that the best of the grid is a hair above 1 even where no rank is ever late."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one threshold does, averaged over steps."""

    threshold: float
    """Seconds since a rank's step began."""
    drop_rate: float
    """Share of the micro-batches that are dropped."""
    step_seconds: float
    """Of a whole step, communication included."""
    speedup: float
    """S_eff: micro-batches in a second over those without a threshold."""


@dataclass(frozen=True)
class Choice:
    """A threshold, and what is predicted of it."""

    threshold: float
    """Seconds; inf where dropping doesn't pay."""
    drop_rate: float
    """Share of the micro-batches that are dropped."""
    speedup: float
    """S_eff; 1.0 is none."""
    curve: tuple[Point, ...]
    """By rising threshold; at the last one nothing is dropped."""
    left_out: tuple[int, ...] = ()
    """Steps that were taken for outliers (times.usual) and have no say."""


def choose(
    times: ArrayLike,
    communication: float,
    *,
    drop_rate: float | None = None,
    cut: Cut = "finished",
) -> Choice:
    """The threshold of the greatest effective speed-up, or the one of a wanted drop rate.

    ``times``: seconds, [steps, ranks, micro-batches]; NaN at the tail of a rank's step where the
    rank had fewer micro-batches. ``communication``: seconds of a step that aren't compute.

    With c[n, m] the time at which rank n has done its micro-batch m, T = max c, and a threshold
    tau, for each step: drop = share of (n, m) with c >= tau; cut time = max c where c < tau
    (``cut`` says what else); S = (1 - drop) (T + communication) / (cut time + communication).
    S_eff is the mean of S over the steps, and tau the best of 200 between the earliest half of a
    rank's micro-batches (the authors: the 6th of 12) and max T. Every rank that has the same times
    finds the same threshold.

    Other than the authors' code: a threshold never is below the slowest first micro-batch, so that
    every rank can always do one; a gain of less than LEAST_GAIN gives inf; and outliers
    (times.usual: at most one step in 20, three times slower than the median) have no say, since a
    mean over steps of S, which is without bound, would be theirs alone.

    ``drop_rate``: wanted in place of the best; the smallest threshold whose predicted drop rate is
    at most that.

    Raises OptionError, which is a ValueError, for times, a communication, a drop rate or a cut that
    can't be.
    """
    if cut not in get_args(Cut):
        raise OptionError(f"cut is {cut!r}; wanted: one of {', '.join(get_args(Cut))}")
    if not 0 <= communication < math.inf:
        raise OptionError(f"communication is {communication!r} s; wanted: a finite number >= 0")
    if drop_rate is not None and not 0 <= drop_rate < 1:
        raise OptionError(f"the wanted drop rate is {drop_rate!r}; wanted: at least 0 and below 1")
    given = checked(times)
    keep = usual(given)
    kept = given[keep]
    points = curve(kept, grid(kept), communication, cut=cut)
    left_out = tuple(int(step) for step in np.flatnonzero(~keep))
    if drop_rate is None:
        best = max(reversed(points), key=lambda point: point.speedup)
        if best.speedup < 1 + LEAST_GAIN:
            return Choice(math.inf, 0.0, 1.0, points, left_out)
    else:
        threshold = max(floor(kept), threshold_of(kept, drop_rate, cut=cut))
        (best,) = curve(kept, np.array([threshold]), communication, cut=cut)
    return Choice(best.threshold, best.drop_rate, best.speedup, points, left_out)


def floor(times: Times) -> float:
    """The least threshold by which every rank has done one micro-batch, in all steps."""
    return float(np.nextafter(np.nanmax(times[:, :, 0]), math.inf))


def grid(times: Times) -> Times:
    """The thresholds to try, rising: GRID of them, fewer where they coincide."""
    done = ends(times)
    count = np.isfinite(times).sum(axis=2, keepdims=True)
    half = np.take_along_axis(done, np.maximum((count + 1) // 2 - 1, 0), axis=2)
    top = float(np.nextafter(np.nanmax(done), math.inf))
    return np.unique(np.linspace(max(float(np.nanmin(half)), floor(times)), top, GRID))


def curve(
    steps: Iterable[Times], thresholds: Times, communication: float, *, cut: Cut = "finished"
) -> tuple[Point, ...]:
    """A point for each threshold; ``steps`` are [ranks, micro-batches] each, as in ``choose``.

    Takes the steps one by one: memory for one is enough.
    """
    sums = np.zeros((3, len(thresholds)))
    count = 0
    for times in steps:
        count += 1
        sums += _step(times, thresholds, communication, cut)
    drops, seconds, speedups = sums / count
    return tuple(
        Point(float(tau), float(drop), float(second), float(speedup))
        for tau, drop, second, speedup in zip(thresholds, drops, seconds, speedups, strict=True)
    )


def _step(times: Times, thresholds: Times, communication: float, cut: Cut) -> Times:
    """[3, thresholds]: drop rate, seconds and speed-up of one step."""
    known = np.isfinite(times)
    done = ends(times)
    finished = done[known]
    compute = float(finished.max())
    # What decides about a micro-batch: when it ends, or when it begins.
    if cut == "started":
        begun = np.concatenate([np.zeros((len(done), 1)), done[:, :-1]], axis=1)[known]
        order = np.argsort(begun)
        decides, finished = begun[order], finished[order]
    else:
        finished = np.sort(finished)
        decides = finished
    within = np.searchsorted(decides, thresholds, side="left")
    if cut == "threshold":
        spent = np.minimum(thresholds, compute)
    else:
        # In order of the ends this is the ends themselves.
        last = np.concatenate([[0.0], np.maximum.accumulate(finished)])
        spent = last[within]
    share = within / len(decides)
    seconds = spent + communication
    # Nothing finished and nothing to wait for: no work at all is no speed-up.
    speedup = np.divide(
        share * (compute + communication), seconds, out=share.copy(), where=seconds > 0
    )
    return np.stack([1 - share, seconds, speedup])


def threshold_of(times: Times, drop_rate: float, *, cut: Cut = "finished") -> float:
    """The smallest threshold that drops at most this share, averaged over steps."""
    known = np.isfinite(times)
    done = ends(times)
    if cut == "started":
        done = np.concatenate([np.zeros((*done.shape[:2], 1)), done[:, :, :-1]], axis=2)
    weights = np.broadcast_to(1 / known.sum(axis=(1, 2), keepdims=True), known.shape)
    decides, weight = done[known], weights[known] / len(times)
    order = np.argsort(decides)[::-1]
    dropped = np.cumsum(weight[order])
    # The sum of so many weights is rounded.
    may = int(np.searchsorted(dropped, drop_rate * (1 + 1e-9) + 1e-12, side="right"))
    if may == len(order):
        return 0.0
    return float(np.nextafter(decides[order[may]], math.inf))
