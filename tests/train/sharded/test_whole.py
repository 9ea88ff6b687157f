"""Whole matrices dealt to ranks: Muon steps them as one process does."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.train.common.layout import ParameterSpec, lay_out
from tests.support import harness
from tests.support.harness import run_good
from tests.support.sharded_cases import (
    batch,
    check_equal,
    check_state,
    loss_of,
    network,
    sharded,
    share,
)

WORLD = 3
STEPS = 4
ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": "30", "LOSSYCOLL_DELIVERY": "reliable"}
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}


def test_no_parameter_is_cut_and_padding_is_bounded() -> None:
    draw = random.Random(5)
    for _ in range(50):
        world = draw.randint(1, 5)
        shapes = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(draw.randint(1, 12))]
        specs = [ParameterSpec(shape, (shape[1], 1), 4) for shape in shapes]
        for bucket in lay_out(specs, world, draw.choice([1, 3000]), whole=True):
            owned = [each for rank in range(world) for each in bucket.fragments(rank)]
            assert all(each.whole for each in owned)
            spans = sorted((each.begin, each.end) for each in owned)
            assert spans == sorted((m.begin, m.end) for m in bucket.members)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
            largest = max(each.end - each.begin for each in owned)
            total = sum(each.end - each.begin + 15 for each in owned)
            assert max(bucket.counts) <= total / world + largest + 15


def split(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    return matrices, [each for each in model.parameters() if each.ndim != 2]


def rank_muon(rank: int, world: int) -> Any:
    harness.init(timeout=60)
    model, plain = network(), network()
    matrices, rest = split(model)
    optimizers = [
        sharded(matrices, torch.optim.Muon, whole=True, **MUON),
        sharded(rest, torch.optim.Adam, lr=0.01),
    ]
    theirs, others = split(plain)
    alone = [torch.optim.Muon(theirs, **MUON), torch.optim.Adam(others, lr=0.01)]
    kept: Any = None
    for step in range(2 * STEPS):
        data = batch(step, world)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, share(data, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
        plain.zero_grad()
        loss_of(plain, data).backward()
        for one in alone:
            one.step()
        if step == STEPS - 1:  # a checkpoint of the plain optimizer's form, into another one
            optimizers[0].consolidate_state_dict(0)
            boxed = [optimizers[0].state_dict() if rank == 0 else None]
            dist.broadcast_object_list(boxed)
            kept = boxed[0]
            momenta = [each["momentum_buffer"].shape for each in kept["state"].values()]
            assert momenta == [each.shape for each in matrices]
            optimizers[0] = sharded(matrices, torch.optim.Muon, whole=True, **MUON)
            optimizers[0].load_state_dict(kept)
    # Muon makes all directions of a gradient alike, those too that are rounding alone.
    every = zip(model.parameters(), plain.parameters(), network().parameters(), strict=True)
    for mine, wanted, begin in every:
        way = (wanted - begin).norm()
        assert (mine - wanted).norm() < 0.05 * way, (mine - wanted).norm() / way
    own = sum(len(group["params"]) for group in optimizers[0].param_groups)
    dist.destroy_process_group()
    return own


def test_muon_steps_as_one_process_does() -> None:
    """Each of the three matrices is one rank's (and a probe may stand in a group beside it)."""
    assert all(1 <= own <= 2 for own in run_good(rank_muon, WORLD, ENV))


class Factored(torch.optim.Optimizer):
    """Shampoo's kind of state: factors of both sizes of a matrix, as vectors for thin ones."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad.flatten(1)
                if not state:
                    state["left"] = p.new_zeros(len(grad), len(grad))
                    state["rows"] = p.new_zeros(len(grad))
                    state["columns"] = p.new_zeros(grad.shape[1])
                state["left"] += grad @ grad.t()
                state["rows"] += grad.square().sum(1)
                state["columns"] += grad.square().sum(0)
                scale = (state["rows"].sum() + state["left"].trace()).sqrt() + 1e-3
                p.sub_(p.grad / scale, alpha=group["lr"])


def thin() -> torch.nn.Sequential:
    """Of a matrix of one row, and a convolution of 1 x 1, a factor has the shape of the whole."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(13, 8, 1, bias=False).to(memory_format=torch.channels_last),
        torch.nn.Flatten(), torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(),
        torch.nn.Linear(16, 1, bias=False),
    )  # fmt: skip


def rank_thin(rank: int, world: int) -> Any:
    harness.init(timeout=60)
    data = torch.randn(5, 13, 1, 1, generator=torch.Generator().manual_seed(1))

    def train(model: torch.nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

    def saved(optimizer: Any) -> Any:
        optimizer.consolidate_state_dict(0)
        box = [optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(box)
        return box[0]

    for kind in (torch.optim.Adafactor, Factored):
        model, plain, twin, again = thin(), thin(), thin(), thin()
        mine = sharded(model.parameters(), kind, whole=True, lr=0.05)
        theirs = kind(plain.parameters(), lr=0.05)  # type: ignore[operator]
        backup = lossycoll.ShardBackup(mine, every=1)
        train(model, mine)
        train(plain, theirs)
        for _ in range(2):
            backup.step()
        book = saved(mine)
        check_state(book, theirs.state_dict())
        other = sharded(twin.parameters(), kind, whole=True, lr=0.05)
        other.load_state_dict(book)
        restored = sharded(again.parameters(), kind, whole=True, lr=0.05)
        assert restored.restore_shards(None if rank == 2 else backup)
        for net, optimizer in ((twin, other), (again, restored)):
            check_state(saved(optimizer), book)
            net.load_state_dict(model.state_dict())
            train(net, optimizer)
        train(model, mine)
        check_equal(twin, model)
        check_equal(again, model)
    dist.destroy_process_group()


def test_state_of_any_shape_comes_back() -> None:
    run_good(rank_thin, WORLD, ENV)


def rank_refusals(rank: int, world: int) -> None:
    harness.init(timeout=60)
    matrices, rest = split(network())
    with pytest.raises(lossycoll.UnsupportedError, match="whole=True"):
        sharded(matrices, torch.optim.Muon, lr=0.1)
    with pytest.raises(lossycoll.UnsupportedError, match="LBFGS"):
        sharded(matrices, torch.optim.LBFGS, whole=True)
    with pytest.raises(ValueError, match="only supports 2D"):
        sharded(rest, torch.optim.Muon, whole=True)
    with pytest.raises(lossycoll.OptionError, match="whole is 1"):
        sharded(matrices, torch.optim.Muon, whole=1)
    dist.destroy_process_group()


def test_what_whole_refuses() -> None:
    run_good(rank_refusals, 2, ENV)
