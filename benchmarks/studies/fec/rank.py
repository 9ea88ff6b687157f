"""One host of the laboratory: ``python -m benchmarks.studies.fec.rank CONFIG OUT``.

CONFIG is JSON: variants, elements, rounds. They take turns, and the order turns around each time.
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
    tensor = torch.empty(config["elements"])
    names = list(config["variants"])
    out: dict[str, Any] = {variant: {"seconds": [], "missing": []} for variant in names}
    for number in range(config["rounds"]):
        for variant in names if number % 2 == 0 else names[::-1]:
            tensor.fill_(1.0)
            with lossycoll.reliable():
                dist.barrier()
            started = time.perf_counter()
            with lossycoll.lossy(**config["variants"][variant]):
                dist.all_reduce(tensor)
            out[variant]["seconds"].append(time.perf_counter() - started)
            report = lossycoll.last_report()
            assert report is not None
            expected = report.packets_received + report.packets_missing
            out[variant]["missing"].append(report.packets_missing / expected)
    answer(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
