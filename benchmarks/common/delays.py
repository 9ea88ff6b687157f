"""The DropCompute paper's simulated delay, as in its authors' code (create_dist_lognormal)."""

from __future__ import annotations

import math

import numpy as np

from lossycoll.simulate.theory import Noise
from lossycoll.simulate.times import Times


class Delayed(Noise):
    """A micro-batch takes clean (1 + 0.5 factor L / E[L]), where L is a whole number from 1 to 999
    and p(L) is proportional to exp(-(ln L - 4)^2 / 2) / L. L / E[L] has a standard deviation of
    1.162 and is at most 11.4."""

    def __init__(self, clean: float = 1.0, factor: float = 1.0) -> None:
        lengths = np.arange(1, 1000, dtype=np.float64)
        chances = np.exp(-((np.log(lengths) - 4) ** 2) / 2) / lengths
        chances /= chances.sum()
        self.delays: Times = lengths / (lengths @ chances)
        self.rising = clean * (1 + 0.5 * factor * self.delays)
        std = 0.5 * clean * factor * math.sqrt((self.delays - 1) ** 2 @ chances)
        super().__init__("the paper's delay", clean * (1 + 0.5 * factor), std, self._reached)
        self._cumulative = np.cumsum(chances)
        self._cumulative[-1] = 1.0

    def _reached(self, seconds: Times) -> Times:
        found = np.searchsorted(self.rising, seconds, side="right")
        return np.concatenate([[0.0], self._cumulative])[found]

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Times:
        """Independent times."""
        drawn = np.searchsorted(self._cumulative, generator.random(shape), side="right")
        return self.rising[drawn]
