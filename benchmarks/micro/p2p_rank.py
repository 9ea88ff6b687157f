"""A rank of benchmarks.micro.p2p: ``python -m benchmarks.micro.p2p_rank CONFIG [OUT]``.

CONFIG is JSON, or a file of it: what is measured (trips and streams: bytes and how often), how many
messages a stream has, how many of them are in flight, and TCP's congestion control. Rank 0 writes
an event per measurement.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import tcp
from lossycoll.cli.launcher import EventWriter

BACKENDS = ("lossy", "gloo")
BLOCK, WARM_UP = 20, 3
"""Trips of a backend's turn, and those before them that don't count."""


def trip(tensors: list[torch.Tensor], depth: int, group: dist.ProcessGroup) -> float:
    """Seconds one way of a tensor that goes to the other rank and back again."""
    tensor = tensors[0]
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)
    return (time.perf_counter() - begin) / 2


def stream(tensors: list[torch.Tensor], depth: int, group: dist.ProcessGroup) -> float:
    """Seconds per message of a stream to the other rank, with ``depth`` of them in flight, until
    that has said that it has all."""
    end = torch.zeros(1)
    trip([end], 1, group)
    begin = time.perf_counter()
    post = dist.isend if dist.get_rank() == 0 else dist.irecv
    works: deque[Any] = deque()
    for tensor in tensors:
        if len(works) == depth:
            works.popleft().wait()
        works.append(post(tensor, 1 - dist.get_rank(), group=group))
    for work in works:
        work.wait()
    if dist.get_rank() == 0:
        dist.recv(end, 1, group=group)
    else:
        dist.send(end, 0, group=group)
    return (time.perf_counter() - begin) / len(tensors)


HOW = {"trips": trip, "streams": stream}


def measure(
    what: str, size: int, times: int, config: dict[str, Any], groups: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds per message, by backend. They take turns of some trips or one stream, and the order
    turns around each time. The first trips of a turn don't count: the other backend's threads
    are still at work then."""
    count, block = (config["messages"], 1) if what == "streams" else (1, BLOCK)
    tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for turn in range(-1, -(-times // block)):
        for name in BACKENDS if turn % 2 else reversed(BACKENDS):
            taken = [
                HOW[what](tensors, config["depth"], groups[name])
                for _ in range(block + (WARM_UP if block > 1 else 0))
            ]
            if turn >= 0:
                seconds[name] += taken[-block:]
    return seconds


def main() -> None:
    given = sys.argv[1]
    config = json.loads(given if given.startswith("{") else Path(given).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    report = EventWriter(config.get("events") or sys.argv[2]) if dist.get_rank() == 0 else None
    for name in BACKENDS:
        trip([torch.zeros(1)], 1, groups[name])  # all are connected by now
    tcp.use(config["tcp"])
    for what in HOW:
        for size, times in config[what]:
            seconds = measure(what, size, times, config, groups)
            if report is not None:
                report.write(what=what, bytes=size, seconds=seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
