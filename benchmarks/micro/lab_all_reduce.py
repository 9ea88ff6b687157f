"""All-reduces of lossy and gloo side by side, as a rank of a laboratory's job.

``lossycoll lab --hosts 4 --up-mbit 50 --down-mbit 50 --delay-ms 10 -- python -m
benchmarks.micro.lab_all_reduce`` prints a row: medians in a loop and after computing, over the
limit. The same processes have a group of each, which take turns. ``--report docs`` writes the row
into performance.md, into the table that ``--table`` names. Lossy's options are those of the
environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.tables import Table, add_report

TABLE = Table(
    "performance.md",
    "slow-links",
    "hosts | Mbit/s | lost | size | lossy, loop | gloo, loop | lossy, computing"
    " | gloo, computing | missing | load",
    keys=4,
)
SETTLE = 2
"""Calls of each backend and form that don't count."""


def compute(seconds: float) -> None:
    """Keeps the core busy."""
    end = time.monotonic() + seconds
    data = torch.ones(64, 64)
    while time.monotonic() < end:
        data @ data


def measure(
    groups: dict[str, dist.ProcessGroup], data: torch.Tensor, calls: int, busy_s: float
) -> dict[str, list[float]]:
    """Seconds of each call, of the slowest rank: a rank's time begins behind a barrier."""
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(SETTLE + calls):
        for name, group in groups.items():
            compute(busy_s)
            with lossycoll.reliable():
                dist.barrier()
            begin = time.monotonic()
            dist.all_reduce(data, group=group)
            found[name].append(time.monotonic() - begin)
    for times in found.values():
        slowest = torch.tensor(times[SETTLE:], dtype=torch.float64)
        with lossycoll.reliable():
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times[:] = slowest.tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=2, help="of a tensor (%(default)s)")
    parser.add_argument("--calls", type=int, default=7, help="that count (%(default)s)")
    parser.add_argument("--busy-ms", type=float, default=50, help="of computing (%(default)s)")
    parser.add_argument("--mbit", type=float, required=True, help="a port's, for the limit")
    parser.add_argument("--lost", default="0%", help="what the network loses, for the row (0%%)")
    parser.add_argument("--alone", action="store_true", help="without gloo, which loss holds up")
    parser.add_argument("--table", default=TABLE.name, help="of the page (%(default)s)")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    table = replace(TABLE, name=options.table)
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    assert dist.group.WORLD is not None
    groups = {"lossy": dist.group.WORLD}
    if not options.alone:
        groups["gloo"] = dist.new_group(backend="gloo")
    data = torch.zeros(round(options.mib * (1 << 18)))
    world = dist.get_world_size()
    limit = 2 * (world - 1) / world * data.nbytes * 8e-6 / options.mbit
    loop = measure(groups, data, options.calls, 0)
    before = lossycoll.stats()
    after = measure(groups, data, options.calls, 1e-3 * options.busy_ms)
    gone = lossycoll.stats()
    lost = gone.packets_missing - before.packets_missing
    share = torch.tensor([lost, lost + gone.packets_received - before.packets_received])
    with lossycoll.reliable():
        dist.all_reduce(share)
    if dist.get_rank() == 0:
        cells = [
            f"{1e3 * statistics.median(found[name]):.0f} ms, "
            f"{statistics.median(found[name]) / limit:.2f}"
            if name in found
            else "-"
            for found in (loop, after)
            for name in ("lossy", "gloo")
        ]
        missing = float(share[0] / share[1].clamp(min=1))
        row = [f"{world}", f"{options.mbit:g}", options.lost, f"{options.mib:g} MiB", *cells]
        row += [f"{missing:.2%}", f"{os.getloadavg()[0]:.0f}"]
        print(table.report(options.report, [row]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
