"""The median time of small calls, lossy beside gloo in the same processes.

Run: python -m benchmarks.micro.small_calls [--ranks 2,4] [--sizes 4096,1048576] [--json FILE]

Rank 0's calls are timed one by one. The backends take turns, a block of calls each, so that both
meet the same machine; the order within a round alternates. A call's time includes the wait for its
result, and no barrier comes between two calls: as in a loop of training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.local_job import run_job
from benchmarks.common.report import write_json
from benchmarks.common.results import commit, machine
from lossycoll.cli.launcher import EventWriter

BACKENDS = ("lossy", "gloo")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
BLOCK = 40
ROUNDS = 15
WARM = 20


def call_of(name: str, elements: int, world: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """One call of a collective whose largest tensor has ``elements`` float32 elements."""
    whole = torch.ones(elements // world * world)
    part = torch.ones(elements // world)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole.fill_(1.0), group=group)
    if name == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    return lambda: dist.barrier(group=group)


def block(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of ``calls`` calls."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def measure(world: int, size: int, groups: dict[str, dist.ProcessGroup]) -> list[dict[str, Any]]:
    rows = []
    for name in COLLECTIVES:
        if name == "barrier" and size != 4096:
            continue
        calls = {one: call_of(name, size // 4, world, groups[one]) for one in BACKENDS}
        times: dict[str, list[float]] = {one: [] for one in BACKENDS}
        for one in BACKENDS:
            block(calls[one], WARM)
        for turn in range(ROUNDS):
            for one in BACKENDS if turn % 2 else BACKENDS[::-1]:
                dist.barrier(groups["gloo"])
                times[one] += block(calls[one], BLOCK if size <= 65536 else BLOCK // 4)
        p50 = {one: statistics.median(times[one]) * 1e6 for one in BACKENDS}
        rows.append(
            {
                "ranks": world,
                "collective": name,
                "bytes": size,
                "lossy_us": round(p50["lossy"], 1),
                "gloo_us": round(p50["gloo"], 1),
                "gloo_over_lossy": round(p50["gloo"] / p50["lossy"], 2),
            }
        )
    return rows


def rank_main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    assert dist.group.WORLD is not None
    groups = {"lossy": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    report = EventWriter(config["events"]) if dist.get_rank() == 0 else None
    for size in config["sizes"]:
        for row in measure(dist.get_world_size(), size, groups):
            if report is not None:
                report.write(**row)
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    if "collective" in row:
        print(
            f"{row['ranks']} ranks  {row['collective']:14} {row['bytes']:>8} B  "
            f"lossy {row['lossy_us']:>8} us  gloo {row['gloo_us']:>8} us  "
            f"gloo/lossy {row['gloo_over_lossy']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="4096,1048576", help="bytes")
    parser.add_argument("--json", help="write the rows to this file as well")
    args = parser.parse_args()
    config = {"sizes": [int(size) for size in args.sizes.split(",")]}
    events: list[dict[str, Any]] = []
    for world in map(int, args.ranks.split(",")):
        events += run_job("benchmarks.micro.small_calls", config, world, show)
    if args.json:
        rows = [row for row in events if "collective" in row]
        write_json(Path(args.json), {"commit": commit(), "machine": machine(), "rows": rows})


if __name__ == "__main__":
    if os.environ.get("RANK") is None:
        main()
    else:
        rank_main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
