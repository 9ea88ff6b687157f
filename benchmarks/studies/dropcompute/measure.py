"""DropCompute, measured: ``python -m benchmarks.studies.dropcompute.measure --report docs``.

4 ranks on this machine train the demo's byte-level GPT with 12 micro-batches a step, each of which
takes as long as the paper's simulated delay says. Every run is appended to a file when it is done;
what is done is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.results import ROOT, append_entry, commit, entries, in_time
from lossycoll.cli.launcher import LaunchError, launch

from .runs import RANKS, WAYS, Budget, Run, planned

NAME = "dropcompute"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.studies.{NAME}.measure", description=__doc__
    )
    add = parser.add_argument
    add("--results", type=Path, default=ROOT / "benchmarks" / "studies" / NAME / "results.jsonl")
    add("--report", type=Path, help=f"folder of {NAME}.md, for the table, the JSON and the picture")
    add("--steps", type=int, default=Budget.steps)
    add("--warm-up", type=int, default=Budget.warm_up, help="steps in which nothing is dropped")
    add("--mean", type=float, default=Budget.mean, help="seconds of a micro-batch, on average")
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--seed", type=int, default=Budget.seed)
    add("--limit-minutes", type=float, default=0, help="start no more after so long (no limit)")
    add("--way", action="append", choices=WAYS, help="only this way; may be repeated")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        budget = Budget(
            steps=options.steps,
            warm_up=options.warm_up,
            mean=options.mean,
            width=options.width,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    wanted = [run for run in planned(budget) if not options.way or run.way in options.way]
    done = load(options.results)
    left = [run for run in wanted if run not in done]
    for run in in_time(left, options.limit_minutes):
        console.print(f"delays times {run.factor:g}, {run.way} ...", markup=False)
        try:
            done[run] = measure(run)
        except LaunchError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            return 1
        append_entry(options.results, done[run])
    if options.report:
        from .report import write

        try:
            print(write([done[run] for run in wanted if run in done], options.report))
        except ValueError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            return 1
    return 0


def load(path: Path) -> dict[Run, dict[str, Any]]:
    """The entries of a results file by run; none where there is no file."""
    return {Run.of(entry["run"]): entry for entry in entries(path)}


def measure(run: Run) -> dict[str, Any]:
    """One training. Raises LaunchError where a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        launch(
            f"benchmarks.studies.{NAME}.rank",
            {"run": run.as_dict()},
            ranks=RANKS,
            folder=Path(folder),
            environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            on_event=lambda event: None,
        )
        ranks = json.loads((Path(folder) / "ranks.json").read_text(encoding="utf-8"))
    first = ranks[0]
    return {
        "run": run.as_dict(),
        "commit": commit(f"studies/{NAME}"),
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


if __name__ == "__main__":
    sys.exit(main())
