"""Tensor parallel beside data parallel on a 2D mesh: one must not lose packets, the other may.

torchrun --nproc-per-node 4 examples/tensor_parallel.py

DTensor adds activations up by functional collectives, which are reliable unless a scope says
otherwise. FSDP's gradients may lose packets.
"""

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lossycoll

STEPS = 40


def example() -> str:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = common.network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    # All ranks of a tensor parallel group see the same batch. What they compute together is what
    # one process computes alone: nothing of the activations is lost.
    task = common.Task(seed=mesh["dp"].get_local_rank())
    inputs, targets = task.batch(128)  # a sum of activations has 32 KiB
    torch.testing.assert_close(model(inputs), common.network()(inputs))

    losses = []
    for _ in range(STEPS):
        losses.append(common.step(model, optimizer, (inputs, targets)))
        inputs, targets = task.batch(128)
    assert losses[-1] < 0.2 * losses[0], losses
    lost = common.dropped(mesh.get_group("dp"))
    if dist.get_backend() == "lossy":
        activations = lossycoll.stats(mesh.get_group("tp"))
        assert activations.packets_missing == 0, activations
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {lost} of gradients, none of activations"


if __name__ == "__main__":
    common.run(example)
