"""One host of the benchmark: ``python -m benchmarks.wire.rank CONFIG OUT``.

CONFIG is JSON: sizes in MiB, ways, rounds of each way. The ways take turns, and the order turns
around each time. OUT gets this rank's seconds by size and way, and what was missing.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll

SCOPES: dict[str, Any] = {
    "lossy": lambda: lossycoll.lossy(repair=0),
    "repair": lambda: lossycoll.lossy(repair=1),
    "reliable": lossycoll.reliable,
    "gloo": contextlib.nullcontext,
}


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    gloo = dist.new_group(backend="gloo")
    out = [measure(mib, config, gloo) for mib in config["mib"]]
    Path(f"{sys.argv[2]}.{dist.get_rank()}").write_text(json.dumps(out))
    dist.destroy_process_group()


def measure(mib: float, config: dict[str, Any], gloo: dist.ProcessGroup) -> dict[str, Any]:
    tensor = torch.empty(int(mib * (1 << 18)))
    seconds: dict[str, list[float]] = {way: [] for way in config["ways"]}
    missing: dict[str, list[float]] = {way: [] for way in config["ways"]}
    for number in range(max(config["rounds"].values())):
        order = config["ways"] if number % 2 == 0 else config["ways"][::-1]
        for way in order:
            if number >= config["rounds"][way]:
                continue
            tensor.fill_(1.0)
            with lossycoll.reliable():
                dist.barrier()
            started = time.perf_counter()
            with SCOPES[way]():
                dist.all_reduce(tensor, group=gloo if way == "gloo" else None)
            seconds[way].append(time.perf_counter() - started)
            report = lossycoll.last_report()
            if way != "gloo" and report is not None:
                packets = report.packets_received + report.packets_missing
                missing[way].append(report.packets_missing / packets if packets else 0.0)
    return {"seconds": seconds, "missing": missing}


if __name__ == "__main__":
    main()
