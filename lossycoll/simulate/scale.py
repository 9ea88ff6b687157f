"""Another number of ranks than was measured, from the steps that were."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from ..errors import OptionError
from .threshold import Choice, Cut, choose
from .times import Times, checked, usual

STEPS: Final = 50
"""That are put together; the authors' threshold is of 44."""
FEWEST_STEPS: Final = 8
MOST_TIMES: Final = 1 << 23
"""In all steps together, 64 MiB. The slowest of so many ranks differs little between steps, so that
fewer steps will do."""


def profiles(times: Times) -> Times:
    """[profiles, micro-batches]: the step of each rank, whole, without the outlying steps. A rank
    without a micro-batch in a step has none."""
    rows = times[usual(times)].reshape(-1, times.shape[2])
    out: Times = rows[~np.isnan(rows[:, 0])]
    return out


def resampled(times: Times, workers: int, seed: int) -> Times:
    """[steps, workers, micro-batches]: every rank of every step is a profile drawn from all that
    were measured, whichever rank's and step's, with replacement.

    A rank's micro-batches of a step stay together, so slow phases stay as long as they were. That
    some ranks are always slow stays in the distribution; that all ranks are slow in the same step
    doesn't. Nothing is slower than the slowest profile that was measured.
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
    """``choose`` for ``workers`` ranks, and the times that it chose by. Communication is taken to
    be as it was measured: a larger group's is for the caller to know."""
    if workers < 1:
        raise OptionError(f"{workers} workers; wanted: at least 1")
    given = checked(times)
    drawn = resampled(given, workers, seed)
    choice = choose(drawn, communication, drop_rate=drop_rate, cut=cut)
    left_out = tuple(int(step) for step in np.flatnonzero(~usual(given)))
    return dataclasses.replace(choice, left_out=left_out), drawn
