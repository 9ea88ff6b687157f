"""One host of the laboratory: ``python -m benchmarks.studies.fec.rank CONFIG OUT``.

CONFIG is JSON: arms, elements, rounds. The arms take turns, and the order turns around each time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lossycoll


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    tensor = torch.empty(config["elements"])
    arms = list(config["arms"])
    out: dict[str, Any] = {arm: {"seconds": [], "missing": []} for arm in arms}
    for number in range(config["rounds"]):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            tensor.fill_(1.0)
            with lossycoll.reliable():
                dist.barrier()
            started = time.perf_counter()
            with lossycoll.lossy(**config["arms"][arm]):
                dist.all_reduce(tensor)
            out[arm]["seconds"].append(time.perf_counter() - started)
            report = lossycoll.last_report()
            assert report is not None
            expected = report.packets_received + report.packets_missing
            out[arm]["missing"].append(report.packets_missing / expected)
    Path(f"{sys.argv[2]}.{dist.get_rank()}").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
