"""Time to a validation loss on bad networks: ``python -m benchmarks time_to_loss --report
docs``.

The demo's model is trained in networks of the laboratory, by 4 ranks or by 8 at two sites: by DDP
over this backend as it is, with DriftBound, by ShardedOptimizer, and by
DDP over gloo, over TCP with cubic and with bbr. All see the same data in the same order. Needs the
laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse

from benchmarks.common import tcp, training
from benchmarks.common.runner import Study, one_by_one

from .measure import measure
from .runs import PROFILES, VARIANTS, Budget, Run, runs


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=Budget.steps)
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--batch", type=int, default=Budget.batch, help="windows of 64 bytes per rank and step")
    add(
        "--device",
        default="cpu",
        help="of the model, as cuda:0, which all hosts share; give --results a file of its own",
    )
    add("--limit", type=float, default=Budget.limit, help="seconds of training for a run")


def plan(options: argparse.Namespace) -> list[Run]:
    """What this kernel can run of what is asked for."""
    training.check_seeds(options.seeds)
    budget = Budget(options.steps, options.width, options.batch, options.limit)
    known = ("", *tcp.controls())
    variants = [name for name, variant in VARIANTS.items() if variant.control in known]
    return list(runs(options.seeds, PROFILES, variants, budget))


STUDY = Study(
    name="time_to_loss",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=one_by_one(measure),
    alike=lambda run: (run.profile, run.variant),
    reports_planned=True,
    report_help="folder of performance.md; the README is beside it",
)
