"""DropCompute's theory: what waiting for the slowest of N ranks costs, and what a threshold gains.

Giladi et al. (NeurIPS 2023, arXiv 2306.10598) take a rank's step as the sum of M independent
micro-batches, which is nearly normal. ``normal_curve`` is theirs, from mean and variance alone.
``noise_curve`` keeps the whole distribution: if delays have a long tail, so has the sum of a few,
and the slowest of many ranks is in that tail. :func:`fit` says which distribution recorded times
are likeliest to come from. ``threshold.curve`` starts from times themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from ..errors import OptionError
from .threshold import Point, points_of
from .times import Times

CELLS: Final = 1 << 14
"""Cells of the lattice on which the sum of M micro-batches is computed."""
TAIL: Final = 1e-8
"""The probability that a micro-batch lies beyond the lattice."""
STARTS: Final = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
"""Where a fitted log-normal may start, as shares of the shortest time. Only these are tried: by
likelihood alone it would start at the shortest time itself, where its density is unbounded."""


# ---- distributions of one micro-batch's time, in seconds ----


@dataclass
class Noise:
    """Distribution of independent micro-batches' times."""

    words: str
    mean: float
    std: float
    cdf: Callable[[Times], Times]  # the probability of each time or less

    def __str__(self) -> str:
        return self.words


def normal(mean: float, std: float) -> Noise:
    words = f"normal, {mean:.4g} s +- {std:.4g} s"
    return Noise(words, mean, std, lambda seconds: normal_cdf(seconds, mean, std))


def log_normal(start: float, log_mean: float, log_std: float) -> Noise:
    """``start`` plus a log-normal, of whose logarithm the mean and the deviation are given."""
    median, above = start + math.exp(log_mean), math.exp(log_mean + log_std**2 / 2)
    words = f"log-normal above {start:.4g} s, median {median:.4g} s, sigma {log_std:.3g}"

    def cdf(seconds: Times) -> Times:
        logs = np.log(np.maximum(seconds - start, np.finfo(np.float64).tiny))
        return normal_cdf(logs, log_mean, log_std)

    return Noise(words, start + above, above * math.sqrt(math.expm1(log_std**2)), cdf)


def exponential(start: float, excess: float) -> Noise:
    """``start`` plus an exponential of the mean ``excess``."""
    words = f"exponential above {start:.4g} s, mean {start + excess:.4g} s"

    def cdf(seconds: Times) -> Times:
        return -np.expm1(-np.maximum(seconds - start, 0.0) / excess)

    return Noise(words, start + excess, excess, cdf)


def empirical(times: ArrayLike) -> Noise:
    """The recorded times, each equally likely; NaN is ignored. No tail beyond the longest one."""
    rising = np.sort(_given(times))
    mean, std = float(rising.mean()), float(rising.std())
    words = f"{len(rising)} recorded times, {mean:.4g} s +- {std:.4g} s"

    def cdf(seconds: Times) -> Times:
        return np.searchsorted(rising, seconds, side="right") / len(rising)

    return Noise(words, mean, std, cdf)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def normal_cdf(values: Times, mean: float | Times, std: float | Times) -> Times:
    """Phi((values - mean) / std), of the standard normal distribution; a step for a std of 0."""
    above = values - np.asarray(mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        # 0 / 0: a value at the mean of a constant counts as reached.
        scaled = np.nan_to_num(above / (np.asarray(std) * math.sqrt(2)), nan=np.inf)
    out: Times = 0.5 * (1 + _erf(scaled))
    return out


def _given(times: ArrayLike) -> Times:
    seconds = np.asarray(times, dtype=np.float64)
    seconds = seconds[~np.isnan(seconds)]
    if seconds.size == 0:
        raise OptionError("no times to take a distribution from; wanted: at least one")
    return seconds


def fit(times: ArrayLike) -> Noise:
    """The normal, log-normal or exponential distribution of greatest likelihood; NaN is ignored."""
    seconds = _given(times)
    mean, std, least = float(seconds.mean()), float(seconds.std()), float(seconds.min())
    if std <= 1e-9 * mean:
        return normal(mean, std)
    excess = mean - least
    candidates: list[tuple[float, Noise]] = [
        (-math.log(std) - 0.5 * math.log(2 * math.pi) - 0.5, normal(mean, std)),
        (-math.log(excess) - 1, exponential(least, excess)),
    ]
    for start in STARTS if least > 0 else ():
        logs = np.log(seconds - start * least)
        log_mean, log_std = float(logs.mean()), float(logs.std())
        likelihood = -log_mean - math.log(log_std) - 0.5 * math.log(2 * math.pi) - 0.5
        candidates.append((likelihood, log_normal(start * least, log_mean, log_std)))
    return max(candidates, key=lambda candidate: candidate[0])[1]


# ---- curves ----


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
    late = (1 - np.euler_gamma) * quantile(1 - 1 / workers)
    later = np.euler_gamma * quantile(1 - 1 / (workers * math.e))
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
    return points_of(thresholds, 1 - completed, cut + communication, speedups)


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
