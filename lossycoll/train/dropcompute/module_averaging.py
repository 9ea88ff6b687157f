"""Accumulated gradients of a plain module, which nothing else averages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.layout import lay_out
from lossycoll.train.common.works import Work, wait_all
from lossycoll.train.sharded.eligibility import spec

from .gradients import Submit, grad_flags_of, scale_gradients


class ModuleAveraging:
    """Averages the gradients of a plain module.

    They go in buckets, each rank's divided by the world's size, and are added up. A single rank
    sends nothing.
    """

    optimizer = None

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model = model
        self._laid_out: list[Parameter] = []
        """The parameters that the buckets were made for."""
        self._flats: list[Tensor] = []
        """The buckets, flat."""
        self._views: list[Tensor] = []
        """The place of each parameter's gradient in them."""
        self.collectives = Collectives(group, optional=True)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """As :attr:`~.averaging.GradientAveraging.parameters`."""
        return [p for p in self._model.parameters() if p.requires_grad]

    @property
    def grad_flags(self) -> Tensor:
        """As :attr:`~.averaging.GradientAveraging.grad_flags`."""
        return grad_flags_of(self.parameters)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As :meth:`~.averaging.GradientAveraging.no_sync`."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def average(self, submit: Submit) -> Work | None:
        """As :meth:`~.averaging.GradientAveraging.average`."""
        submitted = submit()
        if self.collectives.world == 1:
            return submitted
        self._lay_out()
        for parameter, view in zip(self._laid_out, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1 / self.collectives.world, out=view)
        wait_all([self.collectives.all_reduce_gradients(flat) for flat in self._flats])
        return submitted

    @torch.no_grad()
    def finish(self, grad_counts: Tensor, factor: float) -> None:
        """As :meth:`~.averaging.GradientAveraging.finish`."""
        if self.collectives.world > 1:
            counts = grad_counts.tolist()
            for parameter, view, count in zip(self._laid_out, self._views, counts, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif count:
                    parameter.grad = view.clone()
        scale_gradients(self.parameters, factor)

    def _lay_out(self) -> None:
        """Makes the buckets, and makes them again if parameters were frozen, unfrozen or added."""
        parameters = self.parameters
        same = len(parameters) == len(self._laid_out)
        if same and all(p is q for p, q in zip(parameters, self._laid_out, strict=True)):
            return
        self._laid_out = list(parameters)
        self._flats = []
        views: dict[int, Tensor] = {}
        for bucket in lay_out([spec(parameter, 0) for parameter in parameters], 1):
            first = parameters[bucket.members[0].index]
            flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
            self._flats.append(flat)
            for member in bucket.members:
                views[member.index] = flat.as_strided(member.shape, member.stride, member.begin)
        self._views = [views[index] for index in range(len(parameters))]
