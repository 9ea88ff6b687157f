"""ShardedOptimizer with models whose parameters, precision or passes are unusual.

Nothing is lost: each step is that of one process that has all data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.sharded_cases import (
    batch,
    check_equal,
    check_state,
    flat,
    network,
    replicas,
    sharded,
    share,
)
from tests.support.sharded_scripts import STEPS, step_both, train, train_as_one_process


class Images(nn.Module):
    """channels_last weights, a tied one, a frozen one, one of no dimension, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.fixed = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale + self.empty.sum()
        return self.fixed(self.second(torch.tanh(self.first(x))))


def odd_parameters(rank: int, world: int) -> None:
    model, plain = Images(), Images()
    before = model.fixed.weight.clone()
    mine = sharded(model.parameters(), torch.optim.Adam, lr=0.01)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    assert model.conv.weight.stride() == plain.conv.weight.stride()
    assert model.first.weight is model.second.weight
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(step)
        images = torch.randn(2 * world, 3, 8, 8, generator=draws)
        mine.zero_grad()
        theirs.zero_grad()
        model(images[2 * rank : 2 * rank + 2]).square().mean().backward()
        plain(images).square().mean().backward()
        mine.step()
        theirs.step()
    check_equal(model, plain)
    assert torch.equal(model.fixed.weight, before)
    mine.consolidate_state_dict()
    if rank == 0:
        whole, wanted = mine.state_dict(), theirs.state_dict()
        number = [name for name, _ in plain.named_parameters()].index("empty")
        del wanted["state"][number]  # without elements there is no state to keep
        check_state(whole, wanted)
        assert whole["state"][2]["exp_avg"].stride() == plain.conv.weight.stride()
        assert len(whole["param_groups"][0]["params"]) == len(list(plain.parameters()))


def unused_parameters(rank: int, world: int) -> None:
    """What no rank used isn't touched; what one used is, with zeros of the others."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.branches = nn.ModuleList(nn.Linear(13, 5) for _ in range(world + 2))

        def forward(self, x: Tensor, *used: int) -> Tensor:
            return sum(self.branches[i](x) for i in used)  # type: ignore[return-value]

    model, plain = Branches(), Branches()
    options = {"lr": 0.01, "weight_decay": 0.5}
    mine = sharded(model.parameters(), torch.optim.AdamW, bucket_bytes=100, **options)
    theirs = torch.optim.AdamW(plain.parameters(), **options)
    for step in range(STEPS):
        inputs, _ = batch(step, world)
        mine.zero_grad()
        theirs.zero_grad()
        used = (rank, world) if step else (world,)
        model(share((inputs, inputs), rank)[0], *used).square().mean().backward()
        for other in range(world):
            used = (other, world) if step else (world,)
            own = share((inputs, inputs), other)[0]
            (plain(own, *used).square().mean() / world).backward()
        mine.step()
        theirs.step()
    check_equal(model, plain)
    assert mine.stats().steps == STEPS
    mine.consolidate_state_dict()
    if rank == 0:
        check_state(mine.state_dict(), theirs.state_dict())
        assert 2 * (world + 1) not in mine.state_dict()["state"]
    # One rank whose loss has nothing to do with the model still takes part.
    mine.zero_grad()
    if rank:
        model(inputs, world).square().mean().backward()
    mine.step()
    assert bool((replicas(model) == replicas(model)[0]).all())


def half_precision(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half_precision_of(dtype, rank, world)


def half_precision_of(dtype: torch.dtype, rank: int, world: int) -> None:
    model, plain = network().to(dtype), network().to(dtype)
    model[4].float()
    plain[4].float()

    def forward(net: Any, data: Any) -> Tensor:
        hidden = net[:4](data[0].to(dtype))
        return nn.functional.mse_loss(net[4](hidden.float()), data[1])

    # What tells error feedback of a scale doesn't fit float16, which no GradScaler takes.
    mine = sharded(
        model.parameters(), torch.optim.SGD, lr=2.0, error_feedback=dtype == torch.float16
    )
    theirs = torch.optim.SGD(plain.parameters(), lr=2.0)
    for step in range(STEPS):
        step_both(mine, theirs, model, plain, batch(step, world), rank, loss=forward)
    assert model[0].weight.dtype == dtype
    check_equal(model, plain, rtol=0.02, atol=0.01)
    moved = flat(p.float() for p in model.parameters()) - flat(network().parameters())
    assert moved.abs().max() > 0.05


def compiled(rank: int, world: int) -> None:
    model, plain = network(), network()
    fast = torch.compile(model, backend="aot_eager")
    mine = sharded(fast.parameters(), torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(mine, theirs, fast, plain, rank, world)
    check_equal(model, plain)


def checkpointed(rank: int, world: int) -> None:
    """Reentrant checkpoints run a backward pass within another; each is a part of one whole."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Sequential, whole: bool) -> None:
            super().__init__()
            self.inner, self.whole = inner, whole

        def forward(self, x: Tensor) -> Any:
            x = x.clone().requires_grad_()
            x = checkpoint(self.inner[:2], x, use_reentrant=True)
            if self.whole:
                return checkpoint(self.inner[2:], x, use_reentrant=True)
            return self.inner[4](checkpoint(self.inner[2:4], x, use_reentrant=True))

    for whole in (True, False):
        model, plain = network(), network()
        mine = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
        train(mine, theirs, Checkpointed(model, whole), plain, rank, world)
        check_equal(model, plain, f"whole {whole}")


@pytest.mark.parametrize(
    "script",
    [
        odd_parameters,
        unused_parameters,
        half_precision,
        pytest.param(compiled, marks=pytest.mark.long),
        checkpointed,
    ],
)
def test_a_model_is_trained_as_by_one_process(script: Any) -> None:
    train_as_one_process(script)
