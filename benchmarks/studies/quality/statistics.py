"""Paired differences: each run against the reliable one of the same seed and ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.results import Result

from .matrix import Run

Measure = Callable[[Result, Result], float]
"""Takes a run's result and its base's."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. ``half``: half the width of its confidence interval, None for one seed."""

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float:
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        return math.inf if self.half is None else self.mean + self.half


def estimate(values: Iterable[float]) -> Estimate:
    """The mean with Student's interval at CONFIDENCE, which takes the values for normal."""
    found = list(values)
    n = len(found)
    if n < 2:
        return Estimate(found[0], None, n)
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return Estimate(statistics.fmean(found), quantile * statistics.stdev(found) / math.sqrt(n), n)


def perplexity_change(model: str = "rank0") -> Measure:
    """In %: exp of the difference of the losses, less 1."""

    def measure(entry: Result, base: Result) -> float:
        loss, least = (one.figures["models"][model]["loss"] for one in (entry, base))
        return 100 * math.expm1(loss - least)

    return measure


def accuracy_change(model: str = "rank0") -> Measure:
    """In percentage points."""

    def measure(entry: Result, base: Result) -> float:
        right, most = (one.figures["models"][model]["accuracy"] for one in (entry, base))
        return float(100 * (right - most))

    return measure


def cells(entries: Mapping[str, Result], measure: Measure) -> dict[tuple[Any, ...], Estimate]:
    """The estimate of each cell (:attr:`Run.cell`) from the seeds that have both runs.

    A run without its base is left out: it has nothing to be compared with.
    """
    found: dict[tuple[Any, ...], list[float]] = {}
    for entry in entries.values():
        run = Run.of(entry.settings)
        base = entries.get(run.base.key)
        if base is not None and run != run.base:
            found.setdefault(run.cell, []).append(measure(entry, base))
    return {cell: estimate(values) for cell, values in found.items()}
