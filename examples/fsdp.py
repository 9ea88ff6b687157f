"""FSDP2 on all ranks, then HSDP: shards within a row of the mesh, replicas across rows.

torchrun --nproc-per-node 4 --max-restarts 1 examples/fsdp.py

Gradients are reduced by reduce_scatter (and, with HSDP, an all_reduce across the rows): these may
lose packets. Weights are gathered by all_gather, which is never lossy. With plain FSDP every weight
has one owner, so no replica can drift; with HSDP the rows may, as with DDP, and DriftBound holds
them together. A rank is killed while HSDP trains, torchrun starts all again, and they go on from
the distributed checkpoint.
"""

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import lossycoll

STEPS, SAVED_AFTER, DIES_AFTER = 40, 15, 25
MICRO_BATCHES = 2
DRIFT = 0.02  # of a weight, between rows


def sharded(mesh: DeviceMesh) -> tuple[FSDPModule, torch.optim.Optimizer]:
    model = common.network()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    # After a forward pass without a backward pass the model shows whole parameters, not shards.
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def first_step_alone() -> Tensor:
    """The weights after one step of one process that has every rank's batch."""
    model = common.network()
    tasks = [common.Task(seed=rank) for rank in range(dist.get_world_size())]
    inputs, targets = zip(*(task.batch() for task in tasks), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    common.step(model, optimizer, (torch.cat(inputs), torch.cat(targets)))
    return common.parameters(model)


def check_first_step(mesh: DeviceMesh) -> None:
    """A step without loss is that of one process."""
    model, optimizer = sharded(mesh)
    with lossycoll.reliable():
        common.step(model, optimizer, common.Task(seed=dist.get_rank()).batch())
    torch.testing.assert_close(common.parameters(model), first_step_alone())


def train(
    model: FSDPModule, optimizer: torch.optim.Optimizer, first: int = 0, *, saves: bool = False
) -> None:
    """Steps of micro-batches, whose gradients are reduced once, after the last."""
    task = common.Task(seed=dist.get_rank() + 100 * first)
    for step in range(first + 1, STEPS + 1):
        optimizer.zero_grad()
        for number in range(1, MICRO_BATCHES + 1):
            model.set_requires_gradient_sync(number == MICRO_BATCHES)
            (common.loss(model, task.batch()) / MICRO_BATCHES).backward()
        optimizer.step()
        if saves and step == SAVED_AFTER:
            dcp.save(state_of(model, optimizer), checkpoint_id=common.scratch())
        if saves and step == DIES_AFTER:
            common.die_once()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=common.scratch())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def fsdp(held_out: tuple[Tensor, Tensor]) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    check_first_step(mesh)
    model, optimizer = sharded(mesh)
    before = common.loss(model, held_out).item()
    train(model, optimizer)
    after = common.loss(model, held_out).item()
    assert after < 0.2 * before, (before, after)
    assert common.spread(common.parameters(model)) == 0
    return f"FSDP evaluation loss {before:.3f} -> {after:.3f}, {common.dropped()}"


def hsdp(held_out: tuple[Tensor, Tensor]) -> str:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    check_first_step(mesh)
    model, optimizer = sharded(mesh)
    if dist.get_backend() == "lossy":
        lossycoll.DriftBound(model, optimizer)
    before = common.loss(model, held_out).item()
    first = SAVED_AFTER if common.attempt() else 0
    if first:
        resume(model, optimizer)
        assert common.loss(model, held_out).item() < 0.7 * before
    train(model, optimizer, first, saves=True)
    after = common.loss(model, held_out).item()
    assert after < 0.2 * before, (before, after)
    apart = common.spread(common.parameters(model))
    assert apart < DRIFT, apart
    lost = common.dropped(mesh.get_group("replicate"))
    return (
        f"HSDP went on from step {first}, evaluation loss {before:.3f} -> {after:.3f}, rows differ "
        f"by at most {apart:.3f}, {common.fingerprint(model)}, {lost} between them"
    )


def example() -> str:
    held_out = common.Task(99).batch(256)
    return f"{fsdp(held_out)}; {hsdp(held_out)}"


if __name__ == "__main__":
    common.run(example)
