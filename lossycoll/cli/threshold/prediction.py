"""Predictions from recorded times: the chosen threshold, and curves to compare it with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from lossycoll.simulate.noise import Empirical, Noise, fit
from lossycoll.simulate.recorded import Recorded
from lossycoll.simulate.scale import choose_at, profiles
from lossycoll.simulate.theory import noise_curve, normal_curve
from lossycoll.simulate.threshold import Choice, Cut, Point, choose, curve
from lossycoll.simulate.times import Times, usual

HARMLESS_DROP: Final = 0.1
"""The drop rate up to which others have seen no loss of quality."""
SLOW_RANK: Final = 1.1
"""A rank that is slower than the median rank by this factor on average is worth a remark."""


@dataclass(frozen=True)
class Prediction:
    """The choice, what it was made from, and other curves to compare it with."""

    recorded: Recorded
    choice: Choice
    times: Times
    """The times that the choice was made from: recorded, or resampled."""
    workers: int
    resampled: bool
    noise: Noise
    """The distribution that fits the recorded micro-batches."""
    independent: tuple[Point, ...]
    """The curve if micro-batches are as they were recorded, but independent."""
    fitted: tuple[Point, ...]
    """The curve if micro-batches are independent draws of ``noise``."""
    paper: tuple[Point, ...]
    """The curve by the paper's formula from their mean and deviation."""
    at: Point | None
    """The chosen threshold's point; None for no threshold."""
    harmless: Choice | None
    """The choice for HARMLESS_DROP, if the best threshold drops more."""

    @property
    def full_seconds(self) -> float:
        """Duration of a step without a threshold."""
        return self.choice.curve[-1].step_seconds


def predict(
    recorded: Recorded, workers: int | None, drop_rate: float | None, cut: Cut, seed: int
) -> Prediction:
    """Chooses a threshold, for ``workers`` ranks or for the recorded ones, and compares."""
    times, communication = recorded.times, recorded.communication
    if workers is None:
        choice = choose(times, communication, drop_rate=drop_rate, cut=cut)
        used = times[usual(times)]
    else:
        choice, used = choose_at(
            times, communication, workers, drop_rate=drop_rate, cut=cut, seed=seed
        )
    pool = profiles(times)
    noise, recorded_noise = fit(pool), Empirical(pool)
    count = max(1, round(float(np.isfinite(pool).sum(axis=1).mean())))
    taus = np.array([point.threshold for point in choice.curve])
    ranks = used.shape[1]
    at = harmless = None
    if math.isfinite(choice.threshold):
        (at,) = curve(used, np.array([choice.threshold]), communication, cut=cut)
    if drop_rate is None and choice.drop_rate > HARMLESS_DROP:
        harmless = choose(used, communication, drop_rate=HARMLESS_DROP, cut=cut)
    return Prediction(
        recorded=recorded,
        choice=choice,
        times=used,
        workers=ranks,
        resampled=workers is not None,
        noise=noise,
        independent=noise_curve(taus, ranks, count, recorded_noise, communication),
        fitted=noise_curve(taus, ranks, count, noise, communication),
        paper=normal_curve(taus, ranks, count, recorded_noise, communication),
        at=at,
        harmless=harmless,
    )


def slow_rank(times: Times) -> tuple[int, float] | None:
    """The slowest rank, and its mean compute time over the median rank's, if that is much. Times
    are by micro-batch, so that a rank with more of them doesn't count as slow."""
    means = np.nanmean(times[usual(times)], axis=(0, 2))
    slowest = int(np.argmax(means))
    ratio = float(means[slowest] / np.median(means))
    return (slowest, ratio) if ratio > SLOW_RANK else None
