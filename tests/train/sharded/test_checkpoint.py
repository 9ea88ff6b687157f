"""ShardedOptimizer's checkpoints: those of the plain optimizer, at any number of ranks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from tests.support import harness
from tests.support.harness import run_good
from tests.support.sharded_cases import batch, loss_of, network, replicas, sharded, share

WORLD = 4
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
}
ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": "30", "LOSSYCOLL_MTU": "576"}


class Model(nn.Module):
    """A network, a channels_last weight, a parameter of no dimension, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.conv = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.conv.weight.square().mean() + self.conv.bias.sum()


def params(model: Model) -> list[dict[str, Any]]:
    return [
        {"params": [*model.inner.parameters(), model.fixed], "weight_decay": 0.1},
        {"params": [model.conv.weight, model.scale, model.conv.bias]},
    ]


def made(name: str, group: Any = None, **rest: Any) -> tuple[Model, Any]:
    model = Model()
    optimizer, options = CASES[name]
    return model, sharded(params(model), optimizer, group, **options, **rest)


def train(model: Model, optimizer: Any, first: int, steps: int, data: Any) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()


def same(step: int) -> tuple[Tensor, Tensor]:
    """The same data on all ranks, so that their number makes no difference."""
    return batch(step, 1)


def bits(value: Any) -> Any:
    """Tensors by their bits, shapes and strides."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.tolist()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


def saved(model: Model, optimizer: Any, rank: int) -> dict[str, Any]:
    """As a script writes and reads it; on all ranks."""
    optimizer.consolidate_state_dict(to=1)
    box = [None]
    if rank == 1:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        box = [file.getvalue()]  # type: ignore[list-item]
    dist.broadcast_object_list(box, 1)
    return torch.load(io.BytesIO(box[0]))  # type: ignore[no-any-return, arg-type]


def all_states(optimizer: Any) -> Any:
    optimizer.consolidate_state_dict()
    return optimizer.state_dict() if optimizer._collectives.rank == 0 else None


def other_worlds(rank: int, name: str, groups: list[Any]) -> None:
    """Saved at 4 ranks, loaded at 4, 3, 2 and 1 and by the plain optimizer: the same state, and the
    same steps from there on as those of the run that goes on."""
    model, mine = made(name)
    train(model, mine, 0, 3, lambda step: share(batch(step, WORLD), rank))
    book = saved(model, mine, rank)
    assert len(book["optimizer"]["state"]) == len(list(model.parameters())) - 1

    plain = Model()
    optimizer, options = CASES[name]
    theirs = optimizer(params(plain), **options)
    plain.load_state_dict(book["model"])
    theirs.load_state_dict(copy.deepcopy(book["optimizer"]))
    assert bits(theirs.state_dict()) == bits(book["optimizer"])

    restored = []
    for group in groups:
        if dist.get_rank(group) < 0:
            continue
        twin, other = made(name, group)
        twin.load_state_dict(book["model"])
        other.load_state_dict(book["optimizer"])
        state = all_states(other)
        assert state is None or bits(state) == bits(book["optimizer"]), dist.get_world_size(group)
        restored.append((twin, other))

    for net, one in [(model, mine), (plain, theirs), *restored]:
        train(net, one, 10, 3, same)
        pairs = zip(net.parameters(), model.parameters(), strict=True)
        for left, right in pairs:
            torch.testing.assert_close(left, right)
    if name != "SGD":
        return
    # And back from the plain one.
    book = copy.deepcopy(theirs.state_dict())
    twin, other = made(name)
    other.load_state_dict(book)
    state = all_states(other)
    assert state is None or bits(state) == bits(book)


def names_of(mine: Any) -> list[list[str]]:
    return [group["param_names"] for group in mine._store.groups.param_groups]


def odd() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def kept(rank: int) -> None:
    """The state of what is frozen now stays in the checkpoint, and goes with what is thawed."""
    plain = network()
    theirs = torch.optim.AdamW(plain.named_parameters(), lr=0.01)
    train(plain, theirs, 0, 2, same)  # type: ignore[arg-type]
    book = theirs.state_dict()
    model = network()
    model.load_state_dict(plain.state_dict())
    model[0].requires_grad_(False)
    mine = sharded(model.named_parameters(), torch.optim.AdamW, lr=0.01)
    mine.load_state_dict(book)
    state = all_states(mine)
    assert state is None or bits(state) == bits(book)
    model[0].requires_grad_(True)
    with pytest.raises(lossycoll.UnsupportedError):
        mine.add_param_group({"params": [*model[0].named_parameters(), ("0.x", odd())]})
    assert names_of(mine) == [[name for name, _ in model.named_parameters()]]
    thawed = [(f"0.{name}", parameter) for name, parameter in model[0].named_parameters()]
    mine.add_param_group({"params": thawed})
    assert names_of(mine) == [
        ["2.weight", "2.bias", "4.weight", "4.bias"], ["0.weight", "0.bias"],
    ]  # fmt: skip
    state = all_states(mine)
    if state is not None:
        assert [group["param_names"] for group in state["param_groups"]] == names_of(mine)
    train(model, mine, 5, 2, same)  # type: ignore[arg-type]
    train(plain, theirs, 5, 2, same)  # type: ignore[arg-type]
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def refused(rank: int) -> None:
    model, mine = made("AdamW")
    train(model, mine, 0, 1, same)
    with pytest.raises(lossycoll.CheckpointError, match=r"consolidate_state_dict"):
        mine.state_dict()
    book = saved(model, mine, rank)["optimizer"]
    if rank == 1:
        mine.state_dict()
    before = {key: bits(value) for key, value in enumerate(mine.state.values())}

    other = copy.deepcopy(book)
    other["state"][2]["exp_avg"] = torch.zeros(37, 36)
    with pytest.raises(
        lossycoll.CheckpointError, match=r"exp_avg of parameter 2 of group 0 .*36.*37"
    ):
        mine.load_state_dict(other)
    fewer = copy.deepcopy(book)
    fewer["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match=r"9 parameters in groups of \[7, 2\], wanted 10 .*7, 3"):
        mine.load_state_dict(fewer)
    one = copy.deepcopy(book)
    del one["param_groups"][1]
    with pytest.raises(lossycoll.CheckpointError, match=r"groups of \[7\]"):
        mine.load_state_dict(one)
    assert {key: bits(value) for key, value in enumerate(mine.state.values())} == before
    with pytest.raises(lossycoll.OptionError, match=r"to is 4, wanted a rank, 0 to 3"):
        mine.consolidate_state_dict(to=4)

    train(model, mine, 1, 1, same)
    with pytest.raises(lossycoll.CheckpointError):  # it is of the step before
        mine.state_dict()


def while_packets_are_lost(rank: int, group: Any) -> int:
    """Nothing is missing from a checkpoint, whatever has been lost on the way there."""
    model, mine = made("AdamW", group)
    train(model, mine, 0, 6, lambda step: share(batch(step, WORLD), rank))
    assert mine.stats().stale > 0
    book = saved(model, mine, rank)
    rows = replicas(model)
    assert bool((rows == rows[0]).all())
    for owned in mine._store.owned:
        offset, length = owned.fragment.offset, owned.fragment.end - owned.fragment.begin
        number = mine._store.names[owned.index]
        place = next(
            i
            for i, p in enumerate(p for g in params(model) for p in g["params"])
            if p is mine._store.model[owned.index]
        )
        whole = book["optimizer"]["state"][place]
        for key, value in mine.state[owned.parameter].items():
            whole_flat = whole[key]
            if value.dim():
                count = whole_flat.numel()
                whole_flat = whole_flat.as_strided((count,), (1,))[offset : offset + length]
            assert torch.equal(whole_flat, value), (number, key)
    return lossycoll.stats(group).packets_injected


def checkpoints(rank: int, world: int) -> int:
    harness.init()
    groups = [dist.group.WORLD, dist.new_group([1, 2, 3]), dist.new_group([3, 0])]
    groups.append([dist.new_group([r]) for r in range(world)][rank])
    for name in CASES:
        other_worlds(rank, name, groups)
    kept(rank)
    refused(rank)
    options = lossycoll.Options(inject="loss=0.2,seed=3")
    injected = while_packets_are_lost(rank, dist.new_group(backend="lossy", pg_options=options))
    dist.destroy_process_group()
    return injected


def test_checkpoints() -> None:
    assert min(run_good(checkpoints, WORLD, ENV, timeout=200)) > 20
