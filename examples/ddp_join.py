"""Uneven inputs: ranks with more batches than others go on until the last one is done.

torchrun --nproc-per-node 3 examples/ddp_join.py

Ranks that are done answer the others' collectives with zeros, and at the end all take the weights
of a rank that stayed to the last: copies are never lossy, so the replicas are equal again.
"""

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def example() -> str:
    model = DistributedDataParallel(common.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    task = common.Task(seed=dist.get_rank())
    batches = 60 + 15 * dist.get_rank()
    losses = []
    with model.join():
        for _ in range(batches):
            losses.append(common.step(model, optimizer, task.batch()))
    difference = common.spread(common.parameters(model))
    assert difference == 0, difference
    assert losses[-1] < 0.3 * losses[0], losses
    lost = common.dropped()
    world = dist.get_world_size()
    return f"60 to {45 + 15 * world} batches, loss {losses[0]:.3f} -> {losses[-1]:.3f}, {lost}"


if __name__ == "__main__":
    common.run(example)
