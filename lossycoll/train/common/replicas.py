"""Parameters that a model keeps at this rank, and which other ranks keep the same or the rest.

Parameters of DDP and of plain modules are whole on every rank of a group. Those of fully_shard
(FSDP2) are DTensors on a mesh: the ranks of its replicated dimensions hold copies of one shard,
those of the other dimensions hold the other shards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossycoll.errors import UnsupportedError

from .collectives import own_group
from .layout import is_dense
from .wrapped import check_keeps_parameters, ddp_of, innermost

Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Holding:
    """Part of one parameter that this rank holds."""

    name: str  # the parameter's in the model
    parameter: nn.Parameter
    copies: Groups
    """Groups of ranks that hold the same, one for each such dimension of the mesh."""
    rest: Groups
    """Groups of ranks that hold the rest of it."""

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same."""
        return math.prod(dist.get_world_size(group) for group in self.copies)


def holdings_of(model: nn.Module, group: dist.ProcessGroup | None) -> list[Holding]:
    """The model's parameters, tied ones once, named as in the module that is wrapped.

    The model is plain, wrapped (DDP, torch.compile, ...) or of fully_shard's. ``group``: the ranks
    with a copy; None: DDP's, else the default. UnsupportedError: FSDP1, DeepSpeed, or a group for
    DTensors.
    """
    ddp, inner = ddp_of(model), innermost(model)
    if ddp is not None and group is None:
        group = ddp.process_group
    _show_shards(inner)
    return [_holding(name, parameter, group) for name, parameter in inner.named_parameters()]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, or of a DTensor: a view without autograd."""
    whole: Any = tensor
    held: Tensor = whole.to_local() if is_dtensor(tensor) else whole
    return held.detach()


def is_dtensor(tensor: Tensor) -> bool:
    """True if a tensor is one of several ranks."""
    # Importing it takes seconds, and whoever has one has done so.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A view (n,) of all elements in order of memory; UnsupportedError if gaps or overlaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor.shape, tensor.stride()):
        raise UnsupportedError(
            f"a parameter of shape {tuple(tensor.shape)} has stride {tensor.stride()}, wanted one "
            f"whose elements fill its memory, each in a place of its own; make it so with "
            f".contiguous() before the optimizer is made"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _show_shards(model: nn.Module) -> None:
    """After a forward pass without a backward pass, FSDP2 still shows whole parameters."""
    module = sys.modules.get("torch.distributed.fsdp")
    for inner in model.modules():
        check_keeps_parameters(inner)
        if module is not None and isinstance(inner, module.FSDPModule):
            inner.reshard()


def _holding(name: str, parameter: nn.Parameter, group: dist.ProcessGroup | None) -> Holding:
    if not is_dtensor(parameter):
        return Holding(name, parameter, (own_group(group),), ())
    if group is not None:
        raise UnsupportedError(
            f"parameter {name} is a DTensor, whose mesh says who holds copies of it, but group= "
            f"was passed; leave it out"
        )
    described: Any = parameter
    copies: list[dist.ProcessGroup] = []
    rest: list[dist.ProcessGroup] = []
    for dimension, placement in enumerate(described.placements):
        if placement.is_partial():
            raise UnsupportedError(
                f"parameter {name} is a DTensor placed as {described.placements}, wanted no "
                f"Partial: each rank holds an addend of it, and not a copy"
            )
        to = copies if placement.is_replicate() else rest
        to.append(described.device_mesh.get_group(dimension))
    return Holding(name, parameter, tuple(copies), tuple(rest))


def batches(tensors: list[Tensor], elements: int) -> Iterator[list[tuple[int, Tensor]]]:
    """Cuts tensors without gaps into spans, in batches of at most ``elements``.

    A span is the number of the tensor, and a one-dimensional view.
    """
    batch: list[tuple[int, Tensor]] = []
    room = elements
    for number, tensor in enumerate(tensors):
        row = in_memory_order(tensor)
        for begin in range(0, row.numel(), elements):
            span = row[begin : begin + elements]
            if span.numel() > room:
                yield batch
                batch, room = [], elements
            batch.append((number, span))
            room -= span.numel()
    if batch:
        yield batch


def as_real(tensor: Tensor) -> Tensor:
    """A view of complex elements as pairs of real ones; other tensors as they are."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
