"""Time to a validation loss on bad networks: ``python -m benchmarks.studies.time_to_loss.measure
--report docs``.

The demo's model is trained by 4 ranks in networks of the laboratory: by DDP over this backend as it
is, with DriftBound and two rounds of resending, by ShardedOptimizer, and by DDP over gloo, over TCP
with cubic and with bbr. All see the same data in the same order. Needs the laboratory (``lossycoll
lab check``). Every run is appended to a file when it is done; what is done is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import tcp
from benchmarks.common.lab_job import JobTimeout, run_job
from benchmarks.common.results import ROOT, append_entry, commit, entries, in_time
from lossycoll.errors import LossyError
from lossycoll.lab.laboratory import Lab

from .runs import PROFILES, WAYS, Budget, Run, runs

START_SECONDS = 300.0
"""For starting, judging and ending, beside the training."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.time_to_loss.measure", description=__doc__
    )
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "studies" / "time_to_loss" / "results.jsonl",
    )
    add("--report", type=Path, help="folder of performance.md; the README is beside it")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=Budget.steps)
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--batch", type=int, default=Budget.batch, help="windows of 64 bytes per rank and step")
    add("--limit", type=float, default=Budget.limit, help="seconds of training for a run")
    add("--limit-minutes", type=float, default=0, help="start no more after so long (no limit)")
    add("--profile", action="append", choices=PROFILES, help="only this network; may be repeated")
    add("--way", action="append", choices=WAYS, help="only this way; may be repeated")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        wanted = list(chosen(options))
    except ValueError as error:
        parser.error(str(error))
    done = load(options.results)
    left = [one for one in wanted if one not in done]
    for one in in_time(left, options.limit_minutes):
        console.print(f"{one.profile}, {one.way}, seed {one.seed} ...", markup=False)
        try:
            entry = measure(one)
        except LossyError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            return 1
        append_entry(options.results, entry)
        done[one] = entry
        spent, steps, loss = entry["curve"][-1]
        console.print(f"  {steps} steps in {spent:.1f} s, loss {loss:.4f}", markup=False)
    if options.report:
        from .report import write

        try:
            print(write([done[one] for one in wanted if one in done], options.report))
        except ValueError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            return 1
    return 0


def chosen(options: argparse.Namespace) -> list[Run]:
    """The runs that are asked for, as far as this kernel can. Raises ValueError for bad ones."""
    if len(set(options.seeds)) < len(options.seeds) or min(options.seeds) < 0:
        raise ValueError(f"seeds are {options.seeds}, wanted different numbers from 0")
    budget = Budget(options.steps, options.width, options.batch, options.limit)
    known = tcp.controls()
    ways = [way for way in options.way or WAYS if WAYS[way].control in ("", *known)]
    return list(runs(options.seeds, options.profile or PROFILES, ways, budget))


def load(path: Path) -> dict[Run, dict[str, Any]]:
    """The entries of a results file by run; none where there is no file."""
    return {Run.of(entry["run"]): entry for entry in entries(path)}


def measure(run: Run) -> dict[str, Any]:
    """One training. Raises LabError without a laboratory, LossyError where a rank fails."""
    way = WAYS[run.way]
    config = {
        "train": asdict(run.config()),
        "control": way.control,
        "limit": run.budget.limit,
    }
    seconds = START_SECONDS + 1.5 * run.budget.limit
    with tempfile.TemporaryDirectory() as folder, Lab(run.profile) as lab:
        out = Path(folder) / "curve"
        try:
            run_job(
                lab, "benchmarks.studies.time_to_loss.rank", config, out, seconds, way.environment
            )
        except JobTimeout:
            if not out.exists():
                raise
            # Ten steps took longer than all were to take: that, too, is a result.
        counters = lab.counters()
        curve = json.loads(out.read_text())
    links, hosts = counters.links.values(), counters.hosts
    return {
        "run": run.as_dict(),
        "commit": commit("studies/time_to_loss"),
        "curve": curve,
        "network": {
            "packets": sum(link.offered for link in links),
            "lost": sum(link.lost for link in links),
            "queues": sum(host.up.dropped + host.down.dropped for host in hosts),
            "unasked": sum(host.unasked for host in hosts),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
