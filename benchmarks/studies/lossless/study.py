"""Clean wires: ``python -m benchmarks lossless --report docs``.

Loopback needs nothing; veth needs root, or user namespaces, and ip, nft and ethtool (``lossycoll
lab check``); bare sockets need a C compiler.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT
from benchmarks.common.runner import Study, one_by_one
from lossycoll.cli.argtypes import real, whole
from lossycoll.cli.launcher import launch
from lossycoll.errors import LossyError
from lossycoll.lab import Lab, Network
from lossycoll.runtime.engine.payload import AUTO_MTU_MAX
from lossycoll.runtime.net.interfaces import mtu_of

from .cells import FLAT_OPERATIONS, WIRES, Job, jobs
from .sockets import MICRO, PROGRAM, SOURCES
from .summary import summarize

MODULE = "benchmarks.studies.lossless.rank"
JOB_SECONDS = 900.0
LO_ADDRESS = "127.0.0.1"
PORTS = (20_000, 30_000)
"""Below those that kernels give away by themselves."""
OFFLOADS = ("tso", "on", "gso", "on", "tx-udp-segmentation", "on")


def build() -> None:
    """Makes raw_duplex, if it is older than its sources. Raises LossyError with what cc said."""
    newest = max(path.stat().st_mtime for path in (*SOURCES, *MICRO.glob("raw*.h")))
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > newest:
        return
    PROGRAM.parent.mkdir(exist_ok=True)
    command = ["cc", "-std=c11", "-O3", "-march=native", "-o", str(PROGRAM), *map(str, SOURCES)]
    try:
        built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise LossyError(f"bare sockets need a C compiler: {error}") from error
    if built.returncode:
        raise LossyError(f"{' '.join(command)} failed\n{built.stderr}")


def measure(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one job. Raises LossyError or LaunchError where a rank fails."""
    if job.part == "raw":
        build()
    with tempfile.TemporaryDirectory(prefix="lossycoll-clean-") as folder:
        config = {
            "part": job.part,
            "seconds": options.seconds,
            "raw_rounds": 5,
            "megabytes": 256,
            "operations": options.operations,
            "port": random.randrange(*PORTS, 100),
            "out": str(Path(folder) / "out"),
        }
        start = _on_loopback if job.wire == "lo" else _in_laboratory
        start(job, config, Path(folder))
        ranks = [
            json.loads(Path(f"{config['out']}.{rank}").read_text(encoding="utf-8"))
            for rank in range(job.ranks)
        ]
    return summarize(job.part, ranks)


def _on_loopback(job: Job, config: dict[str, Any], folder: Path) -> None:
    config = {**config, "addresses": [LO_ADDRESS] * 2, "mtu": min(mtu_of("lo"), AUTO_MTU_MAX)}
    launch(
        MODULE,
        config,
        ranks=job.ranks,
        folder=folder / "ranks",
        environment={"PYTHONPATH": str(ROOT), "LOSSYCOLL_LOG": "warning"},
    )


def _in_laboratory(job: Job, config: dict[str, Any], folder: Path) -> None:
    """Hosts on the kernel's bridge, with the offloads that a kernel gives veth by itself: the
    laboratory switches them off, so that loss hits packets, but here nothing is lost."""
    mtu = WIRES[job.wire]
    with Lab(Network(hosts=job.ranks, mtu=mtu), backend="nft") as lab:
        for host in range(job.ranks):
            if lab.start(host, ["ethtool", "-K", "eth0", *OFFLOADS]).wait(30):
                raise LossyError(f"{job.name}: ethtool could not switch the offloads on")
        config = {**config, "addresses": [lab.address(0), lab.address(1)], "mtu": mtu}
        file = folder / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        ended = lab.run(
            [sys.executable, "-m", MODULE, str(file)],
            {"OMP_NUM_THREADS": "1", "LOSSYCOLL_LOG": "warning", "PYTHONPATH": str(ROOT)},
            timeout=JOB_SECONDS,
        )
    for rank in ended:
        if rank.code:
            raise LossyError(f"{MODULE}: the rank of host {rank.rank} failed\n{rank.output}")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=real(0.05), default=3.0, help="per collective and size (%(default)g)")
    add("--operations", type=whole(1, 10**9), default=FLAT_OPERATIONS, help="of memory")


STUDY = Study(
    name="lossless",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(jobs()),
    measuring=one_by_one(measure),
    alike=lambda job: job.part,
    report_help="folder of performance.md, for tables, clean.json and clean.png",
)
