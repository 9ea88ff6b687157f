"""ARC-Top-K beside dense sums, PowerSGD and Top-K: ``python -m benchmarks arc_topk
--report docs``.

The compressor's own time; the energy that forms of matrices keep; a step of DDP on links of 100 and
1000 Mbit/s; what is learned at 100 Mbit/s, clean and at 10% loss. The last two need the laboratory
(``lossycoll lab check``). ``--only kind=long``: what is learned in 2,000 steps, beside PowerSGD in
as many bytes; an hour, without the laboratory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.common import local_job
from benchmarks.common.lab_job import run_job
from benchmarks.common.runner import PieceFailed, Study, batch_by_batch
from lossycoll.lab.laboratory import Lab

from .cells import LONG, Cell, batches, cells
from .long.tasks import STEPS
from .long.variants import WORLD

ROUNDS = 7
LIMIT_SECONDS = 40.0
"""Of one training; a variant that takes longer is cut off there."""
JOB_SECONDS = 240.0


def measure(cells: Sequence[Cell], options: argparse.Namespace) -> list[Any]:
    """Measures a batch. Raises LossyError or LaunchError where a rank fails."""
    del options
    if cells[0].kind == LONG:
        return train_long(cells, STEPS)
    return [measure_one(cell) for cell in cells]


def train_long(cells: Sequence[Cell], steps: int) -> list[dict[str, Any]]:
    """Long trainings of one task and one seed, one after another in one job on this machine.

    Raises LaunchError where a rank fails.
    """
    names = [name for cell in cells for name in cell.variants]
    config = {"task": cells[0].task, "seed": cells[0].seed, "steps": steps, "variants": names}
    events = local_job.run_job("benchmarks.studies.arc_topk.long.rank", config, WORLD)
    found = {event.pop("variant"): event for event in events}
    if list(found) != names:
        raise PieceFailed(f"ranks have reported {', '.join(found)}, wanted {', '.join(names)}")
    return list(found.values())


def measure_one(cell: Cell) -> Any:
    if cell.kind == "speed":
        from .speed import measure_speed

        return measure_speed()
    if cell.kind == "forms":
        from .forms import measure_forms

        return measure_forms()
    if cell.kind == "contraction":
        from .contraction import measure_contraction

        return measure_contraction()
    if cell.kind == "speedup":
        from .speedup import measure_speedup

        return measure_speedup(cell.seed, cell.task)
    config = {
        "what": cell.kind,
        "variants": list(cell.variants),
        "rounds": ROUNDS,
        "task": cell.task,
        "seed": cell.seed,
        "limit": LIMIT_SECONDS,
    }
    with Lab(cell.network) as lab:
        module = "benchmarks.studies.arc_topk.rank"
        ranks = run_job(lab, module, config, JOB_SECONDS, cell.environment)
    return steps(ranks) if cell.kind == "steps" else trained(ranks)


def steps(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By variant, for each step: seconds from the last begin to the last end, and bytes that a host
    sent."""
    return {
        variant: {
            "seconds": [
                max(end for _, end in step) - max(begin for begin, _ in step)
                for step in zip(*(rank["times"][variant] for rank in ranks), strict=True)
            ],
            "bytes": [
                sum(step) / len(step)
                for step in zip(*(rank["bytes"][variant] for rank in ranks), strict=True)
            ],
        }
        for variant in ranks[0]["times"]
    }


def trained(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By variant: (step, seconds, bytes that a host sent, loss, share of right answers)."""
    return {
        variant: [
            [first[0], first[1], sum(p[2] for p in points) / len(points), *first[3:]]
            for first, *others in zip(*(rank[variant] for rank in ranks), strict=True)
            for points in [[first, *others]]
        ]
        for variant in ranks[0]
    }


STUDY = Study(
    name="arc_topk",
    description=__doc__,
    plan=lambda options: list(cells()),
    measuring=batch_by_batch(measure),
    batches=batches,
    alike=lambda cell: cell.kind,
    report_help="folder of arc_topk.md, for tables and plots",
)
