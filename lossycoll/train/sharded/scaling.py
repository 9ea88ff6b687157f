"""Scale of gradients: a dummy parameter that observes a GradScaler, and the norm.

A GradScaler wants a gradient from each rank, also from one that owns nothing of what had gradients.
And what it does to the dummy's gradient shows by what it has divided the others, or that somebody
scales or clips before any gradient has been reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lossycoll.train.common.collectives import Collectives
from lossycoll.train.sharded.backward_pass import GradStamp

from .refusals import owners_needed

PROBE: Final = 2.0**-90
"""A gradient that only a scale changes: its square, and so its part in a norm, is 0."""


class ScalerProbe:
    """The dummy parameter. It is in a group between steps, and never in one during a step."""

    def __init__(self) -> None:
        self._parameter: Parameter | None = None
        self._members: list[Any] = []
        self._stamp = GradStamp(None)

    def attach(self, members: list[Any], like: Tensor) -> Tensor:
        """Adds a new dummy parameter to a group's ``members``; returns its gradient, (1,)."""
        self.detach()
        parameter = Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        parameter.grad = torch.full_like(parameter, PROBE)
        members.append(parameter)
        self._parameter, self._members = parameter, members
        self._stamp = GradStamp(parameter.grad)
        return parameter.grad

    def detach(self) -> None:
        if self._parameter is not None:
            self._members[:] = [one for one in self._members if one is not self._parameter]
            self._parameter, self._members = None, []

    def is_dummy(self, parameter: object) -> bool:
        return self._parameter is not None and parameter is self._parameter

    def was_changed(self) -> bool:
        """True if anything but clearing was done to its gradient since it was attached.

        False in float16, and for a scale of 1, where this isn't visible.
        """
        grad = None if self._parameter is None else self._parameter.grad
        if grad is None or float(grad) == 0:
            return False
        return float(grad) != PROBE or not self._stamp.fits(grad)

    def scale(self) -> float:
        """Scale that a GradScaler has divided the gradients by; 1 in float16, which it refuses."""
        grad = None if self._parameter is None else self._parameter.grad
        found = 0.0 if grad is None else float(grad)
        return PROBE / found if found > 0 and math.isfinite(found) else 1.0


def total_norm(
    grads: Sequence[Tensor], norm_type: float, device: torch.device, collectives: Collectives
) -> Tensor:
    """The p-norm of all ranks' gradients together, float64 (), the same on all ranks."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for grad in grads:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        norms.append(norm.to(device))
    own = torch.stack(norms)
    highest = math.isinf(norm_type)
    total = own.max() if highest else own.pow(norm_type).sum()
    op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
    with owners_needed():
        collectives.all_reduce(total, op).wait()
    return total if highest else total.pow(1.0 / norm_type)
