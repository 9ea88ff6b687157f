"""DropCompute's theory: what waiting for the slowest of N ranks costs, and what a threshold gains.

Giladi et al. (NeurIPS 2023, arXiv 2306.10598): a rank's step is M micro-batches that know nothing
of each other, its sum nearly normal. ``normal_curve`` is the paper's, from mean and variance alone.
``noise_curve`` keeps the whole distribution: of delays with a long tail, the sum of a few has one
as well, and the slowest of many ranks lives in it. From times themselves: threshold.curve.
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
"""Of the lattice on which the sum of M micro-batches is computed."""
TAIL: Final = 1e-8
"""The chance that a micro-batch is beyond the lattice."""


def expected_maximum(workers: int, mean: float, std: float) -> float:
    """E[max] of ``workers`` normal times, in the paper's form: mean + std ((1 - g) q(1 - 1/N) +
    g q(1 - 1/(N e))) where q is the normal quantile and g Euler's constant.

    Within 0.3% of the truth for a deviation of 3% and 8 ranks or more; for two ranks the second
    term is 8% too small.
    """
    if workers < 1:
        raise OptionError(f"{workers} workers; wanted: at least 1")
    if workers == 1:
        return mean
    quantile = NormalDist().inv_cdf
    late = (1 - EULER) * quantile(1 - 1 / workers)
    later = EULER * quantile(1 - 1 / (workers * math.e))
    return mean + std * (late + later)


def completed_fraction(thresholds: Times, micro_batches: int, mean: float, std: float) -> Times:
    """The expected share of micro-batches that are done by each threshold: the mean over m = 1..M
    of Phi((tau - m mean) / (sqrt(m) std)). The drop rate is 1 less that."""
    m = np.arange(1, micro_batches + 1, dtype=np.float64)[:, None]
    out: Times = normal_cdf(thresholds, m * mean, np.sqrt(m) * std).mean(axis=0)
    return out


def effective_speedup(completed: Times, full: float, cut: Times, communication: float) -> Times:
    """S_eff: micro-batches in a second, over those of steps that nothing cuts short.

    ``completed``: their share; ``full`` and ``cut``: seconds of compute without and with a
    threshold; ``communication``: the seconds that both take besides.
    """
    out: Times = completed * (full + communication) / (cut + communication)
    return out


def normal_curve(
    thresholds: Times, workers: int, micro_batches: int, noise: Noise, communication: float
) -> tuple[Point, ...]:
    """The paper's analytic curve, of the mean and deviation of ``noise`` alone. Too hopeful about
    the slowest of many ranks where delays have a long tail, so it promises too little gain."""
    total = micro_batches * noise.mean
    full = expected_maximum(workers, total, math.sqrt(micro_batches) * noise.std)
    completed = completed_fraction(thresholds, micro_batches, noise.mean, noise.std)
    return _points(thresholds, completed, full, np.minimum(thresholds, full), communication)


def noise_curve(
    thresholds: Times, workers: int, micro_batches: int, noise: Noise, communication: float
) -> tuple[Point, ...]:
    """The curve for independent micro-batches of any distribution, without a sample: E[T] and
    E[min(tau, T)], T the slowest of ``workers`` ranks, are integrals of 1 - F^N."""
    completed = np.zeros(len(thresholds))
    for edges, cdf in _sums(noise, micro_batches):
        completed += np.interp(thresholds, edges, cdf, left=0.0, right=1.0) / micro_batches
    # ``cdf`` is that of all M now.
    beyond = 1 - cdf**workers
    waited = np.concatenate([[0.0], np.cumsum((beyond[1:] + beyond[:-1]) / 2 * np.diff(edges))])
    waited += edges[0]  # nothing is done before
    cut = np.where(thresholds < edges[0], thresholds, np.interp(thresholds, edges, waited))
    return _points(thresholds, completed, float(waited[-1]), cut, communication)


def best(points: tuple[Point, ...], most_dropped: float = 1.0) -> Point:
    """The point of the greatest speed-up among those that drop at most ``most_dropped``."""
    return max((p for p in points if p.drop_rate <= most_dropped), key=lambda p: p.speedup)


def _points(
    thresholds: Times, completed: Times, full: float, cut: Times, communication: float
) -> tuple[Point, ...]:
    speedups = effective_speedup(completed, full, cut, communication)
    return tuple(
        Point(float(tau), float(1 - share), float(seconds + communication), float(speedup))
        for tau, share, seconds, speedup in zip(thresholds, completed, cut, speedups, strict=True)
    )


def _sums(noise: Noise, micro_batches: int) -> Iterator[tuple[Times, Times]]:
    """For m = 1..M: edges of cells, in seconds, and the chance that m micro-batches are done by
    each. Convolution by Fourier transform on a lattice."""
    tail = noise.mean + noise.std
    while float(1 - noise.cdf(np.array([tail]))[0]) > TAIL:
        tail *= 1.25
    spread = math.sqrt(micro_batches) * noise.std
    width = (micro_batches * noise.mean + 4 * spread + tail) / CELLS
    # Cell k is around k widths, so that sums of cells are cells.
    edges = (np.arange(CELLS + 1, dtype=np.float64) - 0.5) * np.float64(width)
    one = np.diff(noise.cdf(edges))
    # Twice as long: what leaves the lattice must not come in again at its beginning.
    transformed = np.fft.rfft(one, 2 * CELLS)
    power = np.ones_like(transformed)
    for _ in range(micro_batches):
        power *= transformed
        chances = np.fft.irfft(power, 2 * CELLS)[:CELLS]
        yield edges[1:], np.clip(np.cumsum(chances), 0.0, 1.0)
