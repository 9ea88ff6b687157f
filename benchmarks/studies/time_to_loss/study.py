"""Time to a validation loss on bad networks: ``python -m benchmarks time_to_loss --report
docs``.

The demo's model is trained in networks of the laboratory, by 4 ranks or by 8 at two sites: by DDP
over this backend as it is, with DriftBound, by ShardedOptimizer, and by
DDP over gloo, over TCP with cubic and with bbr. All see the same data in the same order. Needs the
laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import tcp, training
from benchmarks.common.lab_job import JobTimeout, run_job
from benchmarks.common.runner import Study, one_by_one
from lossycoll.lab.laboratory import Lab

from .runs import PROFILES, VARIANTS, Budget, Run, runs

RANK = "benchmarks.studies.time_to_loss.rank"
START_SECONDS = 300.0
"""For starting, judging and ending, beside the training."""


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """One training. Raises LabError without a laboratory, LossyError where a rank fails."""
    variant = VARIANTS[run.variant]
    config = {
        "train": asdict(run.config()),
        "control": variant.control,
        "limit": run.budget.limit,
        "device": options.device,
    }
    seconds = START_SECONDS + 1.5 * run.budget.limit
    with tempfile.TemporaryDirectory() as folder, Lab(run.profile) as lab:
        out = Path(folder) / "curve"
        try:
            run_job(lab, RANK, config, seconds, variant.environment, out=out)
        except JobTimeout:
            if not out.exists():
                raise
            # Ten steps took longer than all were to take: that, too, is a result.
        counters = lab.counters()
        curve = json.loads(out.read_text())
    links, hosts = counters.links.values(), counters.hosts
    return {
        "curve": curve,
        "network": {
            "packets": sum(link.offered for link in links),
            "bytes": sum(host.up.bytes for host in hosts),
            "lost": sum(link.lost for link in links),
            "queues": sum(host.up.dropped + host.down.dropped for host in hosts),
            "unasked": sum(host.unasked for host in hosts),
        },
    }


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
