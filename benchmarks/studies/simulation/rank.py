"""One rank of the job: ``python -m benchmarks.studies.simulation.rank CONFIG OUT``.

CONFIG is JSON: elements, calls, gap (seconds before each call). OUT.RANK gets each call's begin,
end, packets missing and packets received.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lossycoll


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    tensor = torch.ones(config["elements"])
    calls = []
    for _ in range(config["calls"]):
        begin = agreed_begin(config["gap"])
        time.sleep(max(0.0, begin - time.monotonic()))
        begun = time.monotonic()
        dist.all_reduce(tensor)
        report = lossycoll.last_report()
        calls.append((begun, time.monotonic(), report.packets_missing, report.packets_received))
    Path(f"{sys.argv[2]}.{dist.get_rank()}").write_text(json.dumps(calls))
    dist.barrier()
    dist.destroy_process_group()


def agreed_begin(gap: float) -> float:
    """Return the same time on all ranks: hosts of a laboratory share one clock."""
    begin = torch.zeros(1, dtype=torch.float64)
    with lossycoll.reliable():
        dist.barrier()
        begin.fill_(time.monotonic() + gap)
        dist.broadcast(begin, 0)
    return float(begin)


if __name__ == "__main__":
    main()
