"""Predicts for another number of ranks than was recorded, by resampling the recorded steps."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from ..errors import OptionError
from .threshold import Choice, Cut, choose
from .times import Times, checked, usual

STEPS: Final = 50
"""Steps to resample; the paper's authors measure 44."""
FEWEST_STEPS: Final = 8
"""Steps to resample for very many ranks."""
MOST_TIMES: Final = 1 << 23
"""Times in all resampled steps, 64 MiB. More ranks get fewer steps: the slowest of many ranks
differs little between steps."""


def profiles(times: Times) -> Times:
    """Recorded steps of single ranks, [profiles, micro-batches], outlying steps left out.

    A rank without a micro-batch in a step has no profile of it. Times are seconds, [steps, ranks,
    micro-batches].
    """
    rows = times[usual(times)].reshape(-1, times.shape[2])
    out: Times = rows[~np.isnan(rows[:, 0])]
    return out


def resampled(times: Times, workers: int, seed: int) -> Times:
    """Times of ``workers`` ranks, drawn from those that were recorded; both as in :func:`profiles`.

    Each rank's step is one :func:`profile <profiles>`, of any rank and step, drawn with
    replacement. A rank's micro-batches of a step stay together, so slow phases keep their length.
    That some ranks are always slow stays in the distribution; that all ranks are slow in the same
    step does not. No step is slower than the slowest recorded one.
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
    """:func:`~lossycoll.simulate.choose` for another number of ranks.

    Args:
        times: Recorded seconds, [steps, ranks, micro-batches]; see :func:`checked`.
        communication: Seconds of a step that are not compute, of the larger group.
        workers: The number of ranks.
        drop_rate: As for ``choose``.
        cut: As for ``choose``.
        seed: Of the resampling.

    Returns:
        The choice, whose ``left_out`` are recorded steps, and the resampled times behind it.

    Raises:
        OptionError: An argument has a value it cannot have.
    """
    if workers < 1:
        raise OptionError(f"{workers} workers; wanted: at least 1")
    given = checked(times)
    drawn = resampled(given, workers, seed)
    choice = choose(drawn, communication, drop_rate=drop_rate, cut=cut)
    left_out = tuple(int(step) for step in np.flatnonzero(~usual(given)))
    return dataclasses.replace(choice, left_out=left_out), drawn
