"""Deadlines where paths change: ``python -m benchmarks deadlines --report docs`` (7
minutes).

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common.lab_job import run_job
from benchmarks.common.runner import Study, one_by_one
from lossycoll.errors import LossyError
from lossycoll.lab import Lab

from .scenarios import BY_NAME, SCENARIOS, Change, Scenario, Trial
from .summary import figures

SECONDS = 400.0
POLL_SECONDS = 0.005


def measure(trial: Trial, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a scenario."""
    scenario = BY_NAME[trial.scenario]
    return figures(run(scenario), [change.at for change in scenario.changes])


def run(scenario: Scenario) -> dict[str, Any]:
    """What each rank saw (``ranks``), when each change was made, and what the network dropped.

    Raises LabError without a laboratory, LossyError where a rank fails or a change never came.
    """
    config = {
        "elements": int(scenario.mib * (1 << 18)),
        "operations": scenario.operations,
        "incast": scenario.incast,
    }
    with tempfile.TemporaryDirectory() as folder, Lab(scenario.network) as lab:
        out = Path(folder) / "out"
        ended = threading.Event()
        changed: list[float] = []
        changer = threading.Thread(target=_change_all, args=(lab, scenario, out, ended, changed))
        changer.start()
        try:
            environment = {"LOSSYCOLL_LOG": "debug"}
            module = "benchmarks.studies.deadlines.rank"
            ranks = run_job(lab, module, config, SECONDS, environment, out=out)
        finally:
            ended.set()
            changer.join()
        counters = lab.counters()
    if len(changed) != len(scenario.changes):
        raise LossyError(f"{scenario.name}: only {len(changed)} of its changes were made")
    links, hosts = counters.links.values(), counters.hosts
    return {
        "ranks": ranks,
        "changed": changed,
        "network": {
            "packets": sum(link.offered for link in links),
            "lost": sum(link.lost for link in links),
            "queues": sum(h.up.dropped + h.down.dropped for h in hosts)
            + sum(link.queue.dropped for link in links),
            "unasked": sum(host.unasked for host in hosts),
        },
    }


def _change_all(
    lab: Lab, scenario: Scenario, out: Path, ended: threading.Event, changed: list[float]
) -> None:
    for change in scenario.changes:
        while _at(out) < change.at:
            if ended.wait(POLL_SECONDS):
                return
        ended.wait(change.after)
        changed.append(round(time.monotonic(), 6))
        _make(lab, change, out, ended)


def _at(out: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"{out}.at").read_text())
    return -1


def _make(lab: Lab, change: Change, out: Path, ended: threading.Event) -> None:
    if change.link is not None:
        lab.change(change.pair, **change.link)
        return
    process = int(Path(f"{out}.{change.host}.pid").read_text())
    # It may have failed by now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
        ended.wait(change.pause)
        os.kill(process, signal.SIGCONT)


STUDY = Study(
    name="deadlines",
    description=__doc__,
    plan=lambda options: [Trial(one.name) for one in SCENARIOS],
    measuring=one_by_one(measure),
    report_help="folder of deadlines.md, for the JSON, the table and the picture",
)
