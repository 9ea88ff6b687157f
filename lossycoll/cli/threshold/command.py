"""Predict the threshold of DropCompute from recorded compute times (docs/dropcompute.md).

The file is JSON: {"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds":
number}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console

from lossycoll.cli.argtypes import share, whole
from lossycoll.cli.launcher import must_be_writable
from lossycoll.cli.plotting import drawn
from lossycoll.errors import OptionError
from lossycoll.simulate.recorded import load
from lossycoll.simulate.threshold import Choice, Cut

from .prediction import predict
from .text import head, remarks, table

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
    if options.picture is not None:
        if options.picture.suffix.lower() != ".png":
            raise OptionError(f"--picture {options.picture}: not a .png; pictures are PNG")
        must_be_writable(options.picture)
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
    """What ``--json`` prints; ``threshold`` is null if dropping does not pay."""
    return {
        "threshold": choice.threshold if math.isfinite(choice.threshold) else None,
        "drop_rate": choice.drop_rate,
        "speedup": choice.speedup,
        "curve": [dataclasses.asdict(point) for point in choice.curve],
    }
