"""Distributed checkpoints: saved while training goes on, and loaded into a new model.

torchrun --nproc-per-node 2 examples/checkpoint.py

Checkpointing moves metadata and weights by collectives that are never lossy. ``async_save`` issues
them from a thread of its own, so it needs a group of its own, as with any backend: calls of two
threads on one group come in no particular order.
"""

import tempfile

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

STEPS = 20


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(common.network())
    return model, torch.optim.AdamW(model.parameters(), lr=0.005)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: common.Task) -> float:
    for _ in range(STEPS):
        loss = common.step(model, optimizer, task.batch())
    return loss


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load(path: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = sharded()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return model, optimizer


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])


def example() -> str:
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)  # all use rank 0's folder
        return save_and_load(f"{place[0]}/first", f"{place[0]}/second")


def save_and_load(first: str, second: str) -> str:
    model, optimizer = sharded()
    task = common.Task(seed=dist.get_rank())
    train(model, optimizer, task)
    saved = whole(model)
    dcp.save(state_of(model, optimizer), checkpoint_id=first)

    own_group = dist.new_group()
    state = state_of(model, optimizer)
    saving = dcp.async_save(state, checkpoint_id=second, process_group=own_group)
    loss = train(model, optimizer, task)
    saving.result()
    assert not torch.equal(whole(model), saved)

    for path in (first, second):
        again, its_optimizer = load(path)
        assert torch.equal(whole(again), saved), path
    resumed = train(again, its_optimizer, task)  # also waits for ranks that still load
    assert resumed < 1.5 * loss, (resumed, loss)
    lost = common.dropped()
    return f"restored what was saved, loss {loss:.3f} and {resumed:.3f} after it, {lost}"


if __name__ == "__main__":
    common.run(example)
