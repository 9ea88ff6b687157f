"""A training method from outside the package: DDP that steps by the sign of the mean gradient.

Nothing in lossycoll knows it. Not for the process of the tests: importing it registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lossycoll.cli.demo.methods import Method, register


class SignSGD(Optimizer):
    """x <- x - lr sign(g)."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def wrap(
    model: nn.Module, optimizer_class: Callable[..., Optimizer], settings: Mapping[str, Any]
) -> tuple[nn.Module, Optimizer]:
    return DistributedDataParallel(model), SignSGD(model.parameters())


register(
    Method(
        name="sign-sgd",
        module=__name__,
        wrap=wrap,
        summary="each step follows the sign of the mean that arrived",
        options={"repair": 1},
        colour="tab:pink",
        marker="*",
    )
)
