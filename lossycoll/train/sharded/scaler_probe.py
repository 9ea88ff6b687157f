"""A parameter of no meaning, lent to an optimizer's groups between its steps.

A rank that owns nothing of what had gradients would have none to show to a GradScaler, which wants
one. And what is done to the carrier's gradient tells by what the scaler has divided the others; or
that somebody scales or clips before there is anything to.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from lossycoll.train.common.grad_stamp import Mark

PROBE: Final = 2.0**-90
"""A gradient that nothing but a scale changes: its square, and so its part in a norm, is 0."""


class Carrier:
    """Lent or not."""

    def __init__(self) -> None:
        self._parameter: Parameter | None = None
        self._members: list[Any] = []
        self._mark = Mark(None)

    def lend(self, members: list[Any], like: Tensor) -> Tensor:
        """Adds it to ``members``, a group's parameters, with the type and device of ``like``;
        returns its gradient, float[1]."""
        self.take_back()
        parameter = Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        parameter.grad = torch.full_like(parameter, PROBE)
        members.append(parameter)
        self._parameter, self._members = parameter, members
        self._mark = Mark(parameter.grad)
        return parameter.grad

    def take_back(self) -> None:
        """Removes it from the group, if it is lent."""
        if self._parameter is not None:
            self._members[:] = [one for one in self._members if one is not self._parameter]
            self._parameter, self._members = None, []

    def is_(self, parameter: object) -> bool:
        return self._parameter is not None and parameter is self._parameter

    def was_changed(self) -> bool:
        """Whether anything but clearing was done to its gradient since it was lent. In float16,
        and of a scale of 1, one can't tell."""
        grad = None if self._parameter is None else self._parameter.grad
        if grad is None or float(grad) == 0:
            return False
        return float(grad) != PROBE or not self._mark.fits(grad)

    def scale(self) -> float:
        """What a GradScaler has divided the gradients by. 1 in float16, which none would take."""
        grad = None if self._parameter is None else self._parameter.grad
        found = 0.0 if grad is None else float(grad)
        return PROBE / found if found > 0 and math.isfinite(found) else 1.0
