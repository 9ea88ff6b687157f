"""The threshold of DropCompute from measured times: which one, and what it is predicted to gain.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute
variance reduction" (NeurIPS 2023, arXiv 2306.10598), algorithm 2, in the form of the authors' code
(get_best_threshold of their BERT-1.5B example).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from ..errors import OptionError
from .times import Times, checked, ends, usual

Cut = Literal["finished", "threshold", "started"]
"""What becomes of the micro-batch that a threshold falls into, and how long the step then takes:

- ``finished``: it is dropped; the step ends with the last micro-batch that was finished in time.
  This is the authors' code.
- ``threshold``: it is dropped; the step takes min(threshold, time without one). This is the paper.
- ``started``: it is finished and counts; the step ends with the last one of these. This is a loop
  that reads the clock between micro-batches.
"""

LEAST_GAIN: Final = 0.01
"""A smaller predicted gain counts as none. Without communication, fewer micro-batches on all ranks
cost nothing, so the best of the grid is a little above 1 even if no rank is ever late."""


@dataclass(frozen=True, slots=True)
class Point:
    """Effect of one threshold, averaged over steps."""

    threshold: float  # seconds since a rank's step began
    drop_rate: float  # share of the micro-batches that is dropped
    step_seconds: float  # duration of a step, communication included
    speedup: float  # S_eff, micro-batches per second over those without a threshold


@dataclass(frozen=True)
class Choice:
    """A threshold and its predicted effect."""

    threshold: float  # seconds; inf if dropping does not pay
    drop_rate: float
    speedup: float  # 1.0 is none
    curve: tuple[Point, ...]  # the thresholds that were tried, rising; the last one drops nothing
    left_out: tuple[int, ...] = ()  # steps, as outliers


def choose(
    times: ArrayLike,
    communication: float,
    *,
    drop_rate: float | None = None,
    cut: Cut = "finished",
) -> Choice:
    """Chooses the threshold of the greatest effective speed-up, or of a wanted drop rate.

    That is the one of 200 with the greatest mean S over the steps. A threshold is at least the
    slowest first micro-batch, a gain below 1% counts as none, and outlying steps are left out
    (docs/dropcompute.md, "How the best threshold is found"). All ranks that have the same times
    choose the same threshold. With ``drop_rate``: the smallest threshold that is predicted to drop
    at most this. Times are as :func:`~.times.checked` wants them.
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
    """The least threshold by which every rank has completed one micro-batch, in all steps."""
    return float(np.nextafter(np.nanmax(times[:, :, 0]), math.inf))


def grid(times: Times) -> Times:
    """The thresholds to try, ascending: 200, as in the authors' code, fewer if some coincide. They
    reach from the earliest half of a rank's micro-batches to where nothing is dropped."""
    done = ends(times)
    count = np.isfinite(times).sum(axis=2, keepdims=True)
    half = np.take_along_axis(done, np.maximum((count + 1) // 2 - 1, 0), axis=2)
    top = float(np.nextafter(np.nanmax(done), math.inf))
    return np.unique(np.linspace(max(float(np.nanmin(half)), floor(times)), top, 200))


def curve(
    steps: Iterable[Times], thresholds: Times, communication: float, *, cut: Cut = "finished"
) -> tuple[Point, ...]:
    """Return the effect of each threshold, averaged over the steps.

    With c the time at which a micro-batch is completed and T = max c, a threshold tau has in each
    step: drop rate = the share of micro-batches with c >= tau; cut time = max c where c < tau
    (``cut`` has others); S = (1 - drop rate) (T + communication) / (cut time + communication).
    """
    found = [_step(times, thresholds, communication, cut) for times in steps]
    return points_of(thresholds, *np.mean(found, axis=0))


def points_of(*columns: Times) -> tuple[Point, ...]:
    """Points of thresholds, drop rates, seconds and speed-ups."""
    return tuple(Point(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


def _step(times: Times, thresholds: Times, communication: float, cut: Cut) -> Times:
    """Drop rate, seconds and speed-up of one step, by threshold: [3, n]."""
    known = np.isfinite(times)
    done = ends(times)
    finished = done[known]
    compute = float(finished.max())
    # A micro-batch is dropped by the time at which it ends, or at which it begins.
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
    """The smallest threshold whose drop rate, averaged over the steps, is at most ``drop_rate``."""
    known = np.isfinite(times)
    done = ends(times)
    if cut == "started":
        done = np.concatenate([np.zeros((*done.shape[:2], 1)), done[:, :, :-1]], axis=2)
    weights = np.broadcast_to(1 / known.sum(axis=(1, 2), keepdims=True), known.shape)
    decides, weight = done[known], weights[known] / len(times)
    order = np.argsort(decides)[::-1]
    dropped = np.cumsum(weight[order])
    # The sum of that many weights is rounded.
    may = int(np.searchsorted(dropped, drop_rate * (1 + 1e-9) + 1e-12, side="right"))
    if may == len(order):
        return 0.0
    return float(np.nextafter(decides[order[may]], math.inf))


# ---- for another number of ranks than was recorded, by resampling the recorded steps ----

STEPS: Final = 50
"""Steps to resample; the paper's authors measure 44. FEWEST_STEPS for very many ranks."""
FEWEST_STEPS: Final = 8
MOST_TIMES: Final = 1 << 23
"""Times in all resampled steps, 64 MiB. More ranks get fewer steps: the slowest of many ranks
differs little between steps."""


def profiles(times: Times) -> Times:
    """Recorded steps of single ranks, [profiles, micro-batches], outlying steps left out. A rank
    without a micro-batch in a step has no profile of it."""
    rows = times[usual(times)].reshape(-1, times.shape[2])
    return rows[~np.isnan(rows[:, 0])]


def resampled(times: Times, workers: int, seed: int) -> Times:
    """Times of ``workers`` ranks, drawn from those that were recorded.

    Each rank's step is one of :func:`profiles`, of any rank and step, drawn with replacement. A
    rank's micro-batches of a step stay together, so slow phases keep their length. That some ranks
    are always slow stays in the distribution; that all ranks are slow in the same step does not.
    """
    pool = profiles(times)
    steps = min(STEPS, max(FEWEST_STEPS, MOST_TIMES // (workers * pool.shape[1])))
    generator = np.random.default_rng(seed)
    return pool[generator.integers(len(pool), size=(steps, workers))]


def choose_at(
    times: Times,
    communication: float,
    workers: int,
    *,
    drop_rate: float | None = None,
    cut: Cut = "finished",
    seed: int = 0,
) -> tuple[Choice, Times]:
    """:func:`~lossycoll.simulate.choose` for another number of ranks, and the resampled times
    behind it. ``communication`` is of the larger group; ``left_out`` are recorded steps."""
    if workers < 1:
        raise OptionError(f"{workers} workers; wanted: at least 1")
    given = checked(times)
    drawn = resampled(given, workers, seed)
    choice = choose(drawn, communication, drop_rate=drop_rate, cut=cut)
    left_out = tuple(int(step) for step in np.flatnonzero(~usual(given)))
    return replace(choice, left_out=left_out), drawn
