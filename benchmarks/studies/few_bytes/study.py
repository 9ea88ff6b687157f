"""Bytes against loss of pseudo-gradients: ``python -m benchmarks few_bytes --report docs``.

Eight peers train the demo's model over loopback, with an outer optimizer: plain DiLoCo in float32,
and with few bits and fragments, at 10, 30 and 100 local steps. Needs a network namespace.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.common import training
from benchmarks.common.runner import PieceFailed, Study, one_by_one

from .runs import EVERY, VARIANTS, Budget, Run, runs


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--every", type=int, nargs="+", default=list(EVERY), help="steps from round to round")
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--steps", type=int, default=Budget.steps, help="of each peer (%(default)s)")
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--batch", type=int, default=Budget.batch, help="windows of 64 bytes per peer and step")
    add("--limit", type=float, default=Budget.limit, help="seconds for a run")


def plan(options: argparse.Namespace) -> list[Run]:
    """What is asked for, the goal's runs first."""
    training.check_seeds(options.seeds)
    budget = Budget(options.steps, options.width, options.batch, options.limit)
    return list(runs(options.seeds, options.variants, options.every, budget))


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """One run, in a process and a network namespace of its own."""
    del options
    python = [sys.executable, "-m", "benchmarks.studies.few_bytes.training"]
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        done = subprocess.run(
            [*inside, *python, json.dumps(run.settings)],
            capture_output=True,
            text=True,
            timeout=run.budget.limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PieceFailed(f"it took more than {run.budget.limit:g} s") from error
    if done.returncode:
        raise PieceFailed(done.stderr.strip().rpartition("\n")[2])
    figures: dict[str, Any] = json.loads(done.stdout)
    if figures["failed"]:
        raise PieceFailed(f"{figures['failed']} rounds failed")
    return figures


STUDY = Study(
    name="few_bytes",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=one_by_one(measure),
    alike=lambda run: (run.variant, run.every),
    report_help="folder of moshpit.md",
)
