"""One training by ranks on this machine."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT
from lossycoll.cli.launcher import launch

from .runs import RANKS, Run


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """One training. Raises LaunchError where a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        launch(
            "benchmarks.studies.dropcompute.rank",
            {"run": run.settings},
            ranks=RANKS,
            folder=Path(folder),
            environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            on_event=lambda event: None,
        )
        ranks = json.loads((Path(folder) / "ranks.json").read_text(encoding="utf-8"))
    first = ranks[0]
    return {
        "step_seconds": [round(seconds, 6) for seconds in first["step_seconds"]],
        "completed": first["completed"],
        "losses": first["losses"],
        "threshold": first["threshold"],
        "promised": first["promised"],
        # [step][rank][micro-batch]
        "laps": [
            [[round(lap, 6) for lap in rank["laps"][step]] for rank in ranks]
            for step in range(run.budget.steps)
        ],
    }
