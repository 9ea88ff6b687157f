"""A benchmark's ranks on the hosts of a laboratory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.quality.store import ROOT
from lossycoll.errors import LossyError
from lossycoll.lab import Lab


def run_job(
    lab: Lab,
    module: str,
    config: Mapping[str, Any],
    out: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs ``python -m module CONFIG OUT`` on every host, one thread each, CONFIG as JSON.

    Raises LossyError with what a rank wrote when it fails, or takes longer than ``seconds``.
    """
    ended = lab.run(
        [sys.executable, "-m", module, json.dumps(config), str(out)],
        {
            "OMP_NUM_THREADS": "1",
            "LOSSYCOLL_LOG": "warning",
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        },
        timeout=seconds,
    )
    for rank in ended:
        if rank.code:
            raise LossyError(f"{module}: the rank of host {rank.rank} failed\n{rank.output}")
