"""Clean wires: ``python -m benchmarks.studies.lossless.measure --report docs``.

Loopback needs nothing; veth needs root, or user namespaces, and ip, nft and ethtool (``lossycoll
lab check``); bare sockets need a C compiler. Every job is appended to a file when it is done; what
is done is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.results import ROOT, append_entry, commit, entries, in_time
from lossycoll.cli.argtypes import names, real, whole
from lossycoll.cli.launcher import LaunchError, launch
from lossycoll.errors import LossyError
from lossycoll.lab import Lab, Network
from lossycoll.runtime.membership.rendezvous import AUTO_MTU_MAX
from lossycoll.runtime.net.interfaces import mtu_of

from .cells import FLAT_OPERATIONS, PARTS, WIRES, Job, jobs
from .sockets import FOLDER, PROGRAM
from .summary import summarize

MODULE = "benchmarks.studies.lossless.rank"
JOB_SECONDS = 900.0
LO_ADDRESS = "127.0.0.1"
PORTS = (20_000, 30_000)
"""Below those that kernels give away by themselves."""
OFFLOADS = ("tso", "on", "gso", "on", "tx-udp-segmentation", "on")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.lossless.measure", description=__doc__
    )
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "studies" / "lossless" / "results.jsonl",
    )
    add("--report", type=Path, help="folder of performance.md, for tables, clean.json, clean.png")
    add("--part", type=names(PARTS), default=PARTS, help=f"of {', '.join(PARTS)} (all)")
    add("--wire", type=names(tuple(WIRES)), default=tuple(WIRES), help="of these (all)")
    add("--ranks", type=whole(2, 64), help="only jobs of so many ranks")
    add("--seconds", type=real(0.05), default=3.0, help="per collective and size (%(default)g)")
    add("--operations", type=whole(1, 10**9), default=FLAT_OPERATIONS, help="of memory")
    add("--limit-minutes", type=real(0), default=0.0, help="start no more after so long (no limit)")
    add("--again", action="store_true", help="run what is done, too; the later result counts")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    done = {} if options.again else load(options.results)
    left = [
        job
        for job in jobs()
        if job not in done
        and job.part in options.part
        and job.wire in options.wire
        and options.ranks in (None, job.ranks)
    ]
    for job in in_time(left, options.limit_minutes):
        try:
            entry = run(job, options.seconds, options.operations)
        except (LossyError, LaunchError) as error:
            console.print(f"{job.name}: {error}", markup=False)
            return 1
        append_entry(options.results, entry)
        console.print(f"{job.name}: {entry['took']:.0f} s", markup=False)
    if options.report:
        from .report import write

        write(list(load(options.results).values()), options.report)
    return 0


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """The entries of a results file by job, the last of each; none where there is no file."""
    return {Job(**entry["job"]): entry for entry in entries(path)}


def build() -> None:
    """Makes raw_duplex, if it is older than its sources. Raises LossyError with what cc said."""
    sources = [FOLDER / "micro" / "raw_duplex.c", FOLDER / "micro" / "raw_ring.c"]
    newest = max(path.stat().st_mtime for path in [*sources, FOLDER / "micro" / "raw_end.h"])
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > newest:
        return
    PROGRAM.parent.mkdir(exist_ok=True)
    command = ["cc", "-std=c11", "-O3", "-march=native", "-o", str(PROGRAM), *map(str, sources)]
    try:
        built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise LossyError(f"bare sockets need a C compiler: {error}") from error
    if built.returncode:
        raise LossyError(f"{' '.join(command)} failed\n{built.stderr}")


def run(job: Job, seconds: float, operations: int) -> dict[str, Any]:
    """Measures one job. Raises LossyError or LaunchError where a rank fails."""
    if job.part == "raw":
        build()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lossycoll-clean-") as folder:
        config = {
            "part": job.part,
            "seconds": seconds,
            "raw_rounds": 5,
            "megabytes": 256,
            "operations": operations,
            "port": random.randrange(*PORTS, 100),
            "out": str(Path(folder) / "out"),
        }
        start = _on_loopback if job.wire == "lo" else _in_laboratory
        start(job, config, Path(folder))
        ranks = [
            json.loads(Path(f"{config['out']}.{rank}").read_text(encoding="utf-8"))
            for rank in range(job.ranks)
        ]
    return {
        "job": job.as_dict(),
        "commit": commit("studies/lossless"),
        "date": time.strftime("%Y-%m-%d"),
        "took": time.monotonic() - begin,
        "found": summarize(job.part, ranks),
    }


def _on_loopback(job: Job, config: dict[str, Any], folder: Path) -> None:
    config = {**config, "addresses": [LO_ADDRESS] * 2, "mtu": min(mtu_of("lo"), AUTO_MTU_MAX)}
    launch(
        MODULE,
        config,
        ranks=job.ranks,
        folder=folder / "ranks",
        environment={"PYTHONPATH": str(ROOT), "LOSSYCOLL_LOG": "warning"},
        on_event=lambda event: None,
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


if __name__ == "__main__":
    sys.exit(main())
