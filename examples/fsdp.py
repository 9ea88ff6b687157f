"""FSDP2 on all ranks, then HSDP: shards within a row of the mesh, replicas across rows.

torchrun --nproc-per-node 4 examples/fsdp.py

Gradients are reduced by reduce_scatter (and, with HSDP, an all_reduce across the rows): these may
lose packets. Weights are gathered by all_gather, which is never lossy. With plain FSDP every weight
has one owner, so no replica can drift; with HSDP the rows may, as with DDP.
"""

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import lossycoll

STEPS = 30


def first_step_alone() -> Tensor:
    """The weights after one step of one process that has every rank's batch."""
    model = common.network()
    tasks = [common.Task(seed=rank) for rank in range(dist.get_world_size())]
    inputs, targets = zip(*(task.batch() for task in tasks), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    common.step(model, optimizer, (torch.cat(inputs), torch.cat(targets)))
    return common.parameters(model)


def whole(model: nn.Module) -> Tensor:
    return torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])


def train(mesh: DeviceMesh) -> tuple[float, float]:
    """First and last loss."""
    model = common.network()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    task = common.Task(seed=dist.get_rank())
    with lossycoll.reliable():  # a step without loss is that of one process
        first = common.step(model, optimizer, task.batch())
    torch.testing.assert_close(whole(model).detach(), first_step_alone())
    for _ in range(STEPS):
        last = common.step(model, optimizer, task.batch())
    assert last < 0.2 * first, (first, last)
    return first, last


def example() -> str:
    rows = 2
    flat = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    first, last = train(flat)
    lost = common.dropped()
    shape = (rows, dist.get_world_size() // rows)
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    hybrid = train(grid)[1]
    lost_hybrid = common.dropped(*grid.get_all_groups())
    return (
        f"FSDP loss {first:.3f} -> {last:.3f}, {lost}; "
        f"HSDP loss {first:.3f} -> {hybrid:.3f}, {lost_hybrid}"
    )


if __name__ == "__main__":
    common.run(example)
