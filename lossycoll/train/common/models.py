"""Models as frameworks wrap them, and which ranks hold which part of their parameters.

Parameters of DDP and of plain modules are whole on every rank of a group. Those of fully_shard
(FSDP2) are DTensors on a mesh: the ranks of its replicated dimensions hold copies of one shard,
those of the other dimensions hold the other shards.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lossycoll.errors import UnsupportedError

from .collectives import own_group
from .layout import is_dense

LAYERS: Final = ("_orig_mod", "_forward_module", "module")
"""Attributes with a wrapper's module: torch.compile's, Lightning Fabric's, and DDP's."""
PLAIN_NAMES: Final = LAYERS[:2]  # layers that never appear in the names of parameters
INNER: Final = ("optimizer", "optim")  # attributes with a wrapper's optimizer: most, and torchft's
MOST_LAYERS: Final = 16


def steps_of(optimizer: object, method: str) -> Optimizer:
    """The optimizer whose steps a wrapper makes; UnsupportedError, which names ``method``: none.

    Accelerate's, Lightning's and torchft's wrappers are torch optimizers by their class, but have
    none of its hooks, since they never run its constructor. One that has hooks counts as the one
    that steps, whatever it wraps.
    """
    found = optimizer
    for _ in range(MOST_LAYERS):
        if isinstance(found, Optimizer) and "_optimizer_step_post_hooks" in vars(found):
            return found
        found = next((getattr(found, name) for name in INNER if hasattr(found, name)), None)
    name = type(optimizer).__name__
    raise UnsupportedError(
        f"optimizer is a {name}, wanted a torch.optim.Optimizer, or a wrapper that has one as "
        f"{name}.optimizer or {name}.optim; pass {method} the torch optimizer that makes the steps"
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A model, and what it wraps, from outside to inside; UnsupportedError: it is no module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"the model is a {type(model).__name__}, wanted a torch.nn.Module: pass the model "
            f"itself, not its parameters"
        )
    layers = [model]
    while (inner := _inside(layers[-1])) is not None and len(layers) < MOST_LAYERS:
        layers.append(inner)
    return layers


def _inside(model: nn.Module) -> nn.Module | None:
    check_keeps_parameters(model)
    for name in LAYERS:
        inner = model._modules.get(name)  # not getattr: wrappers hand on what they haven't
        if inner is not None:
            own = {id(each) for each in model.parameters()}
            return inner if own <= {id(each) for each in inner.parameters()} else None
    return None


def check_keeps_parameters(module: nn.Module) -> None:
    """Refuses (UnsupportedError) wrappers whose parameters are views of their own memory."""
    name = type(module).__name__
    if isinstance(module, _of_torch("fsdp", "FullyShardedDataParallel")):
        raise UnsupportedError(
            f"the model has a {name} (FSDP1), whose flat parameters are views of memory that comes "
            f"and goes; wrap it with fully_shard (FSDP2)"
        )
    if type(module).__module__.partition(".")[0] == "deepspeed":
        raise UnsupportedError(
            f"the model is a {name}, which reduces gradients and steps copies of the parameters by "
            f"itself; use the backend lossy without this method under it, or use "
            f"DistributedDataParallel with a torch optimizer"
        )


def innermost(model: nn.Module) -> nn.Module:
    """The module that has the names of the parameters.

    Models of one's own may have a ``module`` as well: it counts only around or within a known one.
    """
    layers = layers_of(model)
    known = [inner for outer, inner in pairwise(layers) if _is_known(outer)]
    return known[-1] if known else model


def _is_known(wrapper: nn.Module) -> bool:
    return isinstance(wrapper, DistributedDataParallel) or any(
        wrapper._modules.get(name) is not None for name in PLAIN_NAMES
    )


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    found = (each for each in layers_of(model) if isinstance(each, DistributedDataParallel))
    return next(found, None)


Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Holding:
    name: str  # the parameter's in the model
    parameter: nn.Parameter
    copies: Groups  # groups of ranks that hold the same, one for each such dimension of the mesh
    rest: Groups  # groups of ranks that hold the rest of it


def holdings_of(model: nn.Module, group: dist.ProcessGroup | None) -> list[Holding]:
    """The model's parameters, tied ones once, named as in the module that is wrapped.

    ``group``: the ranks with a copy; None: DDP's, else the default, or the mesh of DTensors.
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


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """The tensor of which ``part`` is this rank's, distributed as ``parameter`` is; of a plain
    parameter the part itself."""
    if not is_dtensor(parameter):
        return part
    whole: Any = parameter
    made: Any = sys.modules["torch.distributed.tensor"]
    found: Tensor = made.DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return found


def parts(state: Any) -> Any:
    """A state with this rank's part in place of each DTensor."""
    if isinstance(state, Tensor):
        return local(state)
    if isinstance(state, dict):
        return {key: parts(one) for key, one in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(parts(one) for one in state)
    return state


def is_dtensor(tensor: Tensor) -> bool:
    return isinstance(tensor, _of_torch("tensor", "DTensor"))


def _of_torch(module: str, name: str) -> Any:
    """A class of torch.distributed, or none: importing it takes seconds, and whoever has one of
    these objects has done so. Another thread may be importing it right now."""
    return getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())


def in_memory_order(tensor: Tensor) -> Tensor:
    """A view (n,) of all elements in order of memory; UnsupportedError if gaps or overlaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        raise UnsupportedError(
            f"a parameter of shape {tuple(tensor.shape)} has stride {tensor.stride()}, wanted one "
            f"whose elements fill its memory, each in a place of its own; make it so with "
            f".contiguous() before the optimizer is made"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _show_shards(model: nn.Module) -> None:
    """After a forward pass without a backward pass, FSDP2 still shows whole parameters."""
    for inner in model.modules():
        check_keeps_parameters(inner)
        if isinstance(inner, _of_torch("fsdp", "FSDPModule")):
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


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """A method as a hook that doesn't keep its object; does nothing when that is gone."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (here := found()) is not None:
            here(*args)

    return call


def is_finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # a single pass, and NaN gets through
    return bool(torch.isfinite(low) & torch.isfinite(high))


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
