"""State that DriftBound keeps together: parameters, and if asked for the state of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import UnsupportedError
from lossycoll.train.common.replicas import Holding, holdings_of, in_memory_order, local

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)


@dataclass(frozen=True, eq=False)
class Source:
    """A parameter, or a tensor of its state."""

    name: str  # as errors call it
    parameter: nn.Parameter
    key: str | None  # that of the state; None for the parameter itself

    @property
    def identity(self) -> tuple[str, int]:
        """Identity, also among tensors of another optimizer."""
        return self.name, id(self.parameter)

    def tensor(self, optimizer: Optimizer) -> Tensor | None:
        """This rank's part now, a view; None for state that isn't there any more."""
        if self.key is None:
            return local(self.parameter)
        value = optimizer.state.get(self.parameter, {}).get(self.key)
        return local(value) if isinstance(value, Tensor) else None


@dataclass(frozen=True)
class Layout:
    """Memory layout of a tensor."""

    dtype: torch.dtype  # its type
    shape: torch.Size
    stride: tuple[int, ...]  # elements from one index to the next, by dimension


def layout_of(tensor: Tensor) -> Layout:
    """Layout of a tensor in memory now."""
    return Layout(tensor.dtype, tensor.shape, tensor.stride())


def stepped(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None
) -> list[Holding]:
    """This rank's holdings of the model's parameters that the optimizer steps; see ``holdings_of``.

    UnsupportedError: there are none.
    """
    members = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
    holdings = [
        holding
        for holding in holdings_of(model, group)
        if id(holding.parameter) in members and holding.parameter.requires_grad
    ]
    if not holdings:
        raise UnsupportedError(
            "the optimizer steps none of the model's parameters that require gradients; pass "
            "the optimizer that was made of this model's parameters"
        )
    return holdings


def sources_of(holdings: Sequence[Holding], optimizer: Optimizer, *, state: bool) -> list[Source]:
    """The tensors to be kept together, in the same order on all ranks.

    With ``state`` each parameter is followed by its element-wise state.
    """
    sources = []
    for holding in holdings:
        sources.append(Source(holding.name, holding.parameter, None))
        for key, value in sorted(optimizer.state.get(holding.parameter, {}).items()):
            if state and _is_elementwise(key, value, holding.parameter):
                sources.append(Source(f"{holding.name}, {key}", holding.parameter, key))
    return sources


def group_of(holdings: Sequence[Holding]) -> dist.ProcessGroup:
    """The one group that holds copies of all of them; UnsupportedError if none or several do."""
    first = holdings[0]
    for holding in holdings:
        copies = [group for group in holding.copies if dist.get_world_size(group) > 1]
        if holding.rest and not copies:
            raise UnsupportedError(
                f"parameter {holding.name} is sharded and has no copies: nothing can drift, and "
                f"there is nothing to bound; DriftBound is for DDP, and for fully_shard on a mesh "
                f"with a replicated dimension (HSDP)"
            )
        if len(copies) > 1 or holding.copies != first.copies:
            raise UnsupportedError(
                f"parameters {first.name} and {holding.name} have copies in {len(first.copies)} "
                f"and {len(holding.copies)} groups, or in different ones, wanted one for all; "
                f"attach one DriftBound for each, with optimizers of their own"
            )
    larger = [group for group in first.copies if dist.get_world_size(group) > 1]
    return (larger or list(first.copies))[0]


def device_of(tensors: Sequence[tuple[str, Tensor]]) -> torch.device:
    """The one device of all (name, tensor); else, or if one can't be sent, UnsupportedError."""
    first_name, first = tensors[0]
    for name, tensor in tensors:
        if tensor.device != first.device:
            raise UnsupportedError(
                f"{first_name} is on {first.device} and {name} on {tensor.device}, wanted all on "
                f"one device; give each its own optimizer and DriftBound"
            )
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
            raise UnsupportedError(
                f"{name} is {tensor.layout} of {tensor.dtype}, wanted a dense tensor of "
                f"{', '.join(str(dtype) for dtype in DTYPES)}"
            )
        in_memory_order(tensor)
    return first.device


def _is_elementwise(key: object, value: object, parameter: Tensor) -> bool:
    return (
        key != "step"
        and isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype in DTYPES
    )
