"""What a group costs, lossy beside gloo: python -m benchmarks.micro.groups [--ranks 2,8,32]

In one job, ``new_group`` and its first all-reduce, turn by turn for each backend; threads and
descriptors of rank 0 before and after. ``init``: of a job for each backend, until its first
all-reduce has ended; ``import``: what of it is the import of the backend, which is compiled before,
as by pip (gloo is loaded with torch). Medians; rank 0's clock.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.local_job import run_job
from benchmarks.common.results import commit, machine
from benchmarks.common.tables import Table, add_report, write_json
from lossycoll import _autoload
from lossycoll.cli.launcher import EventWriter

BACKENDS = ("lossy", "gloo")
GROUPS = 7
TABLE = Table(
    "performance.md",
    "groups",
    "ranks | backend | `new_group`, s | threads more | descriptors more | init, s"
    " | of it the import | threads | descriptors",
    keys=2,
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of TABLE."""
    return [
        f"{row['ranks']}",
        row["backend"],
        f"{row['new_group_s']:.3g}",
        f"{row['threads']:.0f}",
        f"{row['descriptors']:.0f}",
        f"{row['init_s']:.2f}",
        f"{row['import_s']:.2f}",
        f"{row['init_threads']:.0f}",
        f"{row['init_descriptors']:.0f}",
    ]


def holdings() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def new_group(backend: str) -> tuple[float, int, int]:
    """Seconds until a new group's first all-reduce has ended; threads and descriptors more."""
    dist.barrier()
    threads, descriptors = holdings()
    begin = time.perf_counter()
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.ones(1000), group=group)
    seconds = time.perf_counter() - begin
    more = holdings()
    return seconds, more[0] - threads, more[1] - descriptors


def rank_main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    backend = config["backend"]
    before = holdings()
    begin = time.perf_counter()
    if backend == "lossy":
        _autoload.load()
    imported = time.perf_counter()
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(1000))
    row: dict[str, Any] = {
        "init_s": time.perf_counter() - begin,
        "import_s": imported - begin,
        "init_threads": holdings()[0] - before[0],
        "init_descriptors": holdings()[1] - before[1],
    }
    made = [new_group(backend) for _ in range(GROUPS)]
    row["new_group_s"] = statistics.median(seconds for seconds, _, _ in made)
    row["threads"] = statistics.median(threads for _, threads, _ in made)
    row["descriptors"] = statistics.median(descriptors for _, _, descriptors in made)
    if dist.get_rank() == 0:
        EventWriter(config["events"]).write(ranks=dist.get_world_size(), backend=backend, **row)
    dist.barrier()
    dist.destroy_process_group()


def measure(backend: str, ranks: int) -> dict[str, Any]:
    """The row of one job."""
    events = run_job("benchmarks.micro.groups", {"backend": backend}, ranks)
    return next(event for event in events if "init_s" in event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,8,32")
    parser.add_argument("--jobs", type=int, default=3, help="of each backend, in turn")
    parser.add_argument("--json", help="write the rows to this file as well")
    add_report(parser, TABLE.page)
    args = parser.parse_args()
    compileall.compile_dir(Path(_autoload.__file__).parent, quiet=1)
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        jobs = [measure(one, ranks) for _ in range(args.jobs) for one in BACKENDS]
        for backend in BACKENDS:
            mine = [job for job in jobs if job["backend"] == backend]
            names = [name for name in mine[0] if name not in ("ranks", "backend")]
            row = {name: statistics.median(job[name] for job in mine) for name in names}
            rows.append({"ranks": ranks, "backend": backend, **row})
            print(
                f"{ranks:3} ranks  {backend:5}  init {row['init_s']:.3f} s (import "
                f"{row['import_s']:.3f}, threads "
                f"+{row['init_threads']:.0f}, descriptors +{row['init_descriptors']:.0f})  "
                f"new_group {row['new_group_s']:.4f} s (threads +{row['threads']:.0f}, "
                f"descriptors +{row['descriptors']:.0f})",
                flush=True,
            )
    TABLE.report(args.report, list(map(cells, rows)))
    if args.json:
        write_json(Path(args.json), {"commit": commit(), "machine": machine(), "rows": rows})


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        main()
    else:
        rank_main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
