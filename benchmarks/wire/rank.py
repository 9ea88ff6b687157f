"""One host of the benchmark: ``python -m benchmarks.wire.rank CONFIG OUT``.

CONFIG is JSON: sizes in MiB, ways, rounds of each way. The ways take turns, and the order turns
around each time. OUT gets this rank's seconds by size and way, and what was missing.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from lossycoll.gloo import borrow, connections

SCOPES: dict[str, Any] = {
    "lossy": lambda: lossycoll.lossy(repair=0),
    "repair": lambda: lossycoll.lossy(repair=1),
    "reliable": lossycoll.reliable,
    "gloo": contextlib.nullcontext,
    "gloo-bbr": contextlib.nullcontext,
}
SLOW_SECONDS = 5.0
"""A way that takes longer is measured once: the others would wait for it."""
CONTROL = {"gloo": "cubic", "gloo-bbr": "bbr"}


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    groups = {way: tcp_group(CONTROL[way]) for way in config["ways"] if way in CONTROL}
    out = [measure(mib, config, groups) for mib in config["mib"]]
    Path(f"{sys.argv[2]}.{dist.get_rank()}").write_text(json.dumps(out))
    dist.destroy_process_group()


def tcp_group(control: str) -> dist.ProcessGroup:
    """A gloo group of which the connections use this congestion control."""
    before = connections()
    group = dist.new_group(backend="gloo")
    dist.barrier(group=group)  # by now all are connected
    for number in connections().keys() - before.keys():
        with borrow(number) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    return group


def agreed(here: bool) -> bool:
    """Whether it is so on any rank."""
    flag = torch.tensor(float(here))
    with lossycoll.reliable():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def measure(
    mib: float, config: dict[str, Any], groups: dict[str, dist.ProcessGroup]
) -> dict[str, Any]:
    tensor = torch.empty(int(mib * (1 << 18)))
    seconds: dict[str, list[float]] = {way: [] for way in config["ways"]}
    missing: dict[str, list[float]] = {way: [] for way in config["ways"]}
    slow: set[str] = set()
    for number in range(max(config["rounds"].values())):
        order = config["ways"] if number % 2 == 0 else config["ways"][::-1]
        for way in order:
            if number >= config["rounds"][way] or way in slow:
                continue
            tensor.fill_(1.0)
            with lossycoll.reliable():
                dist.barrier()
            started = time.perf_counter()
            with SCOPES[way]():
                dist.all_reduce(tensor, group=groups.get(way))
            seconds[way].append(time.perf_counter() - started)
            report = lossycoll.last_report()
            if way not in groups and report is not None:
                packets = report.packets_received + report.packets_missing
                missing[way].append(report.packets_missing / packets if packets else 0.0)
            if way in groups and agreed(seconds[way][-1] > SLOW_SECONDS):
                slow.add(way)
    return {"seconds": seconds, "missing": missing}


if __name__ == "__main__":
    main()
