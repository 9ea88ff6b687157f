"""Tensor parallel beside data parallel on a 2D mesh: one must not lose packets, the other may.

torchrun --nproc-per-node 4 --max-restarts 1 examples/tensor_parallel.py

Each dimension's group has options of its own, since the mesh is made with ``backend_override``.
Activations, and their gradients, are reliable. FSDP's gradients may lose packets, once for the
micro-batches of a step, and at most 1% of them stay missing. A rank is killed in the middle of the
training, torchrun starts all again, and they go on from the distributed checkpoint.
"""

import os

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lossycoll

STEPS, SAVED_AFTER, DIES_AFTER = 40, 15, 25
MICRO_BATCHES = 2
MAX_MISSING = 0.01


def mesh_of_both() -> DeviceMesh:
    """Two rows of data parallel ranks, each with its own options."""
    options = {
        "dp": ("lossy", lossycoll.Options(max_missing=MAX_MISSING)),
        "tp": ("lossy", lossycoll.Options(delivery="reliable")),
    }
    return init_device_mesh(
        "cpu",
        (2, dist.get_world_size() // 2),
        mesh_dim_names=("dp", "tp"),
        backend_override=options if dist.get_backend() == "lossy" else None,
    )


def check_options(mesh: DeviceMesh) -> str:
    """What each group has made of its options, and how many of its packets were dropped."""
    lost = common.dropped(mesh.get_group("dp"))
    if dist.get_backend() == "lossy":
        gradients, activations = (lossycoll.stats(mesh.get_group(name)) for name in ("dp", "tp"))
        limit = max(peer.max_missing for peer in gradients.peers)
        # It is -1 as long as links lose nothing.
        assert round(limit, 6) in (-1, MAX_MISSING), limit
        assert limit > 0 or not os.environ.get("LOSSYCOLL_INJECT")
        assert activations.packets_missing == 0, activations
    return f"{lost} of gradients, none of activations"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=common.scratch())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def train(
    mesh: DeviceMesh,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held_out: tuple[torch.Tensor, torch.Tensor],
) -> int:
    """Returns the step that it went on from."""
    first = SAVED_AFTER if common.attempt() else 0
    if first:
        before = common.loss(model, held_out).item()
        resume(model, optimizer)
        assert common.loss(model, held_out).item() < 0.7 * before
    # All ranks of a tensor parallel group see the same batches.
    task = common.Task(seed=mesh["dp"].get_local_rank() + 100 * first)
    for step in range(first + 1, STEPS + 1):
        optimizer.zero_grad()
        for number in range(1, MICRO_BATCHES + 1):
            model.set_requires_gradient_sync(number == MICRO_BATCHES)
            (common.loss(model, task.batch(128)) / MICRO_BATCHES).backward()
        optimizer.step()
        if step == SAVED_AFTER:
            dcp.save(state_of(model, optimizer), checkpoint_id=common.scratch())
        if step == DIES_AFTER:
            common.die_once()
    return first


def example() -> str:
    mesh = mesh_of_both()
    model = common.network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    # After a forward pass without a backward pass the model shows whole parameters, not shards.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    # What the ranks of a tensor parallel group compute together is what one process computes alone:
    # nothing of the activations is lost. A sum of them has 64 KiB.
    held_out = common.Task(9).batch(256)
    torch.testing.assert_close(model(held_out[0]), common.network()(held_out[0]))
    before = common.loss(model, held_out).item()
    first = train(mesh, model, optimizer, held_out)
    after = common.loss(model, held_out).item()
    assert after < 0.2 * before, (before, after)
    return (
        f"went on from step {first}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(model)}, {check_options(mesh)}"
    )


if __name__ == "__main__":
    common.run(example)
