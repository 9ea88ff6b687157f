"""A rank of test_torchrun: it counts steps from the last checkpoint on, in whatever world there is.

python -m tests.support.elastic_rank FOLDER    # ends when FOLDER/stop exists
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("lossy")
rank, world = dist.get_rank(), dist.get_world_size()
(folder / f"worker-{os.getppid()}").write_text(str(os.getpid()))
saved = folder / "step"
step = int(saved.read_text()) if saved.exists() else 0
begun = step
while True:
    gradient = torch.ones(5000)
    dist.all_reduce(gradient)
    says = torch.tensor([int((folder / "stop").exists()), step])
    dist.all_reduce(says, dist.ReduceOp.MAX)
    assert int(says[1]) == step, "ranks went on from different steps"
    step += 1
    if rank == 0:
        (folder / "next").write_text(str(step))
        (folder / "next").replace(saved)
        with (folder / "progress").open("a") as told:
            told.write(f"{world} {begun} {step}\n")
    dist.barrier()
    if int(says[0]):
        break
    time.sleep(0.05)
dist.destroy_process_group()
