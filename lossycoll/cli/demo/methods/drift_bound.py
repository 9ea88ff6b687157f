"""DistributedDataParallel with DriftBound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .ddp import wrap
from .registry import Method, Theory

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

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
