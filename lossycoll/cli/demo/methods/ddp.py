"""Plain DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from .registry import Method

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
