"""Recorded compute times in, the threshold of DropCompute out: what it drops and what it gains.

The file is JSON: {"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds":
number}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from lossycoll.cli.argtypes import real, whole
from lossycoll.cli.launcher import must_be_writable
from lossycoll.cli.plotting import drawn
from lossycoll.errors import OptionError
from lossycoll.simulate.noise import Empirical, Noise, fit
from lossycoll.simulate.recorded import Recorded, load
from lossycoll.simulate.scale import choose_at, profiles
from lossycoll.simulate.theory import best, noise_curve, normal_curve
from lossycoll.simulate.threshold import Choice, Cut, Point, choose, curve
from lossycoll.simulate.times import Times, usual

MOST_WORKERS = 1 << 14
ROWS = 14  # of the table; the curve has more points
BAR = 12  # characters
HARMLESS_DROP = 0.1
SLOW_RANK = 1.1
"""A rank that is slower than the median rank by this on average is worth a word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("times", type=Path, help="file of recorded times (docs/dropcompute.md has its format)")
    add(
        "--workers",
        type=whole(1, MOST_WORKERS),
        help="predict for so many ranks, by resampling the measured ones' steps",
    )
    add(
        "--drop-rate",
        type=real(0, 1),
        help="the smallest threshold that drops at most this share, rather than the best",
    )
    add(
        "--cut",
        choices=get_args(Cut),
        default="finished",
        help="what becomes of the micro-batch that the threshold falls into: lost, and the step "
        "ends with the last finished one (default) or at the threshold; or started, so finished",
    )
    add("--seed", type=whole(0, 2**31 - 1), default=0, help="of the resampling (default 0)")
    add("--picture", type=Path, metavar="FILE.png", help="where to draw the curve")
    add("--json", action="store_true", help="print the result as JSON, not as a table")


@dataclass(frozen=True)
class Found:
    """The choice, and what else a person wants to see."""

    recorded: Recorded
    choice: Choice
    times: Times
    """By which it was chosen: recorded, or resampled."""
    workers: int
    resampled: bool
    noise: Noise
    """That the recorded micro-batches look like."""
    independent: tuple[Point, ...]
    """The curve if micro-batches are as they were recorded, but know nothing of each other."""
    fitted: tuple[Point, ...]
    """The same if they are as ``noise`` says."""
    paper: tuple[Point, ...]
    """And by the paper's formula from their mean and deviation."""
    at: Point | None
    """The chosen threshold; None for no threshold."""
    harmless: Choice | None
    """What HARMLESS_DROP would gain, where the best threshold drops more."""

    @property
    def full_seconds(self) -> float:
        """Of a step that nothing cuts short."""
        return self.choice.curve[-1].step_seconds


def run(options: argparse.Namespace) -> int:
    if options.picture is not None:
        if options.picture.suffix.lower() != ".png":
            raise OptionError(f"--picture {options.picture}: not a .png; pictures are PNG")
        must_be_writable(options.picture)
    found = find(load(options.times), options.workers, options.drop_rate, options.cut, options.seed)
    # With --json, standard output carries the JSON and nothing else.
    console, errors = Console(stderr=options.json), Console(stderr=True)
    if options.json:
        print(json.dumps(as_json(found.choice), allow_nan=False))
    else:
        for line in head(found):
            console.print(line, markup=False, highlight=False)
        console.print(table(found))
        for line in remarks(found):
            console.print(line, markup=False, highlight=False)
    if options.picture is not None and drawn("threshold.plot", errors, found, options.picture):
        console.print(f"picture: {options.picture}", markup=False, highlight=False)
    return 0


def find(
    recorded: Recorded, workers: int | None, drop_rate: float | None, cut: Cut, seed: int
) -> Found:
    times, communication = recorded.times, recorded.communication
    if workers is None:
        choice = choose(times, communication, drop_rate=drop_rate, cut=cut)
        by = times[usual(times)]
    else:
        choice, by = choose_at(
            times, communication, workers, drop_rate=drop_rate, cut=cut, seed=seed
        )
    pool = profiles(times)
    noise, recorded_noise = fit(pool), Empirical(pool)
    count = max(1, round(float(np.isfinite(pool).sum(axis=1).mean())))
    taus = np.array([point.threshold for point in choice.curve])
    ranks = by.shape[1]
    at = harmless = None
    if math.isfinite(choice.threshold):
        (at,) = curve(by, np.array([choice.threshold]), communication, cut=cut)
    if drop_rate is None and choice.drop_rate > HARMLESS_DROP:
        harmless = choose(by, communication, drop_rate=HARMLESS_DROP, cut=cut)
    return Found(
        recorded,
        choice,
        by,
        ranks,
        workers is not None,
        noise,
        noise_curve(taus, ranks, count, recorded_noise, communication),
        noise_curve(taus, ranks, count, noise, communication),
        normal_curve(taus, ranks, count, recorded_noise, communication),
        at,
        harmless,
    )


def as_json(choice: Choice) -> dict[str, Any]:
    """``threshold`` is null where dropping doesn't pay."""
    return {
        "threshold": choice.threshold if math.isfinite(choice.threshold) else None,
        "drop_rate": choice.drop_rate,
        "speedup": choice.speedup,
        "curve": [dataclasses.asdict(point) for point in choice.curve],
    }


def head(found: Found) -> list[str]:
    steps, ranks, batches = found.recorded.times.shape
    lines = [
        f"recorded: {steps} steps, {ranks} ranks, {batches} micro-batches; "
        f"{found.recorded.communication:.4g} s of a step aren't compute"
    ]
    left_out = found.choice.left_out
    if left_out:
        named = ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else "")
        lines.append(f"left out as outliers: {len(left_out)} of the steps ({named})")
    if found.resampled:
        lines.append(
            f"predicted: {found.workers} ranks, {len(found.times)} steps, each rank's drawn from "
            f"the {len(profiles(found.recorded.times))} that were recorded"
        )
    return [
        *lines,
        f"a micro-batch looks {found.noise}",
        "speed-ups: by whole steps of a rank; by independent micro-batches; by the fitted look",
    ]


def table(found: Found) -> Table:
    """Some points of the curve, the chosen one marked."""
    out = Table(box=None, padding=(0, 2, 0, 0))  # fits 80 columns
    for heading in ("threshold, s", "dropped", "step, s", "speed-up", "independent", "fitted"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("", no_wrap=True)
    points = found.choice.curve
    shown = np.unique(np.linspace(0, len(points) - 1, ROWS).round().astype(int))
    rows = [points[i] for i in shown]
    if found.at is not None:
        rows = [point for point in rows if point.threshold != found.at.threshold]
        rows.append(found.at)
    speedups = [point.speedup for point in rows]
    least, most = min(speedups), max(speedups)
    for point in sorted(rows, key=lambda point: point.threshold):
        chosen = point is found.at
        # From the least to the most: their ratio is in the figures.
        bar = "#" * (1 + round((BAR - 1) * (point.speedup - least) / max(most - least, 1e-9)))
        others = (_speedup(other, point.threshold) for other in (found.independent, found.fitted))
        out.add_row(
            f"{point.threshold:.4g}",
            f"{point.drop_rate:.1%}",
            f"{point.step_seconds:.4g}",
            f"{point.speedup:.3f}",
            *(f"{other:.3f}" for other in others),
            f"{bar} <-" if chosen else bar,
            style="bold" if chosen else None,
        )
    return out


def _speedup(points: Sequence[Point], threshold: float) -> float:
    """Of a curve at any threshold in its range."""
    taus = [point.threshold for point in points]
    return float(np.interp(threshold, taus, [point.speedup for point in points]))


def remarks(found: Found) -> list[str]:
    """The answer in words, and what to mind about it."""
    choice, at = found.choice, found.at
    if at is None:
        most = best(choice.curve).speedup
        lines = [f"no threshold: dropping doesn't pay (speed-up {most:.3f} at best)"]
    else:
        lines = [
            f"threshold {choice.threshold:.4g} s: {choice.drop_rate:.1%} of the micro-batches are "
            f"dropped, a step takes {at.step_seconds:.4g} s rather than "
            f"{found.full_seconds:.4g} s, effective speed-up {choice.speedup:.3f}"
        ]
        if found.harmless is not None:
            lines.append(
                f"that is more than the {HARMLESS_DROP:.0%} up to which others have seen no loss of"
                f" quality; --drop-rate {HARMLESS_DROP:g} has a speed-up of "
                f"{found.harmless.speedup:.3f}"
            )
    pool = profiles(found.recorded.times)
    if found.workers > len(pool):
        lines.append(
            f"{found.workers} ranks have slower ones than the {len(pool)} recorded steps of a rank "
            f"can show, so expect more: independent is near the truth where a rank's micro-batches "
            f"know nothing of each other; fitted guesses at times longer than any recorded"
        )
    slow = slow_rank(found.recorded.times)
    if slow is not None:
        lines.append(
            f"rank {slow[0]} computes {slow[1] - 1:.0%} longer than the median rank, on average: "
            f"what is dropped is its data above all; look at that machine first"
        )
    return lines


def slow_rank(times: Times) -> tuple[int, float] | None:
    """The slowest rank and its mean compute time over the median rank's, if that is worth a word.
    Per micro-batch, so that ranks with more of them aren't slow for that."""
    means = np.nanmean(times[usual(times)], axis=(0, 2))
    slowest = int(np.argmax(means))
    ratio = float(means[slowest] / np.median(means))
    return (slowest, ratio) if ratio > SLOW_RANK else None
