"""Codecs: how the elements of a buffer stand in a packet, in numpy.

native/codec.c is the same to the bit, and a test holds the two together. A codec knows elements,
not packets. What it makes of n elements can be decoded by itself, so its bytes need not be linear
in n, and what is encoded together is one packet's elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan import codec as plan
from lossycoll.plan.codec import Bytes

from .lowbit import decode, encode

Array = NDArray[Any]


@dataclass(frozen=True)
class WireType:
    """An element type. numpy has no bfloat16: its elements are uint16 bit patterns."""

    name: str  # what the reference executor calls it
    wire: np.dtype[Any]  # numpy type of an element in buffers and packets
    acc: np.dtype[Any] | None  # numpy type that sums are in; None for bytes, which are never added

    def widen(self, x: Array) -> Array:
        """Elements as sums hold them; exact. ``x``: ``wire``, any shape."""
        if self.name == "bf16":
            bits: Array = x.astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32)
        return x.astype(self.acc)

    def narrow(self, x: Array) -> Array:
        """Sums as they are stored and sent: to the nearest, ties to even. ``x``: ``acc``."""
        if self.name != "bf16":
            with np.errstate(over="ignore"):  # too large for float16 is infinity, as in C
                return x.astype(self.wire)
        bits: Array = x.astype(np.float32).view(np.uint32)
        tie = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + (np.uint32(0x7FFF) + tie)) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        wire: Array = np.where(np.isnan(x), quiet, rounded).astype(np.uint16)
        return wire


_F32 = np.dtype(np.float32)


WIRE_TYPES: Final = {
    "f32": WireType("f32", _F32, _F32),
    "f64": WireType("f64", np.dtype(np.float64), np.dtype(np.float64)),
    "f16": WireType("f16", np.dtype(np.float16), _F32),
    "bf16": WireType("bf16", np.dtype(np.uint16), _F32),
    "bytes": WireType("bytes", np.dtype(np.uint8), None),
}
"""Wire types, by the reference executor's names."""


def wire_type(name: str) -> WireType:
    """The type of that name; ValueError if there is none."""
    if name not in WIRE_TYPES:
        raise ValueError(f"dtype is {name!r}, wanted one of {', '.join(WIRE_TYPES)}")
    return WIRE_TYPES[name]


_NARROW: Final = {"bf16": wire_type("bf16"), "fp16": wire_type("f16")}


@dataclass(frozen=True)
class Codec(plan.Codec):
    """One encoding of one element type; :func:`codec_of` makes it."""

    kind: WireType = field(kw_only=True)  # the type of the elements
    wire: WireType = field(kw_only=True)  # the type that travels, unless indices do

    @property
    def same(self) -> bool:
        """True if elements travel as they are."""
        return self.encoding == "same"

    @property
    def divides(self) -> bool:
        """True if partial sums are divided by :meth:`divisor` on their way."""
        return self.wire.name == "f16"

    def divisor(self, weight: NDArray[np.int64]) -> NDArray[np.float64]:
        """Divisor of partial sums of so many contributions: powers of two, which round
        nothing. A sum may exceed what float16 holds although each contribution fits."""
        if not self.divides:
            return np.ones(len(weight))
        return np.array([2.0 ** max(int(w) - 1, 0).bit_length() for w in weight])

    def encode(self, x: Array, seed: int = 0) -> Bytes:
        """The bytes, shape (``wire_bytes(n)``,), of one packet's elements, (n,) of ``kind``.
        ``seed``, 64 bits, is of the packet's name, for codecs that round at random."""
        if self.low:
            return encode(self.low, np.ascontiguousarray(x), seed)
        return np.ascontiguousarray(x if self.same else _narrow(x, self.wire)).view(np.uint8)

    def decode(self, data: Bytes, n: int) -> Array:
        """The ``n`` elements that :meth:`encode`'s bytes stand for, of ``kind``."""
        if self.low:
            return decode(self.low, data, n)
        x = data.view(self.wire.wire)
        return x.copy() if self.same else _widen(x, self.wire)


def codec_of(encoding: str, dtype: str) -> Codec:
    """The codec of an encoding (``named``, of one phase) for elements of a :func:`wire_type`.
    ValueError: the type doesn't have the encoding."""
    kind, made = wire_type(dtype), plan.codec_of(encoding, dtype)
    return Codec(
        made.encoding, made.itemsize, made.low, kind=kind, wire=_NARROW.get(encoding, kind)
    )


def _narrow(x: Array, wire: WireType) -> Array:
    """To the nearest, ties to even. NaNs are made quiet and keep what fits of their bits, as
    hardware does; numpy leaves that to the machine."""
    if wire.name == "bf16":
        return wire.narrow(x)
    bits = x.view(np.uint32) >> np.uint32(13)
    nan = (bits >> np.uint32(3)) & np.uint32(0x8000) | np.uint32(0x7E00) | bits & np.uint32(0x3FF)
    half: Array = np.where(np.isnan(x), nan, wire.narrow(x).view(np.uint16)).astype(np.uint16)
    return half.view(np.float16)


def _widen(x: Array, wire: WireType) -> Array:
    """Exact. An fp16's NaN is made quiet, as hardware does; a bf16 is the upper half of a float."""
    if wire.name == "bf16":
        return wire.widen(x)
    bits = x.view(np.uint16).astype(np.uint32)
    nan = (bits & np.uint32(0x8000)) << np.uint32(16) | np.uint32(0x7FC00000)
    nan |= (bits & np.uint32(0x3FF)) << np.uint32(13)
    with np.errstate(invalid="ignore"):  # a signalling NaN is none of the caller's doing
        wide = wire.widen(x).view(np.uint32)
    found: Array = np.where(np.isnan(x), nan, wide).view(np.float32)
    return found
