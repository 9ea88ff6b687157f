"""Distributions of the time that one micro-batch takes, in seconds: mean, standard deviation, and
cumulative distribution function.

They are the paper's simulated delay (DropCompute, arXiv 2306.10598), three others, and recorded
times themselves. :func:`fit` says which one recorded times are likeliest to come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from ..errors import OptionError
from .times import Times

STARTS: Final = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
"""Where a fitted log-normal may start, as shares of the shortest time. Only these are tried: by
likelihood alone it would start at the shortest time itself, where its density is unbounded."""


@dataclass(frozen=True)
class Normal:
    """Normal."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"normal, {self.mean:.4g} s +- {self.std:.4g} s"

    def cdf(self, seconds: Times) -> Times:
        return normal_cdf(seconds, self.mean, self.std)


@dataclass(frozen=True)
class LogNormal:
    """``start`` plus a log-normal, of whose logarithm the mean and the deviation are given."""

    start: float
    log_mean: float
    log_std: float

    def __str__(self) -> str:
        median = self.start + math.exp(self.log_mean)
        return (
            f"log-normal above {self.start:.4g} s, median {median:.4g} s, sigma {self.log_std:.3g}"
        )

    @property
    def mean(self) -> float:
        return self.start + math.exp(self.log_mean + self.log_std**2 / 2)

    @property
    def std(self) -> float:
        return (self.mean - self.start) * math.sqrt(math.expm1(self.log_std**2))

    def cdf(self, seconds: Times) -> Times:
        above = np.log(np.maximum(seconds - self.start, np.finfo(np.float64).tiny))
        return normal_cdf(above, self.log_mean, self.log_std)


@dataclass(frozen=True)
class Exponential:
    """``start`` plus an exponential of the mean ``excess``."""

    start: float
    excess: float

    def __str__(self) -> str:
        return f"exponential above {self.start:.4g} s, mean {self.mean:.4g} s"

    @property
    def mean(self) -> float:
        return self.start + self.excess

    @property
    def std(self) -> float:
        return self.excess

    def cdf(self, seconds: Times) -> Times:
        out: Times = -np.expm1(-np.maximum(seconds - self.start, 0.0) / self.excess)
        return out


@dataclass(frozen=True)
class Delayed:
    """The DropCompute paper's simulated delay, as in its authors' code (create_dist_lognormal).

    A micro-batch takes clean (1 + 0.5 factor L / E[L]), where L is a whole number from 1 to 999 and
    p(L) is proportional to exp(-(ln L - 4)^2 / 2) / L. L / E[L] has a standard deviation of 1.162
    and is at most 11.4.
    """

    clean: float = 1.0
    factor: float = 1.0

    def __str__(self) -> str:
        return f"{self.clean:.4g} s and the paper's delay, factor {self.factor:g}"

    @cached_property
    def _delays(self) -> tuple[Times, Times]:
        """L / E[L], ascending, and the probability of each."""
        lengths = np.arange(1, 1000, dtype=np.float64)
        chances = np.exp(-((np.log(lengths) - 4) ** 2) / 2) / lengths
        chances /= chances.sum()
        return lengths / (lengths @ chances), chances

    def _seconds(self, delay: ArrayLike) -> Times:
        out: Times = self.clean * (1 + 0.5 * self.factor * np.asarray(delay))
        return out

    @property
    def mean(self) -> float:
        return float(self._seconds(1.0))

    @property
    def std(self) -> float:
        delays, chances = self._delays
        return 0.5 * self.clean * self.factor * math.sqrt((delays - 1) ** 2 @ chances)

    def delays(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Times:
        """Draws L / E[L]: delays in units of their mean."""
        delays, chances = self._delays
        rising = np.cumsum(chances)
        rising[-1] = 1.0
        return delays[np.searchsorted(rising, generator.random(shape), side="right")]

    def cdf(self, seconds: Times) -> Times:
        delays, chances = self._delays
        rising = np.concatenate([[0.0], np.cumsum(chances)])
        return rising[np.searchsorted(self._seconds(delays), seconds, side="right")]

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Times:
        return self._seconds(self.delays(generator, shape))


class Empirical:
    """The recorded times, each equally likely; NaN is ignored. No tail beyond the longest one."""

    def __init__(self, times: ArrayLike) -> None:
        self.rising = np.sort(_given(times))
        self.mean = float(self.rising.mean())
        self.std = float(self.rising.std())

    def __str__(self) -> str:
        return f"{len(self.rising)} recorded times, {self.mean:.4g} s +- {self.std:.4g} s"

    def cdf(self, seconds: Times) -> Times:
        out: Times = np.searchsorted(self.rising, seconds, side="right") / len(self.rising)
        return out


Noise = Normal | LogNormal | Exponential | Delayed | Empirical
"""The distribution of independent micro-batches' times."""

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
        return Normal(mean, std)
    excess = mean - least
    candidates: list[tuple[float, Noise]] = [
        (-math.log(std) - 0.5 * math.log(2 * math.pi) - 0.5, Normal(mean, std)),
        (-math.log(excess) - 1, Exponential(least, excess)),
    ]
    for start in STARTS if least > 0 else ():
        logs = np.log(seconds - start * least)
        log_mean, log_std = float(logs.mean()), float(logs.std())
        likelihood = -log_mean - math.log(log_std) - 0.5 * math.log(2 * math.pi) - 0.5
        candidates.append((likelihood, LogNormal(start * least, log_mean, log_std)))
    return max(candidates, key=lambda candidate: candidate[0])[1]
