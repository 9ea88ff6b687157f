"""What the tests of ShardedOptimizer share: a small task, and one process that trains on it all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll

ROWS = 6
FEATURES, CLASSES = 13, 5
SMALL = 2000
"""Bytes of a bucket: several of them even for a small model."""


def network(hidden: int = 37) -> nn.Sequential:
    """The same first weights on every rank. Sizes are odd, so that chunks cut parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
        nn.Linear(hidden, CLASSES),
    )  # fmt: skip


def batch(step: int, world: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks, one rank's rows after another's."""
    draws = torch.Generator().manual_seed(step)
    return (
        torch.randn(world * ROWS, FEATURES, generator=draws, dtype=dtype),
        torch.randn(world * ROWS, CLASSES, generator=draws, dtype=dtype),
    )


def share(whole: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    return whole[0][rows], whole[1][rows]


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def sharded(
    params: Any, optimizer: Any, group: dist.ProcessGroup | None = None, **rest: Any
) -> lossycoll.ShardedOptimizer:
    rest = {"bucket_bytes": SMALL, "repair": 0, **rest}
    return lossycoll.ShardedOptimizer(params, optimizer, group, **rest)


def check_equal(model: nn.Module, plain: nn.Module, what: str = "", **tolerance: Any) -> None:
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        torch.testing.assert_close(
            mine.detach(), theirs.detach(), msg=partial("{}: {}: {}".format, what, name),
            **tolerance,
        )  # fmt: skip


def check_state(mine: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Whether two optimizers' state_dicts say the same."""
    assert mine["param_groups"] == plain["param_groups"]
    assert sorted(mine["state"]) == sorted(plain["state"])
    torch.testing.assert_close(mine["state"], plain["state"])


def flat(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def replicas(model: nn.Module, group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' parameters, float[world, n], reliably."""
    own = flat(model.parameters()).contiguous()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with lossycoll.reliable():
        dist.all_gather(rows, own, group)
    return torch.stack(rows)
