"""ARC-Top-K beside dense sums, PowerSGD and Top-K: ``python -m
benchmarks.studies.arc_topk.measure --report docs``.

The compressor's own time; the energy that forms of matrices keep; a step of DDP on links of 100 and
1000 Mbit/s; what is learned at 100 Mbit/s, clean and at 10% loss. The last two need the laboratory
(``lossycoll lab check``). Every piece is appended to a file when it is done; what is done is not
run again.
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

from benchmarks.common.lab_job import run_job
from benchmarks.common.results import ROOT, append_entry, commit, entries, in_time
from lossycoll.errors import LossyError
from lossycoll.lab.laboratory import Lab

from .cells import HOSTS, Cell, cells

ROUNDS = 7
LIMIT_SECONDS = 40.0
"""Of one training; a way that takes longer is cut off there."""
JOB_SECONDS = 240.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.arc_topk.measure", description=__doc__
    )
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "studies" / "arc_topk" / "results.jsonl",
    )
    add("--report", type=Path, help="folder of arc_topk.md, for tables and plots")
    add("--limit-minutes", type=float, default=0, help="start no more after so long (no limit)")
    add("--kind", action="append", choices=("speed", "forms", "steps", "train"))
    add("--pieces", type=int, help="at most so many")
    add("--only", default="", help="only pieces of whose names this is a part")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    done = load(options.results)
    kinds = options.kind or ("speed", "forms", "steps", "train")
    left = [cell for cell in cells() if cell not in done and cell.kind in kinds]
    wanted = [cell for cell in left if options.only in cell.name]
    for cell in in_time(wanted[: options.pieces], options.limit_minutes):
        try:
            entry = {
                "cell": cell.as_dict(),
                "commit": commit("studies/arc_topk"),
                "found": run(cell),
            }
        except LossyError as error:
            console.print(str(error), markup=False)
            return 1
        append_entry(options.results, entry)
        console.print(f"{cell.name}: done", markup=False)
    if options.report:
        from .report import write

        write(list(load(options.results).values()), options.report)
    return 0


def load(path: Path) -> dict[Cell, dict[str, Any]]:
    """The entries of a results file by cell; none where there is no file."""
    return {Cell.of(entry["cell"]): entry for entry in entries(path)}


def run(cell: Cell) -> Any:
    """Measures one cell. Raises LossyError where a rank fails."""
    if cell.kind == "speed":
        from .speed import measure as speed

        return speed()
    if cell.kind == "forms":
        from .forms import measure as forms

        return forms()
    config = {
        "what": cell.kind,
        "ways": list(cell.ways),
        "rounds": ROUNDS,
        "task": cell.task,
        "seed": cell.seed,
        "limit": LIMIT_SECONDS,
    }
    with tempfile.TemporaryDirectory() as folder, Lab(cell.network) as lab:
        out = Path(folder) / "out"
        run_job(lab, "benchmarks.studies.arc_topk.rank", config, out, JOB_SECONDS, cell.environment)
        ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(HOSTS)]
    return steps(ranks) if cell.kind == "steps" else trained(ranks)


def steps(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By way: seconds from where the last rank began to where the last one ended, and bytes that a
    host sent, for each step."""
    return {
        way: {
            "seconds": [
                max(end for _, end in step) - max(begin for begin, _ in step)
                for step in zip(*(rank["times"][way] for rank in ranks), strict=True)
            ],
            "bytes": [
                sum(step) / len(step)
                for step in zip(*(rank["bytes"][way] for rank in ranks), strict=True)
            ],
        }
        for way in ranks[0]["times"]
    }


def trained(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By way: (step, seconds, bytes that a host sent, loss, share of right answers)."""
    return {
        way: [
            [first[0], first[1], sum(p[2] for p in points) / len(points), *first[3:]]
            for first, *others in zip(*(rank[way] for rank in ranks), strict=True)
            for points in [[first, *others]]
        ]
        for way in ranks[0]
    }


if __name__ == "__main__":
    sys.exit(main())
