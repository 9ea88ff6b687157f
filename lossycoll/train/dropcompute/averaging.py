"""How accumulated gradients become the mean over the ranks once a rank has stopped computing: by
DDP (drop_ddp.py), by ShardedOptimizer, or by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lossycoll.errors import OptionError, UnsupportedError
from lossycoll.train.common.collectives import settle
from lossycoll.train.common.layout import lay_out
from lossycoll.train.common.replicas import is_dtensor
from lossycoll.train.drop_ranks import Ranks
from lossycoll.train.sharded.eligibility import spec
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .ddp_averaging import ByDdp
from .gradients import NO_FLAGS, Start, device_of, multiply


class Reduction(Protocol):
    """``reduce`` calls its argument once, when a collective that is to travel beside the gradients
    may be started: at the same place among the others at all ranks."""

    ranks: Ranks

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Those whose gradients are reduced."""

    @property
    def flags(self) -> Tensor:
        """Of which the sum over the ranks is wanted, by :meth:`finish`: float64 [n]."""

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """A block whose backward passes only accumulate."""

    def reduce(self, start: Start) -> None:
        """Gradients become the mean over the ranks of what was accumulated."""

    def finish(self, flags: Tensor, factor: float) -> None:
        """Multiplies them. ``flags``: the sums."""


def reduction_of(model: object, group: dist.ProcessGroup | None) -> Reduction:
    """By what ``model`` is: DDP, compiled or not, a ShardedOptimizer, or a plain module."""
    if isinstance(model, ShardedOptimizer):
        _no_group(group, "a ShardedOptimizer")
        return ByShardedOptimizer(model)
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"DropCompute was given a {type(model).__name__}; wanted: a module, plain or wrapped "
            f"by DistributedDataParallel, or a lossycoll.ShardedOptimizer"
        )
    _check_module(model)
    if isinstance(model, DistributedDataParallel):
        _no_group(group, "DistributedDataParallel")
        return ByDdp(model)
    return ByHand(model, group)


def _no_group(group: dist.ProcessGroup | None, owner: str) -> None:
    if group is not None:
        raise OptionError(f"group was passed, but {owner} knows its own; leave it out")


def _check_module(model: nn.Module) -> None:
    """Ranks do different numbers of forward passes, so none of these may talk to each other."""
    for name, module in model.named_modules():
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


class ByShardedOptimizer:
    """The gradients of a rank's fragments are scaled, which the optimizer steps."""

    flags = NO_FLAGS

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.ranks = Ranks(optimizer.group, device_of(self.parameters))

    @property
    def parameters(self) -> Sequence[Parameter]:
        return self.optimizer.sharded_parameters

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def reduce(self, start: Start) -> None:
        start()
        self.optimizer.reduce_gradients()

    def finish(self, flags: Tensor, factor: float) -> None:
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)


class ByHand:
    """A module that nothing else reduces: gradients travel in buckets, as sums of what each rank
    has divided by the world. In a world of one nothing happens."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model = model
        self._laid_out: list[Parameter] = []
        self._flats: list[Tensor] = []
        self._views: list[Tensor] = []
        self.ranks = Ranks(group, device_of(self.parameters))

    @property
    def parameters(self) -> Sequence[Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    @property
    def flags(self) -> Tensor:
        """Which have a gradient here."""
        return torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float64)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @torch.no_grad()
    def reduce(self, start: Start) -> None:
        start()
        if self.ranks.world == 1:
            return
        self._lay_out()
        for parameter, view in zip(self._laid_out, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1 / self.ranks.world, out=view)
        group = self.ranks.group
        settle([dist.all_reduce(flat, group=group, async_op=True) for flat in self._flats])

    @torch.no_grad()
    def finish(self, flags: Tensor, factor: float) -> None:
        if self.ranks.world > 1:
            used = flags.tolist()
            for parameter, view, count in zip(self._laid_out, self._views, used, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif count:
                    parameter.grad = view.clone()
        if factor != 1.0:
            multiply(self.parameters, factor)

    def _lay_out(self) -> None:
        """Anew where parameters were frozen, unfrozen or added."""
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
