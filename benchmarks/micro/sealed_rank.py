"""A rank of benchmarks.micro.sealed: ``python -m benchmarks.micro.sealed_rank CONFIG OUT``, where
CONFIG is JSON and OUT.RANK gets what was measured; or CONFIG alone, a file that names another for
what is measured.

The same processes have a group that seals nothing, and others that do, each with a socket and a
thread of its own, all of one MTU. They take turns, several calls in a row, of which the first
aren't counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.lab_job import answer
from lossycoll.cli.launcher import EventWriter

SECRET = "a secret of a benchmark"
WAYS = ("plain", "encrypt", "authenticate")


def groups_of(mtu: int) -> dict[str, dist.ProcessGroup]:
    """By way; each option that is written gives the group a host of its own."""
    found = {"plain": dist.new_group(pg_options=lossycoll.Options(link="udp", mtu=mtu))}
    os.environ["LOSSYCOLL_SECRET"] = SECRET
    for way in WAYS[1:]:
        options = lossycoll.Options(link="udp", mtu=mtu, seal=way)
        found[way] = dist.new_group(pg_options=options)
    return found


def measure(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of size, way, the call's number in its turn, and its begin and end (monotonic)."""
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    groups = groups_of(config["mtu"])
    found: list[dict[str, Any]] = []
    for size in config["sizes"]:
        data = torch.zeros(size // 4)
        for turn in range(config["rounds"]):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                for nth in range(config["each"]):
                    with lossycoll.reliable():
                        dist.barrier()
                        began = time.monotonic()
                        dist.all_reduce(data, group=groups[way])
                    found.append(
                        {"size": size, "way": way, "nth": nth, "time": (began, time.monotonic())}
                    )
    dist.destroy_process_group()
    return found


def main() -> None:
    if len(sys.argv) == 3:
        answer(measure(json.loads(sys.argv[1])))
        return
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = measure(config)
    EventWriter(config["events"]).write(rank=int(os.environ["RANK"]), found=found)


if __name__ == "__main__":
    main()
