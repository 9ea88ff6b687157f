"""What all ways of averaging gradients share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from lossycoll.train.common.works import Work

Submit: TypeAlias = Callable[[], "Work | None"]
"""Submits a collective that travels beside the gradients; None if there are no other ranks."""

NO_FLAGS: Final = torch.zeros(0, dtype=torch.float64)


def device_of(parameters: Sequence[Parameter]) -> torch.device:
    """The device of the tensors of a group's collectives; the CPU if there are no parameters."""
    return parameters[0].device if parameters else torch.device("cpu")


def grad_flags_of(parameters: Sequence[Parameter]) -> Tensor:
    """float64 (n,), 1 for each parameter that has a gradient at this rank, else 0."""
    return torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Parameter], factor: float) -> None:
    """Multiplies by a factor the gradients of the parameters that have one."""
    if factor == 1.0:
        return
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
