"""Without rounds of repair nothing of gradients or parameters is ever sent twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from tests.support.harness import init, run_good

WORLD = 3
WIDTH = 160
STEPS = 12
LOSS = 0.2
ENV = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_MTU": "576",  # many packets
    "LOSSYCOLL_LIVENESS": "30",
    "LOSSYCOLL_INJECT": f"loss={LOSS},seed=5",
}
Made = tuple[nn.Module, torch.optim.Optimizer]


def bounded(model: nn.Module, **how: Any) -> Made:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    lossycoll.DriftBound(wrapped, optimizer, 4, **how)
    return wrapped, optimizer


def sharded(model: nn.Module, **how: Any) -> Made:
    return model, lossycoll.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, **how)


def trained(make: Callable[..., Made], **how: Any) -> dict[str, int]:
    """What training has cost this rank."""
    before = lossycoll.stats()
    torch.manual_seed(0)
    model, optimizer = make(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), **how)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.barrier()  # by now all that was asked for has been sent, and counted
    after = lossycoll.stats()
    names = ("packets_injected", "packets_recovered", "packets_resent", "resent_reliable")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def both(rank: int, world: int) -> list[dict[str, int]]:
    init()
    none: dict[str, Any] = {"max_missing": 0.01, "repair": 0}
    out = [trained(make, **how) for how in (none, {"repair": 2}) for make in (bounded, sharded)]
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def costs() -> list[list[dict[str, int]]]:
    return run_good(both, WORLD, ENV)


def test_without_rounds_only_reliable_calls_resend(costs: list[list[dict[str, int]]]) -> None:
    for rank in costs:
        for cost in rank[:2]:
            assert cost["packets_injected"] > 100 < cost["packets_recovered"]
            assert cost["packets_resent"] == cost["resent_reliable"]
    # Rank 0 broadcasts a model's first values, and all of them agree on each step.
    assert all(cost["resent_reliable"] > 10 for cost in costs[0][:2])


def test_rounds_are_counted_apart_from_reliable_calls(costs: list[list[dict[str, int]]]) -> None:
    for rank in costs:
        for cost in rank[2:]:
            assert cost["packets_resent"] > cost["resent_reliable"] + 100
