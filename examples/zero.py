"""ZeroRedundancyOptimizer: each rank keeps the optimizer's state of its share of the weights.

torchrun --nproc-per-node 3 examples/zero.py

Its owner takes the step of a weight and sends the result to all. Copies are never lossy, so here
replicas stay equal however many packets of gradients get lost.
"""

import common
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def example() -> str:
    model = DistributedDataParallel(common.network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.005
    )
    task = common.Task(seed=dist.get_rank())
    losses = []
    for _ in range(STEPS):
        losses.append(common.step(model, optimizer, task.batch()))
    difference = common.spread(common.parameters(model))
    assert difference == 0, difference
    assert losses[-1] < 0.2 * losses[0], losses

    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        moments = optimizer.state_dict()["state"]
        assert len(moments) == len(list(model.parameters())), moments.keys()
    lost = common.dropped()
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, replicas equal, {lost}"


if __name__ == "__main__":
    common.run(example)
