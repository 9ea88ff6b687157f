"""State that DriftBound keeps together, and how it is cut into slices of equal bytes.

All tensors lie in one row of bytes, each at a multiple of 16, so that every element is whole in
every chunk. The row is cut into ``period`` slices and each slice into one chunk for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import UnsupportedError
from lossycoll.train.common.layout import round_up
from lossycoll.train.common.models import Holding, holdings_of, in_memory_order, local

ALIGN: Final = 16  # bytes: the largest element's (complex128)


@dataclass(frozen=True, slots=True)
class ElementRange:
    tensor: int  # the tensor's number
    begin: int  # the first element
    end: int  # after the last
    at: int  # the byte of the chunk at which they begin


@dataclass(frozen=True)
class Slices:
    world: int  # chunks of each: one for each rank
    chunk_bytes: int  # most bytes of a chunk
    chunks: tuple[tuple[ElementRange, ...], ...]
    """``chunks[s * world + c]``: the pieces of chunk c of slice s. The last chunks are empty where
    there are fewer bytes than chunks."""

    def of(self, number: int) -> tuple[tuple[ElementRange, ...], ...]:
        return self.chunks[number * self.world : (number + 1) * self.world]

    def empty(self, number: int) -> bool:
        return not any(self.of(number))


def slice_up(sizes: Sequence[tuple[int, int]], period: int, world: int) -> Slices:
    """Cuts tensors into slices, the same on all ranks.

    ``sizes`` has elements and bytes of an element by tensor; the bytes divide ALIGN.
    """
    rounded = (round_up(elements * itemsize, ALIGN) for elements, itemsize in sizes)
    *begins, total = accumulate(rounded, initial=0)
    chunk = max(ALIGN, round_up(-(-total // (period * world)), ALIGN))
    chunks: list[list[ElementRange]] = [[] for _ in range(period * world)]
    for tensor, (begin, (elements, itemsize)) in enumerate(zip(begins, sizes, strict=True)):
        done = 0
        while done < elements:
            number, at = divmod(begin + done * itemsize, chunk)
            end = min(elements, done + (chunk - at) // itemsize)
            chunks[number].append(ElementRange(tensor, done, end, at))
            done = end
    return Slices(world, chunk, tuple(tuple(pieces) for pieces in chunks))


def slice_owner(number: int, chunk: int, sweep: int, world: int) -> int:
    """The rank whose values of a chunk all take, in the ``sweep``-th sending of all slices.

    Over ``world`` sweeps each rank owns each chunk once, and in every slice each rank owns one.
    """
    return (chunk + number + sweep) % world


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
        return self.name, id(self.parameter)

    def tensor(self, optimizer: Optimizer) -> Tensor | None:
        """This rank's part now, a view; None for state that isn't there any more."""
        if self.key is None:
            return local(self.parameter)
        value = optimizer.state.get(self.parameter, {}).get(self.key)
        return local(value) if isinstance(value, Tensor) else None


Layout: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def layout_of(tensor: Tensor) -> Layout:
    """Type, shape and strides of a tensor in memory now."""
    return tensor.dtype, tensor.shape, tensor.stride()


def stepped(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None
) -> list[Holding]:
    """This rank's holdings of the model's parameters that the optimizer steps."""
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
    """The tensors to be kept together; with ``state`` each parameter is followed by its state."""
    sources = []
    for holding in holdings:
        sources.append(Source(holding.name, holding.parameter, None))
        for key, value in sorted(optimizer.state.get(holding.parameter, {}).items()):
            if state and _is_elementwise(key, value, holding.parameter):
                sources.append(Source(f"{holding.name}, {key}", holding.parameter, key))
    return sources


def group_of(holdings: Sequence[Holding]) -> dist.ProcessGroup:
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
