"""Predict the threshold of DropCompute from recorded compute times (docs/dropcompute.md).

The file is JSON: {"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds":
number}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from lossycoll.cli.argtypes import share, whole
from lossycoll.cli.plotting import drawn, must_be_png
from lossycoll.simulate.recorded import load
from lossycoll.simulate.scale import profiles
from lossycoll.simulate.theory import best
from lossycoll.simulate.threshold import Choice, Cut, Point

from .prediction import HARMLESS_DROP, Prediction, predict, slow_rank

MOST_WORKERS: Final = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("times", type=Path, help="file of recorded times (docs/dropcompute.md has its format)")
    add(
        "--workers",
        type=whole(1, MOST_WORKERS),
        help="predict for this many ranks, by resampling the recorded ones' steps",
    )
    add(
        "--drop-rate",
        type=share,
        help="the smallest threshold that drops at most this share, rather than the best",
    )
    add(
        "--cut",
        choices=get_args(Cut),
        default="finished",
        help="what becomes of the micro-batch that the threshold falls into: dropped, and the step "
        "ends with the last finished one (default) or at the threshold; or started, so finished",
    )
    add("--seed", type=whole(0, 2**31 - 1), default=0, help="of the resampling (default 0)")
    add("--picture", type=Path, metavar="FILE.png", help="where to draw the curve")
    add("--json", action="store_true", help="print the result as JSON, not as a table")


def run(options: argparse.Namespace) -> int:
    """Prints the prediction and draws it; returns the exit status."""
    must_be_png(options.picture)
    recorded = load(options.times)
    prediction = predict(recorded, options.workers, options.drop_rate, options.cut, options.seed)
    # With --json, standard output carries the JSON and nothing else.
    console, errors = Console(stderr=options.json), Console(stderr=True)
    if options.json:
        print(json.dumps(as_json(prediction.choice), allow_nan=False))
    else:
        for line in head(prediction):
            console.print(line, markup=False, highlight=False)
        console.print(table(prediction))
        for line in remarks(prediction):
            console.print(line, markup=False, highlight=False)
    if options.picture is not None and drawn(
        "lossycoll.cli.threshold.plot", errors, prediction, options.picture
    ):
        console.print(f"picture: {options.picture}", markup=False, highlight=False)
    return 0


def as_json(choice: Choice) -> dict[str, Any]:
    """Result as ``--json`` prints it; ``threshold`` is null if dropping does not pay."""
    return {
        "threshold": choice.threshold if math.isfinite(choice.threshold) else None,
        "drop_rate": choice.drop_rate,
        "speedup": choice.speedup,
        "curve": [dataclasses.asdict(point) for point in choice.curve],
    }


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
    out = Table(box=None, padding=(0, 2, 0, 0))  # fits 80 columns
    for heading in ("threshold, s", "dropped", "step, s", "speed-up", "independent", "fitted"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("", no_wrap=True)
    points = prediction.choice.curve
    shown = np.unique(np.linspace(0, len(points) - 1, ROWS).round().astype(int))
    rows = [points[i] for i in shown]
    if prediction.at is not None:
        rows = [point for point in rows if point.threshold != prediction.at.threshold]
        rows.append(prediction.at)
    speedups = [point.speedup for point in rows]
    least, most = min(speedups), max(speedups)
    compared = (prediction.independent, prediction.fitted)
    for point in sorted(rows, key=lambda point: point.threshold):
        chosen = point is prediction.at
        # From the least to the most: their ratio is in the figures.
        bar = "#" * (1 + round((BAR - 1) * (point.speedup - least) / max(most - least, 1e-9)))
        others = (_speedup(other, point.threshold) for other in compared)
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
    """Speed-up of a curve at a threshold, interpolated."""
    taus = [point.threshold for point in points]
    return float(np.interp(threshold, taus, [point.speedup for point in points]))


def remarks(prediction: Prediction) -> list[str]:
    """The answer in words, and what to consider about it."""
    choice, at = prediction.choice, prediction.at
    if at is None:
        most = best(choice.curve).speedup
        lines = [f"no threshold: dropping doesn't pay (speed-up {most:.3f} at best)"]
    else:
        lines = [
            f"threshold {choice.threshold:.4g} s: {choice.drop_rate:.1%} of the micro-batches are "
            f"dropped, a step takes {at.step_seconds:.4g} s rather than "
            f"{prediction.full_seconds:.4g} s, effective speed-up {choice.speedup:.3f}"
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
    slow = slow_rank(prediction.recorded.times)
    if slow is not None:
        lines.append(
            f"rank {slow[0]} computes {slow[1] - 1:.0%} longer than the median rank, on average: "
            f"what is dropped is its data above all; look at that machine first"
        )
    return lines
