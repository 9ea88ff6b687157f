"""Collectives with tensors whose results are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """``reset`` puts the input in place, ``run`` calls the collective, ``right`` looks at what it
    left behind."""

    reset: Callable[[], object]
    run: Callable[[dist.ProcessGroup], object]
    right: Callable[[], bool]


def contribution(elements: int, rank: int) -> Tensor:
    """Small whole numbers, so that sums over ranks are exact. Shape (elements,), float32."""
    period = ((torch.arange(4) * 7 + rank) % 4).float()
    return period.repeat(-(-elements // 4))[:elements]


def make(collective: str, size: int, rank: int, world: int) -> Call:
    """``size``: bytes, of float32."""
    return {"all_reduce": _all_reduce, "broadcast": _broadcast, "all_gather": _all_gather}[
        collective
    ](size // 4, rank, world)


def _all_reduce(elements: int, rank: int, world: int) -> Call:
    source = contribution(elements, rank)
    tensor = source.clone()
    wanted = torch.zeros(elements)
    for other in range(world):
        wanted += contribution(elements, other)
    return Call(
        lambda: tensor.copy_(source),
        lambda group: dist.all_reduce(tensor, group=group),
        # A mean that is multiplied again may round.
        lambda: torch.allclose(tensor, wanted, rtol=1e-6, atol=0),
    )


def _broadcast(elements: int, rank: int, world: int) -> Call:
    source = contribution(elements, rank)
    tensor = source.clone()
    wanted = contribution(elements, 0)
    return Call(
        lambda: tensor.copy_(source),
        lambda group: dist.broadcast(tensor, 0, group=group),
        lambda: torch.equal(tensor, wanted),
    )


def _all_gather(elements: int, rank: int, world: int) -> Call:
    piece = contribution(elements // world, rank)
    out = torch.empty(world, elements // world)
    wanted = torch.stack([contribution(elements // world, other) for other in range(world)])
    return Call(
        lambda: out.fill_(-1),
        lambda group: dist.all_gather(list(out), piece, group=group),
        lambda: torch.equal(out, wanted),
    )
