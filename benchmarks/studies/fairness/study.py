"""Who gets how much of a link: ``python -m benchmarks fairness --report docs``.

Two hosts of the laboratory (``lossycoll lab check``), one link, full in both directions: two jobs
of which the second begins later, and a job beside one TCP flow, with cubic and with bbr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.common.lab_job import run_job
from benchmarks.common.results import ROOT
from benchmarks.common.runner import Study, one_by_one
from lossycoll.errors import LossyError
from lossycoll.lab import Lab
from lossycoll.lab.network import Link, Network, Port

from .contests import CONTESTS, LATER, MBIT, QUEUE_MS, RTT_MS, Contest

JOB = "benchmarks.studies.fairness.job"
ELEMENTS = 1 << 19
TCP_PORT = 29500


def measure(contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a contest. Raises LossyError where a process fails."""
    seconds: float = options.seconds
    port = Port(up_mbit=MBIT, down_mbit=MBIT, queue_ms=QUEUE_MS)
    network = Network(hosts=2, link=Link(loss=contest.loss, delay_ms=RTT_MS / 2), port=port)
    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab:
        outs = [Path(folder) / name for name in ("first", "second")]
        failed: list[LossyError] = []

        def job(out: Path, length: float, master_port: int) -> None:
            config = {"elements": ELEMENTS, "seconds": length}
            environment = {"MASTER_PORT": str(master_port)}
            try:
                run_job(lab, JOB, config, 60 + 2 * length, environment, out=out)
            except LossyError as error:
                failed.append(error)

        first = threading.Thread(target=job, args=(outs[0], LATER + seconds, 29400))
        first.start()
        begun = Path(f"{outs[0]}.begun")
        while first.is_alive() and not begun.exists():
            first.join(0.1)
        first.join(LATER)
        if contest.beside == "job":
            job(outs[1], seconds, 29401)
        else:
            tcp(lab, contest.beside, seconds, outs[1])
        first.join()
        if failed:
            raise failed[0]
        samples = [json.loads(out.read_text()) for out in outs]
        counters = lab.counters()
    dropped = sum(host.up.dropped + host.down.dropped for host in counters.hosts)
    offered = sum(link.offered for link in counters.links.values())
    return {"samples": samples, "queue_drops": dropped / offered}


def tcp(lab: Lab, control: str, seconds: float, out: Path) -> None:
    flow = [sys.executable, "-m", "benchmarks.studies.fairness.flow"]
    where = {"PYTHONPATH": str(ROOT)}
    receiver = lab.start(1, [*flow, "receive", str(TCP_PORT), str(out)], where)
    config = {"address": lab.address(1), "control": control, "seconds": seconds}
    sender = lab.start(0, [*flow, "send", str(TCP_PORT), json.dumps(config)], where)
    for process in (sender, receiver):
        if process.wait(60 + seconds):
            raise LossyError(f"the TCP flow with {control} failed")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=25.0, help="of sharing, per contest")


STUDY = Study(
    name="fairness",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: CONTESTS,
    measuring=one_by_one(measure),
    report_help="folder of congestion-results.md, for the table, sharing.json and sharing.png",
)
