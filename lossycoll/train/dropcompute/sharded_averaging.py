"""Accumulated gradients averaged by the ShardedOptimizer that steps with them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.works import Work
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .gradients import NO_FLAGS, Submit


class ShardedAveraging:
    """Has the optimizer reduce, and scales the gradients of this rank's fragments."""

    grad_flags = NO_FLAGS

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.collectives = Collectives(optimizer.group)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """As :attr:`~.averaging.GradientAveraging.parameters`."""
        return self.optimizer.sharded_parameters

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As :meth:`~.averaging.GradientAveraging.no_sync`."""
        return self.optimizer.no_sync()

    def average(self, submit: Submit) -> Work | None:
        """As :meth:`~.averaging.GradientAveraging.average`."""
        submitted = submit()
        self.optimizer.reduce_gradients()
        return submitted

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        """As :meth:`~.averaging.GradientAveraging.finish`."""
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)
