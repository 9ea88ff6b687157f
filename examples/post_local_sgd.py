"""Post-local SGD: gradients go to a neighbour only, and now and then the weights are averaged.

torchrun --nproc-per-node 4 examples/post_local_sgd.py

Without CUDA torch can't guess which ranks are neighbours, so the subgroups are made here. Weights
are averaged in a reliable group of their own: a mean over all ranks that is the same on all.
"""

import common
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import lossycoll

STEPS = 48
WARM_UP = 8  # steps in which all ranks exchange gradients
PERIOD = 4  # steps from one average of the weights to the next


def example() -> str:
    neighbours, _ = dist.new_subgroups(group_size=2)
    reliable = lossycoll.Options(delivery="reliable") if dist.get_backend() == "lossy" else None
    everyone = dist.new_group(pg_options=reliable)

    model = DistributedDataParallel(common.network())
    state = PostLocalSGDState(None, neighbours, start_localSGD_iter=WARM_UP)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP, process_group=everyone),
    )
    task = common.Task(seed=dist.get_rank())
    losses = []
    apart = []
    for _ in range(STEPS + 1):
        losses.append(common.step(model, optimizer, task.batch()))
        apart.append(common.spread(common.parameters(model)))
    assert losses[-1] < 0.2 * losses[0], losses
    assert max(apart) > 0, "local steps were the same everywhere"
    assert apart[-1] == 0, apart  # this step ended with an average
    lost = common.dropped(dist.group.WORLD, neighbours)
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, equal after averaging, {lost}"


if __name__ == "__main__":
    common.run(example)
