"""A model trained by eight peers at home: ``python -m benchmarks swarm --report docs``.

The demo's model is trained by a swarm of eight over the laboratory's ``home``: without faults, and
with two peers killed and two that join. With --hivemind PYTHON, an interpreter that imports
hivemind, by that as well. Needs the laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.common import tcp, training
from benchmarks.common.runner import Study, one_by_one

from .measure import measure
from .runs import HIVEMIND, VARIANTS, Budget, Run, runs

HOW_TO = "python -m venv hm; hm/bin/pip install hivemind torch; --hivemind hm/bin/python"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=Budget.steps, help="of each peer (%(default)s)")
    add("--every", type=int, default=Budget.every, help="steps from round to round (%(default)s)")
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--batch", type=int, default=Budget.batch, help="windows of 64 bytes per peer and step")
    add("--limit", type=float, default=Budget.limit, help="seconds of training for a run")
    add("--hivemind", default="", metavar="PYTHON", help="an interpreter that imports hivemind")


def plan(options: argparse.Namespace) -> list[Run]:
    """What can be run here of what is asked for; what is only reported needs no hivemind."""
    training.check_seeds(options.seeds)
    budget = Budget(options.steps, options.every, options.width, options.batch, options.limit)
    known = ("", *tcp.allowed())
    without = () if getattr(options, "report_only", False) else missing(options.hivemind)
    variants = [
        name
        for name, variant in VARIANTS.items()
        if variant.control in known and variant.by not in without
    ]
    return list(runs(options.seeds, variants, budget))


def missing(python: str) -> tuple[str, ...]:
    """Who can't average here; says so."""
    if not python:
        print(f"hivemind is left out; to have it: {HOW_TO}", file=sys.stderr)
        return (HIVEMIND,)
    try:
        tried = subprocess.run(
            [python, "-c", "import hivemind"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ValueError(f"--hivemind {python}: {error.strerror}") from error
    if tried.returncode:
        last = tried.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"--hivemind {python} can't import hivemind: {last}; {HOW_TO}")
    return ()


STUDY = Study(
    name="swarm",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=one_by_one(measure),
    alike=lambda run: run.variant,
    report_help="folder of moshpit.md",
)
