"""DropCompute's theory beside what is known of it: the experiments of tests/simulate and, with more
samples, of benchmarks/theory/dropcompute.py."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from benchmarks.common.delays import Delayed
from lossycoll.cli.plan_threshold import predict
from lossycoll.simulate import choose
from lossycoll.simulate.theory import (
    Noise,
    expected_maximum,
    noise_curve,
    normal_curve,
)
from lossycoll.simulate.threshold import Cut, Point, curve
from lossycoll.simulate.times import Recorded, Times

BATCHES = 12
STEP = 1.5 * BATCHES
"""The mean compute of a rank's step, in clean micro-batches, under the paper's delay."""

MAXIMA = {8: 1.0408, 16: 1.0503, 64: 1.0662, 200: 1.0773, 1024: 1.0912, 2048: 1.0966}
"""E[max] over the mean by the formula, for steps of 12 micro-batches of 1.5 +- 0.1454 s."""

SPEEDUPS = {
    8: (1.130, 1.126, 1.097),
    16: (1.187, 1.181, 1.152),
    32: (1.234, 1.228, 1.196),
    64: (1.286, 1.279, 1.246),
    112: (1.327, 1.320, 1.288),
    200: (1.366, 1.361, 1.326),
    1024: (1.454, 1.447, 1.410),
    2048: (1.489, 1.482, 1.444),
}
"""S_eff of the best threshold, of the best that drops at most 10%, and 5%, as another program has
sampled it: 12 micro-batches with the paper's delay, no communication."""
MOST_DROPPED = (1.0, 0.10, 0.05)

LOG = {"threshold": 5.9943, "drop_rate": 0.07446, "saved": 0.14192, "gain": 0.08309}
"""What the authors' own run of BERT-1.5B chose and predicted: 16 ranks, 12 micro-batches, 44
steps."""
LOG_STEPS = 44
LOG_CLEAN = 0.34056
"""Seconds of a micro-batch without its delay in that run."""
LOG_STEP = 9.2768
"""Seconds of a step in it, without a threshold."""

THRESHOLDS = np.linspace(0.5 * STEP, 2.2 * STEP, 600)


def best(points: Sequence[Point], most_dropped: float = 1.0) -> Point:
    """The first point of the greatest speed-up, of those that drop no more than a share."""
    return max((p for p in points if p.drop_rate <= most_dropped), key=lambda p: p.speedup)


def drawn(noise: Noise, seed: int, shape: tuple[int, ...]) -> Times:
    """Independent times of a distribution, by the inverse of it."""
    chances = np.random.default_rng(seed).random(shape)
    seconds = np.linspace(0.0, noise.mean + 40 * noise.std, 1 << 16)
    return np.interp(chances, noise.cdf(seconds), seconds)


def delayed(*shape: int, seed: int = 0, clean: float = 1.0) -> Times:
    return Delayed(clean).draw(np.random.default_rng(seed), shape)


def uneven(times: Times) -> Times:
    """Some ranks have a micro-batch or two less in some steps."""
    out: Times = times.copy()
    out[::2, 0, -1] = np.nan
    out[1::3, -1, -2:] = np.nan
    return out


def maximum(workers: int, samples: int) -> dict[str, float]:
    """E[max] over ``workers`` normal steps, over their mean."""
    mean, std = STEP, math.sqrt(BATCHES) * 0.1454
    rows = max(200, samples // workers)
    drawn = np.random.default_rng(workers).normal(mean, std, (rows, workers)).max(axis=1)
    return {
        "workers": workers,
        "formula": expected_maximum(workers, mean, std) / mean,
        "sampled": float(drawn.mean()) / mean,
        "error": float(drawn.std()) / math.sqrt(rows) / mean,
    }


def exact(workers: int) -> tuple[Point, ...]:
    """The curve under the paper's delay, in clean micro-batches, without a sample."""
    return noise_curve(THRESHOLDS, workers, BATCHES, Delayed(), 0.0)


def speedup(workers: int, steps: int, seed: int) -> dict[str, float]:
    """The best S_eff under the paper's delay: exact, sampled, and by the normal formula."""
    points = exact(workers)
    bests = [best(points, most).speedup for most in MOST_DROPPED]
    drawn = Delayed().draw(np.random.default_rng(seed), (steps, workers, BATCHES))
    # Its best threshold is taken from the exact curve: the best of a sample would be too good.
    at = np.array([best(points).threshold])
    each = [curve([step], at, 0.0, cut="threshold")[0].speedup for step in drawn]
    normal = normal_curve(THRESHOLDS, workers, BATCHES, Delayed(), 0.0)
    return {
        "workers": workers,
        "exact": bests[0],
        "exact_10": bests[1],
        "exact_5": bests[2],
        "threshold": float(at[0]) / STEP,
        "drop_rate": best(points).drop_rate,
        "sampled": float(np.mean(each)),
        "error": float(np.std(each)) / math.sqrt(steps),
        "normal": best(normal).speedup,
    }


def cuts(workers: int, steps: int) -> dict[str, float]:
    """The best S_eff under the paper's delay for each of the cuts, sampled, and what it drops."""
    drawn = Delayed().draw(np.random.default_rng([1, workers]), (steps, workers, BATCHES))
    row: dict[str, float] = {"workers": workers}
    for cut in get_args(Cut):
        choice = choose(drawn, 0.0, cut=cut)
        row[cut], row[f"{cut}_drop"] = choice.speedup, choice.drop_rate
    return row


def authors_log(ranks: int, runs: int) -> dict[str, tuple[float, float]]:
    """Mean and deviation over ``runs`` of what LOG has, for so many independent ranks. The authors
    seed by local rank, so that their 2 x 8 ranks are 8 independent ones."""
    found: dict[str, list[float]] = {name: [] for name in LOG}
    for run in range(runs):
        generator = np.random.default_rng([ranks, run])
        times = Delayed(LOG_CLEAN).draw(generator, (LOG_STEPS, ranks, BATCHES))
        communication = LOG_STEP - float(times.sum(axis=2).max(axis=1).mean())
        choice = choose(times, communication)
        (at,) = curve(times, np.array([choice.threshold]), communication)
        found["threshold"].append(choice.threshold)
        found["drop_rate"].append(choice.drop_rate)
        found["saved"].append(1 - at.step_seconds / LOG_STEP)
        found["gain"].append(choice.speedup - 1)
    return {name: (float(np.mean(v)), float(np.std(v))) for name, v in found.items()}


TOY_RANKS, TOY_FEATURES, TOY_SIZE, TOY_STEPS, TOY_RATE = 16, 50, 8, 150, 0.5
TOY_EVERY = 10
TOY_VARIANTS = tuple(
    (threshold, divisor) for threshold in (None, 18.0, 17.0) for divisor in ("completed", "fixed")
)


@functools.lru_cache(maxsize=1)
def _toy_data(seed: int) -> tuple[Any, Any, Any, Any]:
    """Inputs and labels of every step, and of the held-out data."""
    generator = np.random.default_rng(seed)
    truth = generator.normal(size=TOY_FEATURES)

    def draw(*shape: int) -> tuple[Any, Any]:
        inputs = generator.standard_normal((*shape, TOY_FEATURES), np.float32)
        chance = 1 / (1 + np.exp(-inputs @ truth))
        return inputs, (generator.random(shape) < chance).astype(np.float32)

    return *draw(TOY_STEPS, TOY_RANKS * BATCHES * TOY_SIZE), *draw(10_000)


def toy(threshold: float | None, divisor: str, seed: int = 0) -> dict[str, Any]:
    """Logistic regression by 16 ranks of 12 micro-batches under the paper's delay.

    ``divisor``: of the sum of gradients, by all micro-batches (``fixed``, as in the authors' code)
    or by those that were completed. Returns the loss on held-out data after every tenth step, the
    share dropped, and simulated seconds.
    """
    inputs, labels, held_inputs, held_labels = _toy_data(seed)
    delays = np.random.default_rng(seed + 1)
    weights = np.zeros(TOY_FEATURES, np.float32)
    total = TOY_RANKS * BATCHES
    limit = math.inf if threshold is None else threshold
    losses, seconds, completed = [], 0.0, 0
    for step in range(TOY_STEPS):
        ends = Delayed().draw(delays, (TOY_RANKS, BATCHES)).cumsum(axis=1)
        done = (ends < limit).ravel()
        seconds += min(limit, float(ends.max()))
        completed += int(done.sum())
        errors = 1 / (1 + np.exp(-inputs[step] @ weights)) - labels[step]
        gradient = inputs[step].T @ (errors * np.repeat(done, TOY_SIZE)) / TOY_SIZE
        weights -= np.float32(TOY_RATE / (total if divisor == "fixed" else done.sum())) * gradient
        if (step + 1) % TOY_EVERY == 0:
            scores = held_inputs @ weights
            losses.append(float(np.mean(np.logaddexp(0, scores) - held_labels * scores)))
    return {
        "threshold": threshold,
        "divisor": divisor,
        "drop_rate": 1 - completed / (total * TOY_STEPS),
        "seconds": seconds,
        "loss": losses[-1],
        "losses": losses,
    }


EXAMPLE_SHAPE = (24, 4, 8)
EXAMPLE_CLEAN = 0.12
EXAMPLE_COMMUNICATION = 0.15
EXAMPLE_SEED = 6


def extrapolated(workers: int, recordings: int) -> dict[str, float]:
    """What recordings as large as the example promise other numbers of ranks, and what is true:
    the speed-up by resampled steps, independent micro-batches and the fitted distribution, the true
    one of the best threshold, and the true one of that which resampling chose. Means."""
    batches = EXAMPLE_SHAPE[2]
    truth = Delayed(EXAMPLE_CLEAN)
    taus = np.linspace(0.5, 2.2, 300) * batches * truth.mean
    exactly = noise_curve(taus, workers, batches, truth, EXAMPLE_COMMUNICATION)
    rows = []
    for seed in range(recordings):
        times = truth.draw(np.random.default_rng([EXAMPLE_SEED, seed]), EXAMPLE_SHAPE)
        found = predict(Recorded(times, EXAMPLE_COMMUNICATION), workers, None, "finished", seed)
        chosen = np.array([found.choice.threshold])
        (kept,) = noise_curve(chosen, workers, batches, truth, EXAMPLE_COMMUNICATION)
        promised = (found.choice.speedup, best(found.independent).speedup)
        rows.append((*promised, best(found.fitted).speedup, kept.speedup))
    names = ("resampled", "independent", "fitted", "kept")
    means = zip(names, np.mean(rows, axis=0).tolist(), strict=True)
    return {"workers": workers, "true": best(exactly).speedup, **dict(means)}


def example() -> str:
    """examples/dropcompute-times.json: a recording of 24 steps of 4 ranks under the paper's delay,
    of which the last rank finds one micro-batch less in every eighth step."""
    drawn = Delayed(EXAMPLE_CLEAN).draw(np.random.default_rng(EXAMPLE_SEED), EXAMPLE_SHAPE)
    steps = [
        [
            [round(float(t), 4) for t in row[: 7 if rank == 3 and number % 8 == 7 else 8]]
            for rank, row in enumerate(step)
        ]
        for number, step in enumerate(drawn)
    ]
    lines = ",\n".join("  " + json.dumps(step) for step in steps)
    return (
        f'{{\n "communication_seconds": {EXAMPLE_COMMUNICATION},\n'
        f' "micro_batch_seconds": [\n{lines}\n ]\n}}\n'
    )
