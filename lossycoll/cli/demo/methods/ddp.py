"""DistributedDataParallel, plain and with DriftBound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from .registry import Method, Theory

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def wrap(
    model: nn.Module, optimizer_class: Callable[..., Optimizer], settings: Mapping[str, Any]
) -> tuple[nn.Module, Optimizer]:
    """DDP's wrapper forward, the optimizer of the model's parameters as it is."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model), optimizer_class(model.parameters(), **settings)


DDP: Final = Method(
    name="ddp",
    module=__name__,
    wrap=wrap,
    run="lossy",
    summary=(
        "a rank that a mean does not reach continues with its own gradient, so replicas drift "
        "apart for as long as training lasts"
    ),
    colour="tab:red",
    marker="D",
)


PERIOD: Final = 16
"""Steps in which DriftBound brings all parameters together once."""


def attach(forward: nn.Module, optimizer: Optimizer, period: int = PERIOD) -> object:
    """DriftBound, which hooks into the optimizer's step."""
    import lossycoll

    return lossycoll.DriftBound(forward, optimizer, period)


def expected_drift(optimizer: Optimizer, loss: float, period: int = PERIOD) -> Theory:
    """From the replicas' own steps."""
    from lossycoll.cli.demo.drift_theory import OwnSteps

    return OwnSteps(optimizer, period, loss)


DRIFT_BOUND: Final = Method(
    name="ddp+driftbound",
    module=__name__,
    wrap=wrap,
    attach=attach,
    run="bounded",
    summary=f"DriftBound brings 1/{PERIOD} of the parameters together after each step",
    expected_drift=expected_drift,
    colour="tab:orange",
)
