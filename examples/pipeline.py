"""torch's pipeline parallelism: activations go from stage to stage by send and recv.

torchrun --nproc-per-node 4 examples/pipeline.py

Two stages, and two replicas of each: the pipelines are one dimension of a mesh, and DDP's groups
the other. What stages send is reliable; only gradients between replicas lose packets.
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

STEPS = 40
MICRO_BATCHES = 4


def example() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stages, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
    place = mesh["pp"].get_local_rank()
    layers = list(common.network())
    own = DistributedDataParallel(nn.Sequential(*layers[2 * place :][:2]), process_group=replicas)
    stage = PipelineStage(own, place, 2, torch.device("cpu"), group=stages)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(own.parameters(), lr=5e-3)
    task = common.Task(seed=mesh["dp"].get_local_rank())
    means = []
    for _ in range(STEPS):
        inputs, targets = task.batch()
        optimizer.zero_grad()
        if place == 0:
            schedule.step(inputs)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets, losses=losses)
            means.append(float(torch.stack(losses).detach().mean()))
        optimizer.step()
    ends = torch.tensor([means[0], means[-1]] if means else [0.0, 0.0])
    dist.broadcast(ends, src=1)
    first, last = ends.tolist()
    assert last < 0.3 * first, (first, last)
    sent = "no packets dropped"
    if dist.get_backend() == "lossy":
        sent = common.dropped(replicas)
    return f"loss {first:.3f} -> {last:.3f}, {sent} of gradients"


if __name__ == "__main__":
    common.run(example)
