"""Checks that refuse a call before it gets a number: the group continues as if it was never made.

Each function raises UnsupportedError. ``where`` says whose call it is, ``name`` which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lossycoll.devices.registry import is_served
from lossycoll.errors import UnsupportedError
from lossycoll.runtime.engine.failures import Where

from .tensors import PLAIN, has_memory, nbytes, overlaps_itself, waits_for_its_result

T = TypeVar("T")


class Unawaited(UnsupportedError):
    """A tensor stands for a result that nobody has waited for. Who makes the call by a method of
    torch's never sees this: it is made again with the result."""


class Delegated(UnsupportedError):
    """The call is another backend's. Who makes it by a method of torch's never sees this."""

    def __init__(self, where: Where, name: str, backend: Any) -> None:
        super().__init__(
            f"{where}: {name} got tensors that the group has another backend for, "
            f"{type(backend).__name__}, which has no such call; use a group of 'lossy' alone"
        )
        self.backend = backend


def refusal(where: Where, name: str, what: str) -> UnsupportedError:
    """The error for ``what`` doesn't fit a group of this size."""
    return UnsupportedError(f"{where}: {name} got {what} a group of {where.world} ranks")


def check_readable(where: Where, name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses what the engine can't read as elements in memory, one by one."""
    for tensor in tensors:
        if not tensor.is_cpu and not is_served(tensor):
            raise UnsupportedError(
                f"{where}: {name} got a tensor on {tensor.device}, but backend 'lossy' serves "
                f"tensors on the CPU and on CUDA devices; copy it with .cpu(), or use a group of "
                f"another backend for it"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = tensor.dtype if tensor.is_quantized else tensor.layout
            raise UnsupportedError(
                f"{where}: {name} got a tensor of {kind}, but takes dense ones only; make it one "
                f"with .to_dense() or .dequantize() (all_reduce alone takes torch.sparse_coo as "
                f"well)"
            )
        if not has_memory(tensor):
            raise _without_memory(where, name, tensor)


def _without_memory(where: Where, name: str, tensor: Tensor) -> UnsupportedError:
    kind, error = type(tensor).__name__, UnsupportedError
    if waits_for_its_result(tensor):
        error, remedy = Unawaited, "pass what its .wait() returns"
    elif hasattr(tensor, "to_local"):
        remedy = "pass its .to_local(), or its .full_tensor() on all ranks of its mesh"
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        remedy = "call it outside of vmap, grad and other transforms of torch.func"
    elif type(tensor) in PLAIN:
        remedy = "its storage was freed, so make it as large as the tensor before the call"
    else:
        remedy = "pass the tensors that it wraps; in FakeTensorMode there is nothing to send"
    return error(f"{where}: {name} got a {kind} that has no memory of its own; {remedy}")


def check_writable(where: Where, name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses to fill a tensor several of whose elements share memory."""
    for tensor in tensors:
        if not tensor.is_contiguous() and overlaps_itself(tensor):
            raise UnsupportedError(
                f"{where}: {name} can't fill a tensor of shape {tuple(tensor.shape)} and stride "
                f"{tensor.stride()}, several of whose elements share one place (an expanded one); "
                f"give it memory of its own with .clone()"
            )


def only(where: Where, name: str, entries: Sequence[T]) -> T:
    """The one entry of a list that torch's interface leaves room for several in."""
    if len(entries) != 1:
        raise UnsupportedError(
            f"{where}: {name} got {len(entries)} tensors of this rank, but takes one at a time"
        )
    return entries[0]


def pairs(where: Where, name: str, one: Sequence[T], other: Sequence[T]) -> list[tuple[T, T]]:
    """The entries of two lists that must be equally long, as pairs."""
    if len(one) != len(other):
        raise refusal(where, name, f"lists of {len(one)} and {len(other)} tensors in")
    return list(zip(one, other, strict=True))


def check_dtypes(where: Where, name: str, tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        listed = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise refusal(where, name, f"tensors of different types ({listed}) in")


def check_chunks(where: Where, name: str, part: Tensor, whole: Tensor) -> None:
    """``whole`` must be one ``part`` per rank."""
    if part.dtype != whole.dtype or part.numel() * where.world != whole.numel():
        what = f"{whole.dtype}[{whole.numel()}] whose parts are {part.dtype}[{part.numel()}] in"
        raise refusal(where, name, what)


def check_whole(
    where: Where,
    name: str,
    whole: Tensor,
    encoding: str,
    counts: Sequence[int] | None = None,
) -> None:
    """Refuse a ``whole`` that isn't a chunk for each rank in a row, or can't be encoded so.
    ``counts``: elements of each chunk; None: all have as many."""
    fits, length = whole.numel() % where.world == 0, f"a multiple of {where.world}"
    if counts is not None:
        fits = len(counts) == where.world and min(counts) >= 0 and sum(counts) == whole.numel()
        length = f"the sum of {where.world} counts (got {list(counts)[:8]})"
    if whole.dim() != 1 or not whole.is_contiguous() or not fits:
        raise UnsupportedError(
            f"{where}: {name} got a tensor of shape {tuple(whole.shape)} and stride "
            f"{whole.stride()}, wanted one dimension, contiguous, its length {length}"
        )

    if encoding != "same" and whole.dtype is not torch.float32:
        raise UnsupportedError(
            f"{where}: {name} got {whole.dtype} to be sent as {encoding}, wanted torch.float32"
        )


def check_list(where: Where, name: str, tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """``parts`` must be one tensor like ``tensor`` per rank."""
    sizes = {(part.dtype, part.numel()) for part in parts}
    if len(parts) != where.world or sizes != {(tensor.dtype, tensor.numel())}:
        raise _bad_list(where, name, tensor, parts)


def uneven_sizes(
    where: Where, name: str, tensor: Tensor, parts: Sequence[Tensor]
) -> tuple[int, ...] | None:
    """The elements of each part, None if all have as many: there must be one part per rank, and
    this rank's like ``tensor``."""
    sizes = tuple(part.numel() for part in parts)
    alike = {part.dtype for part in parts} == {tensor.dtype}
    if len(parts) != where.world or not alike or sizes[where.rank] != tensor.numel():
        raise _bad_list(where, name, tensor, parts)
    return None if len(set(sizes)) == 1 else sizes


def _bad_list(where: Where, name: str, tensor: Tensor, parts: Sequence[Tensor]) -> UnsupportedError:
    listed = ", ".join(f"{part.dtype}[{part.numel()}]" for part in parts[:4])
    what = f"{tensor.dtype}[{tensor.numel()}] and a list of {len(parts)} tensors ({listed}) for"
    return refusal(where, name, what)


def split_bytes(where: Where, name: str, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """Bytes of ``tensor`` for each rank. ``sizes``: rows for each; empty: equal parts."""
    if not tensor.dim():
        raise refusal(where, name, "a tensor without dimensions to split for")
    rows = tensor.shape[0]
    if not sizes and rows % where.world == 0:
        sizes = [rows // where.world] * where.world
    if len(sizes) != where.world or sum(sizes) != rows or min(sizes) < 0:
        raise refusal(where, name, f"{rows} rows in parts of {list(sizes)} for")
    row = nbytes(tensor) // rows if rows else 0
    return [size * row for size in sizes]


def check_own_split(where: Where, name: str, send: Sequence[int], receive: Sequence[int]) -> None:
    """Refuses a rank that sends itself other bytes than it expects from itself."""
    own = where.rank
    if send[own] != receive[own]:
        what = f"{send[own]} bytes to itself where it expects {receive[own]}, in"
        raise refusal(where, name, what)
