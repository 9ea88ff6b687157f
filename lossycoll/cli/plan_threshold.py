"""Predict the threshold of DropCompute from recorded compute times (docs/dropcompute.md).

The file is JSON: {"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds":
number}.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from rich.table import Column, Table

from lossycoll.simulate.theory import Noise, empirical, fit, noise_curve, normal_curve
from lossycoll.simulate.threshold import Choice, Cut, Point, choose, choose_at, curve, profiles
from lossycoll.simulate.times import Recorded, Times, compute_seconds, load, usual

from .answer import Answer, add_json, give, must_be_png, numbers_table
from .argtypes import share, whole

MOST_WORKERS: Final = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("times", type=Path, help="file of recorded times (the page DropCompute has its format)")
    how = "predict for this many ranks, by resampling the recorded ones' steps"
    add("--workers", type=whole(1, MOST_WORKERS), help=how)
    how = "the smallest threshold that drops at most this share, rather than the best"
    add("--drop-rate", type=share, help=how)
    how = (
        "what becomes of the micro-batch that the threshold falls into: dropped, and the step "
        "ends with the last finished one (default) or at the threshold; or started, so finished"
    )
    add("--cut", choices=get_args(Cut), default="finished", help=how)
    add("--seed", type=whole(0, 2**31 - 1), default=0, help="of the resampling (default 0)")
    add("--picture", type=Path, metavar="FILE.png", help="where to draw the curve")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    must_be_png(options.picture)
    recorded = load(options.times)
    prediction = predict(recorded, options.workers, options.drop_rate, options.cut, options.seed)
    said = [*head(prediction), table(prediction), *remarks(prediction)]
    answer = Answer(as_json(prediction.choice), said, partial(draw, prediction))
    return give(answer, options, picture=options.picture)


def as_json(choice: Choice) -> dict[str, Any]:
    """Result as ``--json`` prints it; ``threshold`` is null if dropping does not pay."""
    return {
        "threshold": choice.threshold if math.isfinite(choice.threshold) else None,
        "drop_rate": choice.drop_rate,
        "speedup": choice.speedup,
        "curve": [dataclasses.asdict(point) for point in choice.curve],
    }


HARMLESS_DROP: Final = 0.1
"""The drop rate up to which others have seen no loss of quality."""
SLOW_RANK: Final = 1.1
"""A rank that is slower than the median rank by this factor on average is worth a remark."""


@dataclass(frozen=True)
class Prediction:
    """The choice, what it was made from, and other curves to compare it with."""

    recorded: Recorded
    choice: Choice
    times: Times  # that the choice was made from: recorded, or resampled
    resampled: bool
    noise: Noise  # the distribution that fits the recorded micro-batches
    independent: tuple[Point, ...]  # the curve of micro-batches as recorded, but independent
    fitted: tuple[Point, ...]  # the curve of independent draws of ``noise``
    paper: tuple[Point, ...]  # the curve by the paper's formula from their mean and deviation
    at: Point | None  # the chosen threshold's; None for no threshold
    harmless: Choice | None  # for HARMLESS_DROP, if the best threshold drops more

    @property
    def workers(self) -> int:
        return int(self.times.shape[1])


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
    noise, measured = fit(pool), empirical(pool)
    count = max(1, round(float(np.isfinite(pool).sum(axis=1).mean())))
    place = np.array([point.threshold for point in choice.curve]), used.shape[1], count
    at = harmless = None
    if math.isfinite(choice.threshold):
        (at,) = curve(used, np.array([choice.threshold]), communication, cut=cut)
    if drop_rate is None and choice.drop_rate > HARMLESS_DROP:
        harmless = choose(used, communication, drop_rate=HARMLESS_DROP, cut=cut)
    return Prediction(
        recorded=recorded,
        choice=choice,
        times=used,
        resampled=workers is not None,
        noise=noise,
        independent=noise_curve(*place, measured, communication),
        fitted=noise_curve(*place, noise, communication),
        paper=normal_curve(*place, measured, communication),
        at=at,
        harmless=harmless,
    )


ROWS: Final = 14
"""Rows of the table; the curve has more points."""
BAR: Final = 12
"""Characters of the longest bar."""


def head(prediction: Prediction) -> list[str]:
    """Lines on what was recorded, and what it is taken for."""
    steps, ranks, batches = prediction.recorded.times.shape
    lines = [
        f"recorded: {steps} steps, {ranks} ranks, {batches} micro-batches; "
        f"{prediction.recorded.communication:.4g} s of a step aren't compute"
    ]
    left_out = prediction.choice.left_out
    if left_out:
        named = ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else "")
        lines.append(f"left out as outliers: {len(left_out)} of the steps ({named})")
    if prediction.resampled:
        lines.append(
            f"predicted: {prediction.workers} ranks, {len(prediction.times)} steps, each rank's "
            f"drawn from the {len(profiles(prediction.recorded.times))} that were recorded"
        )
    return [
        *lines,
        f"a micro-batch looks {prediction.noise}",
        "speed-ups: by whole steps of a rank; by independent micro-batches; by the fitted look",
    ]


def table(prediction: Prediction) -> Table:
    """Some points of the curve, the chosen one marked."""
    names = ("threshold, s", "dropped", "step, s", "speed-up", "independent", "fitted")
    out = numbers_table(*names, Column(no_wrap=True))  # fits 80 columns
    points = prediction.choice.curve
    shown = np.unique(np.linspace(0, len(points) - 1, ROWS).round().astype(int))
    rows = {points[i].threshold: points[i] for i in shown}
    if prediction.at is not None:
        rows[prediction.at.threshold] = prediction.at
    speedups = [point.speedup for point in rows.values()]
    least, most = min(speedups), max(speedups)
    taus = [point.threshold for point in points]
    others = [[one.speedup for one in also] for also in (prediction.independent, prediction.fitted)]
    for threshold, point in sorted(rows.items()):
        # From the least to the most: their ratio is in the figures.
        bar = "#" * (1 + round((BAR - 1) * (point.speedup - least) / max(most - least, 1e-9)))
        chosen = point is prediction.at
        out.add_row(
            f"{threshold:.4g}",
            f"{point.drop_rate:.1%}",
            f"{point.step_seconds:.4g}",
            f"{point.speedup:.3f}",
            *(f"{np.interp(threshold, taus, other):.3f}" for other in others),
            f"{bar} <-" if chosen else bar,
            style="bold" if chosen else None,
        )
    return out


def remarks(prediction: Prediction) -> list[str]:
    """The answer in words, and what to consider about it."""
    choice, at = prediction.choice, prediction.at
    if at is None:
        most = max(point.speedup for point in choice.curve)
        lines = [f"no threshold: dropping doesn't pay (speed-up {most:.3f} at best)"]
    else:
        lines = [
            f"threshold {choice.threshold:.4g} s: {choice.drop_rate:.1%} of the micro-batches are "
            f"dropped, a step takes {at.step_seconds:.4g} s rather than "
            f"{choice.curve[-1].step_seconds:.4g} s, effective speed-up {choice.speedup:.3f}"
        ]
        if prediction.harmless is not None:
            lines.append(
                f"that is more than the {HARMLESS_DROP:.0%} up to which others have seen no loss of"
                f" quality; --drop-rate {HARMLESS_DROP:g} has a speed-up of "
                f"{prediction.harmless.speedup:.3f}"
            )
    pool = profiles(prediction.recorded.times)
    if prediction.workers > len(pool):
        lines.append(
            f"{prediction.workers} ranks have slower ones than the {len(pool)} recorded steps of a "
            f"rank can show, so expect more: independent is near the truth if a rank's "
            f"micro-batches are independent; fitted guesses at times longer than any recorded"
        )
    # By micro-batch, so that a rank with more of them doesn't count as slow.
    times = prediction.recorded.times
    means = np.nanmean(times[usual(times)], axis=(0, 2))
    slower = means.max() / np.median(means)
    if slower > SLOW_RANK:
        lines.append(
            f"rank {means.argmax()} computes {slower - 1:.0%} longer than the median rank, on "
            f"average: what is dropped is its data above all; look at that machine first"
        )
    return lines


CHOSEN: dict[str, Any] = {"color": "tab:red", "linestyle": "--", "linewidth": 1.2}


def draw(prediction: Prediction, plt: Any, path: Path) -> None:
    figure, panels = plt.subplot_mosaic("ab;cc", figsize=(10, 7.6))
    gain, cost, spread = panels.values()
    what = "resampled" if prediction.resampled else "recorded"
    curves = (
        (prediction.choice.curve, f"{what} times", {"color": "tab:blue", "linewidth": 2.5}),
        (prediction.independent, "independent micro-batches", {"color": "tab:green"}),
        (prediction.fitted, "fitted distribution", {"color": "tab:orange", "linestyle": "--"}),
        (prediction.paper, "paper's normal formula", {"color": "tab:gray", "linestyle": ":"}),
    )
    for points, label, style in curves:
        speedups = [point.speedup for point in points]
        gain.plot([point.threshold for point in points], speedups, label=label, **style)
        cost.plot([100 * point.drop_rate for point in points], speedups, **style)
    if prediction.at is not None:
        label = f"chosen: {prediction.at.threshold:.4g} s"
        gain.axvline(prediction.at.threshold, label=label, **CHOSEN)
        label = f"{prediction.at.drop_rate:.1%} dropped: {prediction.at.speedup:.3f}"
        at = (100 * prediction.at.drop_rate, prediction.at.speedup)
        cost.plot(*at, "o", color="tab:red", label=label)
        cost.legend()
    for axes in (gain, cost):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(ylabel="effective speed-up")
    gain.set(title="Speed-up against the threshold", xlabel="threshold, s")
    cost.set(title="Speed-up against what is dropped", xlabel="micro-batches dropped, %")
    _spread(spread, prediction)
    besides = f"{prediction.recorded.communication:.3g} s of a step besides compute"
    figure.suptitle(f"DropCompute, {prediction.workers} ranks, {besides}")
    spread.legend()
    # Below all: among three curves there is no room.
    figure.legend(*gain.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def _spread(axes: Any, prediction: Prediction) -> None:
    ranks = np.nansum(prediction.times, axis=2).ravel()
    for values, label, colour in (
        (ranks, "a rank", "tab:green"),
        (compute_seconds(prediction.times), "the slowest rank", "tab:purple"),
    ):
        axes.ecdf(values, label=label, color=colour, linewidth=2)
    if prediction.at is not None:
        axes.axvline(prediction.at.threshold, **CHOSEN)
    axes.margins(x=0.05)
    axes.set(title="What a threshold cuts off", xlabel="compute in a step, s")
    axes.set(ylabel="share of the steps done by then")
