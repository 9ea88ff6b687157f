"""DropCompute, measured: ``python -m benchmarks dropcompute --report docs``.

4 ranks on this machine train the demo's byte-level GPT with 12 micro-batches a step, each of which
takes as long as the paper's simulated delay says.
"""

from __future__ import annotations

import argparse

from benchmarks.common.runner import Study, one_by_one

from .measure import measure
from .runs import Budget, Run, planned


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
