"""Gradient accumulation and clipping: four small batches for each exchange of gradients.

torchrun --nproc-per-node 2 examples/ddp_accumulation.py

In ``no_sync`` DDP keeps gradients to itself; the last batch's backward sends their sum. Clipping
comes after it, and each rank clips what it has: a lost packet changes the norm by a trifle.
"""

import contextlib

import common
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS = 60
SMALL_BATCHES = 4
MAX_NORM = 0.05


def example() -> str:
    model = DistributedDataParallel(common.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    task = common.Task(seed=dist.get_rank())
    losses = []
    clipped = 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(SMALL_BATCHES):
            last = number == SMALL_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                inputs, targets = task.batch()
                loss = mse_loss(model(inputs), targets) / SMALL_BATCHES
                loss.backward()
                total += loss.item()
        clipped += bool(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM)
        optimizer.step()
        losses.append(total)
    assert losses[-1] < 0.3 * losses[0], losses
    assert clipped > 0
    lost = common.dropped()
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, clipped {clipped} of {STEPS} steps, {lost}"


if __name__ == "__main__":
    common.run(example)
