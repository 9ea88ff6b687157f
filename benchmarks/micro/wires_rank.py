"""A rank of benchmarks.micro.wires: ``python -m benchmarks.micro.wires_rank CONFIG OUT``.

CONFIG is JSON: a size in MiB, wires by name, rounds, and how many of a wire run in a row. Wires
take turns, and the order turns around each time. OUT.RANK gets what was measured, in order.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.lab_job import answer


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    names = list(config["wires"])
    draws = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randn(int(config["mib"] * (1 << 18)), generator=draws)
    found: list[dict[str, Any]] = []
    for turn in range(config["rounds"]):
        for name in names if turn % 2 == 0 else names[::-1]:
            for nth in range(config["each"]):
                tensor = data.clone()
                with lossycoll.reliable():
                    dist.barrier()
                before = lossycoll.stats().bytes_sent
                began = time.monotonic()
                with lossycoll.reliable(**config["wires"][name]):
                    dist.all_reduce(tensor)
                span = (began, time.monotonic())
                sent = lossycoll.stats().bytes_sent - before
                found.append({"wire": name, "nth": nth, "time": span, "sent": sent})
    answer(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
