"""DropCompute's theory: what waiting for the slowest of N ranks costs, and what a threshold gains.

Giladi et al. (NeurIPS 2023, arXiv 2306.10598) take a rank's step as the sum of M independent
micro-batches, which is nearly normal. ``normal_curve`` is theirs, from mean and variance alone.
``noise_curve`` keeps the whole distribution: if delays have a long tail, so has the sum of a few,
and the slowest of many ranks is in that tail. ``threshold.curve`` starts from times themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Final

import numpy as np

from ..errors import OptionError
from .noise import Noise, normal_cdf
from .threshold import Point
from .times import Times

EULER: Final = 0.5772156649015329
CELLS: Final = 1 << 14
"""Cells of the lattice on which the sum of M micro-batches is computed."""
TAIL: Final = 1e-8
"""The probability that a micro-batch lies beyond the lattice."""


def expected_maximum(workers: int, mean: float, std: float) -> float:
    """The expected maximum of independent normal times, in the paper's form.

    mean + std ((1 - g) q(1 - 1/N) + g q(1 - 1/(N e))), where q is the normal quantile and g Euler's
    constant. It is within 0.3% of the truth for a deviation of 3% and at least 8 ranks. For two
    ranks the second term is 8% too small.
    """
    if workers < 1:
        raise OptionError(f"{workers} workers; wanted: at least 1")
    if workers == 1:
        return mean
    quantile = NormalDist().inv_cdf
    late = (1 - EULER) * quantile(1 - 1 / workers)
    later = EULER * quantile(1 - 1 / (workers * math.e))
    return mean + std * (late + later)


def normal_curve(
    thresholds: Times, workers: int, micro_batches: int, noise: Noise, communication: float
) -> tuple[Point, ...]:
    """The paper's analytic curve, from the mean and deviation of ``noise`` alone.

    If delays have a long tail, it underestimates the slowest of many ranks, and so the gain.
    """
    total = micro_batches * noise.mean
    full = expected_maximum(workers, total, math.sqrt(micro_batches) * noise.std)
    # The mean over m = 1..M of Phi((tau - m mean) / (sqrt(m) std)).
    m = np.arange(1, micro_batches + 1, dtype=np.float64)[:, None]
    completed = normal_cdf(thresholds, m * noise.mean, np.sqrt(m) * noise.std).mean(axis=0)
    return _points(thresholds, completed, full, np.minimum(thresholds, full), communication)


def noise_curve(
    thresholds: Times, workers: int, micro_batches: int, noise: Noise, communication: float
) -> tuple[Point, ...]:
    """The curve for independent micro-batches of any distribution, computed without sampling.

    T is the compute time of the slowest of N ranks. E[T] and E[min(tau, T)] are integrals of
    1 - F^N, where F is the distribution of one rank's.
    """
    completed = np.zeros(len(thresholds))
    for edges, cdf in _sums(noise, micro_batches):
        completed += np.interp(thresholds, edges, cdf, left=0.0, right=1.0) / micro_batches
    # The last ``cdf`` is that of all M micro-batches.
    beyond = 1 - cdf**workers
    waited = np.concatenate([[0.0], np.cumsum((beyond[1:] + beyond[:-1]) / 2 * np.diff(edges))])
    waited += edges[0]  # no rank is done before
    cut = np.where(thresholds < edges[0], thresholds, np.interp(thresholds, edges, waited))
    return _points(thresholds, completed, float(waited[-1]), cut, communication)


def _points(
    thresholds: Times, completed: Times, full: float, cut: Times, communication: float
) -> tuple[Point, ...]:
    speedups = completed * (full + communication) / (cut + communication)
    return tuple(
        Point(float(tau), float(1 - share), float(seconds + communication), float(speedup))
        for tau, share, seconds, speedup in zip(thresholds, completed, cut, speedups, strict=True)
    )


def _sums(noise: Noise, micro_batches: int) -> Iterator[tuple[Times, Times]]:
    """For m = 1..M, the distribution of the sum of m micro-batches, by convolution on a lattice.

    Yields the edges of the cells, in seconds, and the probability that the sum is at most each.
    """
    tail = noise.mean + noise.std
    while float(1 - noise.cdf(np.array([tail]))[0]) > TAIL:
        tail *= 1.25
    spread = math.sqrt(micro_batches) * noise.std
    width = (micro_batches * noise.mean + 4 * spread + tail) / CELLS
    # Cell k is around k widths, so that sums of cells are cells.
    edges = (np.arange(CELLS + 1, dtype=np.float64) - 0.5) * np.float64(width)
    one = np.diff(noise.cdf(edges))
    # Twice as long: what leaves the lattice at its end must not enter again at its start.
    transformed = np.fft.rfft(one, 2 * CELLS)
    power = np.ones_like(transformed)
    for _ in range(micro_batches):
        power *= transformed
        chances = np.fft.irfft(power, 2 * CELLS)[:CELLS]
        yield edges[1:], np.clip(np.cumsum(chances), 0.0, 1.0)
