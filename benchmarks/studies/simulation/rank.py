"""One rank of the job: ``python -m benchmarks.studies.simulation.rank CONFIG OUT``.

CONFIG is JSON: elements, calls, gap (seconds before each call). OUT.times is a file of zeros, a
double for each call and rank. OUT.RANK gets each call's begin, end, packets missing and packets
received.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

import lossycoll
from benchmarks.common.lab_job import answer


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = config["calls"], world
    times = np.memmap(f"{sys.argv[2]}.times", np.float64, mode="r+", shape=shape)
    tensor = torch.ones(config["elements"])
    calls = []
    for here in times:
        # Through a file: the network carries nothing but the calls. Hosts share one clock.
        here[rank] = time.monotonic()
        while not here.all():
            time.sleep(0.005)
        time.sleep(max(0.0, here.max() + config["gap"] - time.monotonic()))
        begun = time.monotonic()
        dist.all_reduce(tensor)
        report = lossycoll.last_report()
        ended = time.monotonic()
        assert report is not None
        calls.append((begun, ended, report.packets_missing, report.packets_received))
    answer(calls)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
