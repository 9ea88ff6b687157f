"""DropCompute, measured: ``python -m benchmarks dropcompute --report docs``.

4 ranks on this machine train the demo's byte-level GPT with 12 micro-batches a step, each of which
takes as long as the paper's simulated delay says.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT
from benchmarks.common.runner import Study, one_by_one
from lossycoll.cli.launcher import launch

from .runs import RANKS, Budget, Run, planned


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """One training. Raises LaunchError where a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = launch(
            "benchmarks.studies.dropcompute.rank",
            {"run": run.settings},
            ranks=RANKS,
            folder=Path(folder),
            environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    first = ranks[0]
    return {
        "step_seconds": [round(seconds, 6) for seconds in first["step_seconds"]],
        "completed": first["completed"],
        "losses": first["losses"],
        "threshold": first["threshold"],
        "promised": first["promised"],
        # [step][rank][micro-batch]
        "laps": [
            [[round(lap, 6) for lap in rank["laps"][step]] for rank in ranks]
            for step in range(run.budget.steps)
        ],
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=Budget.steps)
    add("--warm-up", type=int, default=Budget.warm_up, help="steps in which nothing is dropped")
    add("--mean", type=float, default=Budget.mean, help="seconds of a micro-batch, on average")
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--seed", type=int, default=Budget.seed)


def plan(options: argparse.Namespace) -> list[Run]:
    return planned(
        Budget(
            steps=options.steps,
            warm_up=options.warm_up,
            mean=options.mean,
            width=options.width,
            seed=options.seed,
        )
    )


STUDY = Study(
    name="dropcompute",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=one_by_one(measure),
    reports_planned=True,
    report_help="folder of dropcompute.md, for the table, the JSON and the picture",
)
