"""Losing packets and the trained model: ``python -m benchmarks quality --report docs``.

The ranks are processes on this machine, over loopback. docs/quality.md says what the runs are.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.runner import Measure, Study

from .matrix import FULL_SEEDS, Run, runs
from .pool import Pool, RunFailed


@contextlib.contextmanager
def measuring(options: argparse.Namespace) -> Iterator[Measure[Run]]:
    """Yields what measures a batch of one run; raises RunFailed where a rank fails."""
    kept: dict[int, Pool] = {}

    def measure(batch: Sequence[Run]) -> list[Any]:
        (run,) = batch
        for world in [world for world in kept if world != run.world]:
            kept.pop(world).close()  # idle ranks would still hold their memory
        if run.world not in kept:
            kept[run.world] = Pool(run.world)
        try:
            return [kept[run.world].run(run, options.steps)]
        except RunFailed:
            kept.clear()
            raise

    try:
        yield measure
    finally:
        for pool in kept.values():
            pool.close()


def arguments(parser: argparse.ArgumentParser) -> None:
    help_seeds = f"runs of each kind (6); those beyond {FULL_SEEDS} only of what has a goal"
    parser.add_argument("--seeds", type=int, default=6, help=help_seeds)
    parser.add_argument(
        "--steps", type=int, help="of each run, to try something out; not for the study"
    )


def plan(options: argparse.Namespace) -> list[Run]:
    return list(runs(range(1, options.seeds + 1)))


STUDY = Study(
    name="quality",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=measuring,
    alike=lambda run: (run.task, run.world),
    failures_allowed=3,
    report_help="folder of quality.md, for tables, plots and quality.json",
)
