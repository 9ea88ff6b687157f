"""The job that docs/monitor.md shows as a report: ``python -m benchmarks.micro.report_picture``.

Four ranks of this machine train for some 80 seconds. The link from rank 0 to rank 1 loses a fifth
of its packets, and rank 3 is stopped for 25 s. Keeps report.jsonl, the lines that the job writes
for `lossycoll report`, and draws report.png of it; ``--draw`` only draws.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import ROOT
from lossycoll.cli.report import MOST_CHARTS, charts_of, chosen, figure_of, read_files

RANKS: Final = 4
STOPPED: Final = 3
PAUSE: Final = (28.0, 53.0)
"""Seconds after the start at which that rank is stopped, and continues."""
SECONDS: Final = 80.0
COMPUTE: Final = 0.5
"""Seconds of a step besides its calls."""
NAME: Final = "report"
SETTINGS: Final = {
    "LOSSYCOLL_INJECT": "link=0-1:0.2,seed=7",
    "LOSSYCOLL_LINK": "udp",
    "LOSSYCOLL_LIVENESS": "60",
    "LOSSYCOLL_LOG": "warning",
    "LOSSYCOLL_MTU": "1500",
    "OMP_NUM_THREADS": "1",
}


def rank() -> None:
    """Trains until rank 0 says that the time is over."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import lossycoll

    dist.init_process_group("lossy")
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin, over = time.monotonic(), torch.zeros(1)
    while not over:
        time.sleep(COMPUTE)
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        over.fill_(dist.get_rank() == 0 and time.monotonic() - begin > SECONDS)
        with lossycoll.reliable():
            dist.broadcast(over, 0)
    dist.destroy_process_group()


def run(lines: Path) -> None:
    """The job, which writes its lines to a file."""
    lines.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    environment = {**os.environ, **SETTINGS, **place, "LOSSYCOLL_METRICS": str(lines)}
    command = [sys.executable, "-m", "benchmarks.micro.report_picture", "--rank"]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(number)})
        for number in range(RANKS)
    ]
    try:
        while not lines.exists():
            if any(one.poll() is not None for one in ranks):
                raise SystemExit("a rank ended before the first line")
            time.sleep(0.1)
        begin = time.monotonic()
        for after, what in zip(PAUSE, (signal.SIGSTOP, signal.SIGCONT), strict=True):
            time.sleep(max(0.0, begin + after - time.monotonic()))
            ranks[STOPPED].send_signal(what)
        for one in ranks:
            if one.wait(120):
                raise SystemExit(f"a rank ended with {one.returncode}")
    finally:
        for one in ranks:
            one.kill()


def shorten(lines: Path) -> None:
    """Leaves what the picture shows."""
    kept = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        for one in found["ranks"]:
            one["host"] = ""
            one["link"] = [
                {name: link[name] for name in ("rank", "loss", "missing")} for link in one["link"]
            ]
            names = ("packets_missing", "packets_received", "bytes_sent", "bytes_received")
            one["counters"] = {name: one["counters"][name] for name in names}
        kept.append(json.dumps(found, separators=(",", ":")))
    lines.write_text("\n".join(kept) + "\n", encoding="utf-8")
    lines.chmod(0o644)


def draw(lines: Path, path: Path) -> None:
    job = chosen(read_files([lines]), "")
    save(figure_of(plt, charts_of(job)[:MOST_CHARTS], job.seconds), path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs", help="(docs)")
    parser.add_argument("--draw", action="store_true", help="of the lines that are there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank()
        return
    lines = options.folder.resolve() / f"{NAME}.jsonl"
    if not options.draw:
        run(lines)
        shorten(lines)
    draw(lines, lines.with_suffix(".png"))


if __name__ == "__main__":
    main()
