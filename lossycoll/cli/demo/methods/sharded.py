"""ShardedOptimizer: each rank steps a part of the parameters and sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from .registry import Method, Theory

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def wrap(
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    **how: Any,
) -> tuple[nn.Module, Optimizer]:
    """``how``: options of ShardedOptimizer."""
    import lossycoll

    sharded = lossycoll.ShardedOptimizer(
        model.parameters(), optimizer_class, model=model, **how, **settings
    )
    return model, sharded


def wait(optimizer: Any) -> None:
    """Parameters travel during the next forward pass, whose modules wait for their own."""
    optimizer.wait_parameters()


def expected_drift(optimizer: Optimizer, loss: float) -> Theory:
    """From how the owners' values move, and how many were missing."""
    import lossycoll
    from lossycoll.cli.demo.drift_theory import OwnersTrail

    del loss  # which says how many packets are lost, and not how many come back
    assert isinstance(optimizer, lossycoll.ShardedOptimizer)
    return OwnersTrail(optimizer)


SHARDED: Final = Method(
    name="sharded",
    module=__name__,
    wrap=wrap,
    wait=wait,
    summary=(
        "parameters are sent, not gradients; a lost packet leaves a value that is a step or two old"
    ),
    expected_drift=expected_drift,
    colour="tab:purple",
    marker="P",
)
