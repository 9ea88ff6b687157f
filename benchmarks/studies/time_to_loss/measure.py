"""One training in the laboratory."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.lab_job import JobTimeout, run_job
from lossycoll.lab.laboratory import Lab

from .runs import VARIANTS, Run

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
            run_job(lab, RANK, config, out, seconds, variant.environment)
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
