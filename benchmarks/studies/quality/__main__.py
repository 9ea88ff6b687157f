"""Losing packets and the trained model: ``python -m benchmarks.studies.quality --report docs``.

The ranks are processes on this machine, over loopback. docs/quality.md says what the runs are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import Study

from .matrix import FULL_SEEDS, Run, runs
from .measure import measuring


def arguments(parser: argparse.ArgumentParser) -> None:
    help_seeds = f"runs of each kind (6); those beyond {FULL_SEEDS} only of what has a goal"
    parser.add_argument("--seeds", type=int, default=6, help=help_seeds)
    parser.add_argument(
        "--steps", type=int, help="of each run, to try something out; not for the study"
    )


def plan(options: argparse.Namespace) -> list[Run]:
    return list(runs(range(1, options.seeds + 1)))


def report(results: Sequence[Result], folder: Path) -> None:
    from .report import write

    write({result.key: result for result in results}, folder)


STUDY = Study(
    name="quality",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=measuring,
    alike=lambda run: (run.task, run.world),
    failures_allowed=3,
    report=report,
    report_help="folder of quality.md, for tables, plots and quality.json",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return runner.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(main())
