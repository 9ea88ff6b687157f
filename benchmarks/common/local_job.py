"""A benchmark's ranks as one job on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common.results import ROOT
from lossycoll.cli.launcher import launch, scratch


def run_job(
    module: str,
    config: Mapping[str, object],
    ranks: int,
    show: Callable[[dict[str, Any]], None] = lambda event: None,
) -> list[dict[str, Any]]:
    """Runs ``module`` on all ranks, one thread of torch's each, and returns their events."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    events: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        show(event)
        events.append(event)

    with scratch("lossycoll-benchmark-") as folder:
        launch(
            module,
            config,
            ranks=ranks,
            folder=folder,
            environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LOSSYCOLL_LOG": "warning"},
            on_event=take,
        )
    return events
