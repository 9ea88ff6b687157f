"""Point to point against gloo, between two ranks of this machine: python -m benchmarks.micro.p2p

A tensor goes to the other rank and back again; half of that time counts. Backends take turns, trip
by trip, so that a busy moment of the machine hits them alike. Rank 0's clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.common.local_job import run_job
from lossycoll.cli.bench.command import human, percentile
from lossycoll.cli.launcher import EventWriter

BACKENDS = ("lossy", "gloo")
SIZES = {4096: 1000, 65536: 500, 1 << 20: 200, 16 << 20: 40}
"""Trips by bytes."""
WARM_UP = 5


def trip(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds one way."""
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)
    return (time.perf_counter() - begin) / 2


def rank_main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    report = EventWriter(config["events"]) if dist.get_rank() == 0 else None
    for size, trips in SIZES.items():
        tensor = torch.zeros(size, dtype=torch.uint8)
        seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for number in range(trips + WARM_UP):
            for name in BACKENDS if number % 2 else reversed(BACKENDS):
                taken = trip(tensor, groups[name])
                if number >= WARM_UP:
                    seconds[name].append(taken)
        if report is not None:
            report.write(bytes=size, seconds=seconds)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print every trip instead of a table")
    options = parser.parse_args()
    events = run_job("benchmarks.micro.p2p", {}, 2)
    if options.json:
        print(json.dumps(events))
        return 0
    table = Table(title="one way, microseconds: p10, median, p90")
    for heading in ("bytes", *BACKENDS, "medians"):
        table.add_column(heading, justify="right")
    for event in events:
        parts = {
            name: [percentile(event["seconds"][name], part) * 1e6 for part in (0.1, 0.5, 0.9)]
            for name in BACKENDS
        }
        cells = [", ".join(f"{value:.0f}" for value in parts[name]) for name in BACKENDS]
        ratio = parts["gloo"][1] / parts["lossy"][1]
        table.add_row(human(event["bytes"]), *cells, f"{ratio:.2f} x gloo's speed")
    Console().print(table)
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) == 1 and arguments[0].endswith("config.json"):
        rank_main(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    else:
        sys.exit(main())
