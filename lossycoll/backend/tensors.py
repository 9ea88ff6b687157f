"""Tensors as the engine can take them, and the sums that it doesn't know."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lossycoll.runtime.engine.binding import DType

_Op: Any = c10d.ReduceOp.RedOpType
SUM: Final = _Op.SUM
AVG: Final = _Op.AVG
PREMUL_SUM: Final = _Op.PREMUL_SUM

DTYPES: Final = {
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
}
"""What the engine can add."""
GLOO_DTYPES: Final = frozenset(
    {*DTYPES, torch.int8, torch.uint8, torch.int32, torch.int64},
)
"""What gloo handles as we do. It takes a bool for a number."""

_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Types that torch stores but can't add, and those of the same bits that it can."""
_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED)


_NOTHING: Final = torch.zeros(8)


def address(tensor: Tensor) -> int:
    """Where the elements are; for an empty tensor anywhere valid, since nothing is touched."""
    return tensor.data_ptr() or _NOTHING.data_ptr()


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory is the elements in order, or such a copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.resolve_neg().resolve_conj()


def scaled(tensor: Tensor, factor: float | None) -> Tensor:
    """:func:`contiguous`; with a factor a copy, times that."""
    if factor is None:
        return contiguous(tensor)
    with torch.inference_mode():
        return contiguous(tensor.detach() * factor)


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that :func:`contiguous` gave. The tensor must outlive their use."""
    return memoryview((ctypes.c_char * nbytes(tensor)).from_address(tensor.data_ptr())).cast("B")


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all elements, one tensor after another; shape (sum of numel,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def room(tensors: Sequence[Tensor], *, kept: bool) -> tuple[Tensor, Callable[[], None] | None]:
    """One tensor for what is to fill all of these, shape (sum of numel,), and what brings it there.

    Where they lie in one memory one behind the other it is that memory, and nothing is left to do.
    Else it is new, with a copy of their elements if some may be ``kept`` as they are.
    """
    elements = sum(tensor.numel() for tensor in tensors)
    if _in_a_row(tensors):
        return tensors[0].detach().as_strided((elements,), (1,)), None
    rows = flat(tensors) if kept else tensors[0].new_empty(elements)
    return rows, lambda: spread(rows, tensors)


def _in_a_row(tensors: Sequence[Tensor]) -> bool:
    storage = tensors[0].untyped_storage().data_ptr()
    end = address(tensors[0])
    for tensor in tensors:
        # Two memories may touch by chance, but then they are not one tensor's.
        if tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end:
            return False
        if contiguous(tensor) is not tensor:
            return False
        end += nbytes(tensor)
    return True


def apart(source: Tensor, target: Tensor, own: int | None = None) -> Tensor:
    """``source``, or a copy of it where filling ``target`` would change what has yet to be read.

    Both contiguous. ``own``: bytes from source to target at which an overlap is harmless: there
    each element is read before it is replaced.
    """
    begin, other = source.data_ptr(), target.data_ptr()
    if begin + nbytes(source) <= other or other + nbytes(target) <= begin:
        return source
    return source if own is not None and other - begin == own else source.detach().clone()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements share one place (an expanded tensor): then it can't be filled."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def copy_back(buffer: Tensor, target: Tensor) -> Callable[[], None] | None:
    """What brings the result from ``buffer`` to the caller's tensor; None if it is there."""
    if buffer is target:
        return None
    return lambda: spread(buffer, [target])


def spread(buffer: Tensor, targets: Sequence[Tensor]) -> None:
    """The reverse of :func:`flat`: ``buffer``'s elements to ``targets``, in order."""
    # Nothing here is autograd's, and only in this mode can a thread of ours fill a tensor that the
    # caller made in it.
    with torch.inference_mode():
        elements, begin = buffer.reshape(-1), 0
        for target in targets:
            piece = elements[begin : begin + target.numel()]
            target.detach().copy_(piece.view(target.shape))
            begin += target.numel()


def local_reduction(op: object, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """How contributions are reduced where the engine can't: of shape (world, ...) to (...).

    Rows are taken in the order of the ranks, so that all ranks get the same bits; 16-bit floats are
    added in float32. None for what has no meaning (bits of floats) or isn't known here.
    """
    if dtype == torch.bool:
        return _BOOLEAN.get(op)
    if dtype in _SIGNED:
        return _as_signed(op, dtype)
    if op in _BITWISE:
        return _rows(_BITWISE[op]) if dtype in _INTEGERS else None
    if op == AVG:
        return None if dtype in _INTEGERS else lambda rows: _sum(rows).div_(len(rows)).to(dtype)
    if dtype.is_complex and op not in (SUM, _Op.PRODUCT):
        return None
    if dtype not in _INTEGERS and dtype not in DTYPES and not dtype.is_complex:
        return None
    return _ARITHMETIC.get(op)


def _as_signed(op: object, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """The reduction of an unsigned type by that of the signed one of the same bits.

    Sums, products and bits are the same. Order is, once the highest bit is flipped.
    """
    signed = _SIGNED[dtype]
    found = local_reduction(op, signed)
    if found is None:
        return None
    flip = torch.iinfo(signed).min if op in (_Op.MIN, _Op.MAX) else 0
    return lambda rows: found(rows.view(signed) ^ flip).bitwise_xor_(flip).view(dtype)


def _sum(rows: Tensor) -> Tensor:
    """Sums in the type that they are added in."""
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    return total


def _rows(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: reduce(combine, rows.unbind(0))


_ARITHMETIC: Final[dict[object, Callable[[Tensor], Tensor]]] = {
    SUM: lambda rows: _sum(rows).to(rows.dtype),
    _Op.PRODUCT: _rows(torch.mul),
    _Op.MIN: _rows(torch.minimum),
    _Op.MAX: _rows(torch.maximum),
}
_BITWISE: Final[dict[object, Callable[[Tensor, Tensor], Tensor]]] = {
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}
_BOOLEAN: Final[dict[object, Callable[[Tensor], Tensor]]] = {
    SUM: _rows(torch.logical_or),
    _Op.MAX: _rows(torch.logical_or),
    _Op.BOR: _rows(torch.logical_or),
    _Op.PRODUCT: _rows(torch.logical_and),
    _Op.MIN: _rows(torch.logical_and),
    _Op.BAND: _rows(torch.logical_and),
    _Op.BXOR: _rows(torch.logical_xor),
}
