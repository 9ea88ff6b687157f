"""What the tests of DropCompute share: a clock that tests move, and small models whose averaged
gradient is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lossycoll

WIDTH = 24
ROWS = 5


class Clock:
    """Stands still unless it is moved, so which micro-batches are dropped is exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def dropping(model: Any, micro_batches: int, threshold: Any = "auto", **rest: Any) -> Any:
    """A DropCompute with a clock of its own, ``drop.clock``."""
    clock = rest.pop("clock", None) or Clock()
    drop = lossycoll.DropCompute(model, micro_batches, threshold, clock=clock, **rest)
    drop.clock = clock  # type: ignore[attr-defined]
    return drop


class Shuffled(nn.Module):
    """Layers are used in another order than they were registered in, one of them twice. ``extra``
    is used for inputs whose first element is above 0 alone, ``never`` not at all."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, partly: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(WIDTH, 3, dtype=dtype)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.tied = self.first
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        if partly:
            self.extra = nn.Linear(WIDTH, WIDTH, dtype=dtype)
            self.never = nn.Linear(2, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        hidden = torch.tanh(self.middle(hidden))
        if hasattr(self, "extra") and x[0, 0] > 0:
            hidden = hidden + torch.tanh(self.extra(x))
        out: Tensor = self.last(self.tied(hidden))
        return out


def inputs_of(rank: int, step: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A micro-batch [ROWS, WIDTH]; its first element is above 0 on odd ranks."""
    draws = torch.Generator().manual_seed(1 + number + 100 * step + 10_000 * rank)
    x = torch.randn(ROWS, WIDTH, generator=draws, dtype=dtype)
    x[0, 0] = 1.0 if rank % 2 else -1.0
    return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def oracle(
    model: nn.Module, step: int, counts: Sequence[int], divisor: float | None = None
) -> list[Tensor | None]:
    """The sum of the gradients of the first ``counts[rank]`` micro-batches of each rank, over their
    number (or ``divisor``), by one process."""
    held = gradients(model)
    model.zero_grad()
    for rank, count in enumerate(counts):
        for number in range(count):
            (loss_of(model, inputs_of(rank, step, number)) / (divisor or sum(counts))).backward()
    out = gradients(model)
    for parameter, grad in zip(model.parameters(), held, strict=True):
        parameter.grad = grad
    return out


def check_close(
    found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], what: str = ""
) -> None:
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (mine is None) == (theirs is None), (what, index)
        if mine is not None:
            torch.testing.assert_close(
                mine, theirs, rtol=1e-11, atol=1e-13, msg=partial("{} {}: {}".format, what, index)
            )


def endless(value: Any = None) -> Iterator[Any]:
    while True:
        yield value


def small() -> nn.Module:
    return nn.Linear(3, 2)


def work(drop: Any, model: nn.Module, seconds: float = 1.0) -> None:
    """A micro-batch that takes so long."""
    (model(torch.ones(1, 3)).sum() / drop.micro_batches).backward()
    drop.clock.now += seconds
