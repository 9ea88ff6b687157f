"""Measures one cell, where need be in the laboratory."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.lab_job import run_job
from lossycoll.lab.laboratory import Lab

from .cells import HOSTS, Cell

ROUNDS = 7
LIMIT_SECONDS = 40.0
"""Of one training; a variant that takes longer is cut off there."""
JOB_SECONDS = 240.0


def measure(cell: Cell, options: argparse.Namespace) -> Any:
    """Measures one cell. Raises LossyError where a rank fails."""
    if cell.kind == "speed":
        from .speed import measure_speed

        return measure_speed()
    if cell.kind == "forms":
        from .forms import measure_forms

        return measure_forms()
    config = {
        "what": cell.kind,
        "variants": list(cell.variants),
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
