"""What all ways of averaging gradients under DropCompute need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

Start = Callable[[], None]

NO_FLAGS: Final = torch.zeros(0, dtype=torch.float64)


def device_of(parameters: Sequence[Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


@torch.no_grad()
def multiply(parameters: Iterable[Parameter], factor: float) -> None:
    """The gradients of ``parameters``, of those that have one."""
    dense: list[Tensor] = []
    for grad in (p.grad for p in parameters):
        if grad is None:
            continue
        if grad.layout is torch.strided:
            dense.append(grad)
        else:
            grad.mul_(factor)
    if dense:
        torch._foreach_mul_(dense, factor)
