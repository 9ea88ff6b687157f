"""One rank of a job that fills its link: ``python -m benchmarks.studies.fairness.job CONFIG OUT``.

CONFIG is JSON: elements of a tensor, seconds. OUT gets (time, bytes received so far), sampled;
OUT.begun is made when it begins.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lossycoll

from .flow import Samples


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    samples: Samples = []
    ended = threading.Event()
    dist.barrier()
    Path(f"{sys.argv[2]}.begun").touch()
    sampler = threading.Thread(target=sample, args=(samples, ended))
    sampler.start()
    try:
        fill_link(config["elements"], config["seconds"])
    finally:
        ended.set()
        sampler.join()
    if dist.get_rank() == 1:
        Path(sys.argv[2]).write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


def sample(samples: Samples, ended: threading.Event) -> None:
    while not ended.wait(0.1):
        samples.append((time.monotonic(), lossycoll.stats().bytes_received))


def fill_link(elements: int, seconds: float) -> None:
    """All-reduces without a pause, two in flight, until the first rank finds the time over."""
    tensors = [torch.ones(elements) for _ in range(2)]
    over = torch.zeros(1)
    begin = time.monotonic()
    waited = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    while not over:
        over.fill_(float(time.monotonic() - begin > seconds))
        with lossycoll.reliable():
            asked = dist.all_reduce(over, op=dist.ReduceOp.MAX, async_op=True)
        for i, tensor in enumerate(tensors):
            waited[i].wait()
            waited[i] = dist.all_reduce(tensor.fill_(1.0), async_op=True)
        asked.wait()
    for work in waited:
        work.wait()


if __name__ == "__main__":
    main()
