"""Meaning of torch's reduce operations, and their forming without the engine.

The engine forms SUM, AVG and PREMUL_SUM of floats, and of complex numbers as pairs of floats. All
other reductions are gathered and formed on each rank by the functions below, in the order of the
ranks, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import UnsupportedError
from lossycoll.runtime.engine.failures import Where

from .tensors import DTYPES, LOSSY_DTYPES, WIDER

_Op: Any = c10d.ReduceOp.RedOpType
SUM: Final = _Op.SUM
AVG: Final = _Op.AVG
PREMUL_SUM: Final = _Op.PREMUL_SUM

Local = Callable[[Tensor], Tensor]
"""A reduction of shape (ranks, ...) to (...)."""

_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Types that torch stores but can't add, and those of the same bits that it can."""
INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED)


@dataclass(frozen=True)
class Reduction:
    """A reduction of one dtype."""

    op: object  # torch's RedOpType. PREMUL_SUM is SUM with a ``factor``.
    native: bool  # Whether the engine can form it
    local: Local  # How it is formed without the engine
    factor: float | None = None  # What each rank multiplies its contribution by first, if anything
    mean: bool = False  # Whether ``op`` is AVG

    def over(self, rows: Tensor, members: Sequence[int]) -> Tensor:
        """Reduces one contribution per rank. A sum of floats stands for all ranks, as the engine's
        does: the mean over the members times the world. An average is over the members."""
        if len(members) == len(rows):
            return self.local(rows)
        result = self.local(rows[list(members)])
        return result * (len(rows) / len(members)) if self.native and self.op == SUM else result


def resolve(where: Where, name: str, dtype: torch.dtype, op: Any) -> Reduction:
    """The reduction that torch's ``op`` (a ReduceOp) asks for."""
    kind = op.op
    found = _plain(kind, dtype)
    if found is not None:
        return found
    if kind == PREMUL_SUM and (dtype.is_floating_point or dtype.is_complex):
        summed = _plain(SUM, dtype)
        if summed is not None:
            return replace(summed, factor=float(op.factor))
    raise UnsupportedError(
        f"{where}: {name} can't form the {kind.name} of {dtype}; it knows SUM, AVG, PRODUCT, "
        f"MIN and MAX of floats and integers, PREMUL_SUM of floats, and BAND, BOR and BXOR of "
        f"integers and bool; convert the tensor first"
    )


@lru_cache(maxsize=256)
def _plain(kind: object, dtype: torch.dtype) -> Reduction | None:
    """The reduction without a factor; None for what can't be done."""
    local = local_reduction(kind, dtype)
    native = kind in (SUM, AVG) and dtype in LOSSY_DTYPES
    return None if local is None else Reduction(kind, native, local, mean=kind == AVG)


def local_reduction(op: object, dtype: torch.dtype) -> Local | None:
    """A reduction of contributions by torch, for what the engine can't add.

    Rows are taken in the order of the ranks, so that all ranks get the same bits; 16-bit floats are
    added in float32.

    Returns a function of shape (ranks, ...) to (...); None for what has no meaning (bits of floats)
    or isn't known here.
    """
    if dtype == torch.bool:
        return _BOOLEAN.get(op)
    if op == AVG and dtype in INTEGERS:
        return _integer_mean(dtype)
    if dtype in _SIGNED:
        return _as_signed(op, dtype)
    if op in _BITWISE:
        return _rows(_BITWISE[op]) if dtype in INTEGERS else None
    if dtype.is_complex and op not in (SUM, AVG, _Op.PRODUCT):
        return None
    if dtype not in INTEGERS and dtype not in DTYPES and not dtype.is_complex:
        return None
    if op == AVG:
        return lambda rows: _sum(rows).div_(len(rows)).to(dtype)
    return _ARITHMETIC.get(op)


def _as_signed(op: object, dtype: torch.dtype) -> Local | None:
    """The reduction of an unsigned type by that of the signed one of the same bits. Sums, products
    and bits are the same. Order is, once the highest bit is flipped."""
    signed = _SIGNED[dtype]
    found = local_reduction(op, signed)
    if found is None:
        return None
    flip = torch.iinfo(signed).min if op in (_Op.MIN, _Op.MAX) else 0
    return lambda rows: found(rows.view(signed) ^ flip).bitwise_xor_(flip).view(dtype)


def _integer_mean(dtype: torch.dtype) -> Local | None:
    """NCCL's: the sum as SUM forms it (it wraps), over the ranks, truncated toward zero."""
    found, over = local_reduction(SUM, dtype), _unsigned_over if dtype in _SIGNED else over_ranks
    return None if found is None else lambda rows: over(found(rows), len(rows))


def over_ranks(total: Tensor, ranks: int) -> Tensor:
    """A sum of integers over the ranks, truncated toward zero, in the sum's dtype. A type of 8 bits
    holds the sum, but not every number of ranks."""
    wide = total.to(torch.int32) if total.itemsize == 1 else total
    return wide.div(ranks, rounding_mode="trunc").to(total.dtype)


def _unsigned_over(total: Tensor, ranks: int) -> Tensor:
    """:func:`over_ranks` of a type that torch can't divide; on a device it doesn't wait. Half of a
    number fits a signed one. Twice the quotient of that is the result, or 1 less."""
    signed = _SIGNED[total.dtype]
    wide = total.view(signed).to(torch.int64)
    if total.itemsize < 8:
        wide &= (1 << 8 * total.itemsize) - 1
    half = (wide >> 1) & torch.iinfo(torch.int64).max
    result = half.div(ranks, rounding_mode="trunc").mul_(2)
    result += wide - result * ranks >= ranks
    return result.to(signed).view(total.dtype)


def _sum(rows: Tensor) -> Tensor:
    """Sums in the type that they are added in."""
    total = rows[0].to(WIDER.get(rows.dtype, rows.dtype), copy=True)
    for row in rows[1:]:
        total += row
    return total


def _rows(combine: Callable[[Tensor, Tensor], Tensor]) -> Local:
    return lambda rows: reduce(combine, rows.unbind(0))


_ARITHMETIC: Final[dict[object, Local]] = {
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
_BOOLEAN: Final[dict[object, Local]] = {
    SUM: _rows(torch.logical_or),
    _Op.MAX: _rows(torch.logical_or),
    _Op.BOR: _rows(torch.logical_or),
    _Op.PRODUCT: _rows(torch.logical_and),
    _Op.MIN: _rows(torch.logical_and),
    _Op.BAND: _rows(torch.logical_and),
    _Op.BXOR: _rows(torch.logical_xor),
}
