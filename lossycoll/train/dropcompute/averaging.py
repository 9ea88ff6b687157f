"""How accumulated gradients become the mean over the ranks: the interface, and which way a model
takes.

DistributedDataParallel averages by its own reducer (ddp_averaging), ShardedOptimizer by its own,
and the gradients of a plain module are averaged here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lossycoll.errors import OptionError, UnsupportedError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.layout import lay_out
from lossycoll.train.common.replicas import is_dtensor
from lossycoll.train.common.works import Work, wait_all
from lossycoll.train.common.wrapped import check_keeps_parameters, ddp_of, innermost, steps_of
from lossycoll.train.sharded.eligibility import spec
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .ddp_averaging import DdpAveraging
from .gradients import NO_FLAGS, Submit, grad_flags_of, scale_gradients


class GradientAveraging(Protocol):
    """Averages the gradients of one model once this rank has stopped computing."""

    collectives: Collectives
    """Of the ranks that average."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The parameters whose gradients are averaged."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that averages the gradients itself, if one does."""

    @property
    def grad_flags(self) -> Tensor:
        """1 for each parameter that has a gradient at this rank, float64 [n]; empty if the ranks
        need not know. :meth:`finish` takes the sums over the ranks."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A scope whose backward passes accumulate gradients and send nothing."""

    def average(self, submit: Submit) -> Work | None:
        """Replaces the gradients by the mean over the ranks; returns what ``submit`` returned.

        It is called once, at the same place among the collectives on all ranks.
        """

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        """Multiplies gradients by ``factor``, from the mean over ranks to that over micro-batches.

        ``grad_counts`` is float64 (n,), the sums of the flags over the ranks.
        """


class ShardedAveraging:
    """Has the optimizer reduce, and scales the gradients of this rank's fragments."""

    grad_flags = NO_FLAGS

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.collectives = Collectives(optimizer.group)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """As :attr:`GradientAveraging.parameters`."""
        return self.optimizer.sharded_parameters

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As :meth:`GradientAveraging.no_sync`."""
        return self.optimizer.no_sync()

    def average(self, submit: Submit) -> Work | None:
        """As :meth:`GradientAveraging.average`."""
        submitted = submit()
        self.optimizer.reduce_gradients()
        return submitted

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        """As :meth:`GradientAveraging.finish`."""
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)


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
        """As :attr:`GradientAveraging.parameters`."""
        return [p for p in self._model.parameters() if p.requires_grad]

    @property
    def grad_flags(self) -> Tensor:
        """As :attr:`GradientAveraging.grad_flags`."""
        return grad_flags_of(self.parameters)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As :meth:`GradientAveraging.no_sync`."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def average(self, submit: Submit) -> Work | None:
        """As :meth:`GradientAveraging.average`."""
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
        """As :meth:`GradientAveraging.finish`."""
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


def averaging_of(model: object, group: dist.ProcessGroup | None) -> GradientAveraging:
    """The way of averaging for DDP (compiled or not), a ShardedOptimizer, or a plain module.

    UnsupportedError: another model, or one whose passes talk to other ranks. OptionError: a group
    for a model that has its own.
    """
    if isinstance(model, Optimizer):
        model = steps_of(model, "DropCompute")
    if isinstance(model, ShardedOptimizer):
        _check_no_group(group, "a ShardedOptimizer")
        return ShardedAveraging(model)
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"DropCompute was given a {type(model).__name__}; wanted: a module, plain or wrapped "
            f"by DistributedDataParallel, or a lossycoll.ShardedOptimizer"
        )
    ddp = ddp_of(model)
    if ddp is not None:
        _check_module(ddp)
        _check_no_group(group, "DistributedDataParallel")
        return DdpAveraging(ddp)
    model = innermost(model)
    _check_module(model)
    return ModuleAveraging(model, group)


def _check_no_group(group: dist.ProcessGroup | None, owner: str) -> None:
    if group is not None:
        raise OptionError(f"group was passed, but {owner} knows its own; leave it out")


def _check_module(model: nn.Module) -> None:
    """Ranks do different numbers of forward passes, so none of these may talk to each other."""
    for name, module in model.named_modules():
        check_keeps_parameters(module)
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"{name} is a SyncBatchNorm, whose forward pass waits for all ranks, but under "
                f"DropCompute ranks do different numbers of them; use BatchNorm, or GroupNorm"
            )
        if isinstance(module, DistributedDataParallel) and module is not model:
            raise UnsupportedError(
                f"{name} is a DistributedDataParallel within the module; pass that one, as what is "
                f"reduced by another can't be looked after from here"
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise UnsupportedError(
                f"parameter {name} is a DTensor (fully_shard, tensor parallelism): passes over it "
                f"wait for other ranks, but under DropCompute ranks do different numbers of them; "
                f"use DistributedDataParallel or lossycoll.ShardedOptimizer"
            )
