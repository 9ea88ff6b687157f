"""Codecs: how the elements of a buffer stand in a packet, in numpy.

native/codec.c is the same to the bit, and a test holds the two together. A codec knows elements,
not packets. What it makes of n elements can be decoded by itself, so its bytes need not be linear
in n, and what is encoded together is one packet's elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .lowbit import GROUPS, LowBit

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


ENCODINGS: Final = (
    *("same", "bf16", "fp16"),
    *("int8", "int6", "int5", "int4", "int3", "int2"),
)
"""By name, each at its number on the wire (lc_encoding). Those of few bits have parameters, which
:func:`named` adds to the name."""
LOW: Final = {name: int(name[3:]) for name in ENCODINGS[3:]}
"""Bits of an index, by encoding."""
PAIRS: Final = tuple(f"{a}/{b}" for a in LOW for b in LOW if a != b)
"""Encodings of an all-reduce's two phases: of contributions, and of the gathered means (Flash
Communication, arXiv 2412.04964, has int4/int8)."""
FEW_BITS: Final = (*LOW, *PAIRS)
"""Encodings whose elements are indices."""
_BOTH: Final = ":"
_GROUP_32: Final = 16
_SPIKES: Final = 32
_STOCHASTIC: Final = 64
"""LC_ENCODING_GROUP_32, LC_ENCODING_SPIKES and LC_ENCODING_STOCHASTIC."""
SPIKES: Final = "+spikes"
STOCHASTIC: Final = "+stochastic"
ROUNDINGS: Final = ("nearest", "stochastic")
"""Rounding of elements to indices of few bits."""
_NARROW: Final = {"bf16": wire_type("bf16"), "fp16": wire_type("f16")}
ENCODED: Final = "f32"
"""The only type that is encoded; elements of any other travel as they are."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """One encoding of one element type; :func:`codec_of` makes it."""

    encoding: str  # one of :data:`ENCODINGS`, with its parameters
    kind: WireType  # the type of the elements
    wire: WireType  # the type that travels; that of the elements where indices travel
    low: LowBit | None = None  # how elements become indices of a few bits; None: they don't

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

    def wire_bytes(self, n: int) -> int:
        """Bytes of ``n`` elements in one packet."""
        if self.low:
            return self.low.wire_bytes(n)
        return n * self.wire.wire.itemsize

    def elements(self, payload_bytes: int) -> int:
        """The most elements that fit into a packet's payload; in whole groups, where one fits."""
        if self.low:
            return self.low.elements(payload_bytes)
        return payload_bytes // self.wire.wire.itemsize

    def encode(self, x: Array, seed: int = 0) -> Bytes:
        """The bytes, shape (``wire_bytes(n)``,), of one packet's elements, (n,) of ``kind``.
        ``seed``, 64 bits, is of the packet's name, for codecs that round at random."""
        if self.low:
            return self.low.encode(np.ascontiguousarray(x), seed)
        return np.ascontiguousarray(x if self.same else _narrow(x, self.wire)).view(np.uint8)

    def decode(self, data: Bytes, n: int) -> Array:
        """The ``n`` elements that :meth:`encode`'s bytes stand for, of ``kind``."""
        if self.low:
            return self.low.decode(data, n)
        x = data.view(self.wire.wire)
        return x.copy() if self.same else _widen(x, self.wire)


def named(encoding: str, group: int, spikes: int = 0, rounding: str = ROUNDINGS[0]) -> str:
    """An encoding with its parameters: a name that ranks can compare.

    ``group`` is the elements that share a grid, and ``spikes`` whether ends of groups travel as
    floats, for encodings of few bits; others have no parameters.
    """
    if encoding in PAIRS:
        both = encoding.split("/")
        return _BOTH.join(named(one, group, spikes, rounding) for one in both)
    if encoding not in LOW:
        return encoding
    name = encoding + (f"/{group}" if group != GROUPS[0] else "")
    return name + (SPIKES if spikes else "") + (STOCHASTIC if rounding != ROUNDINGS[0] else "")


def _parts(encoding: str) -> tuple[str, int, bool, bool]:
    """(encoding, group, spikes, stochastic) of a name; a group that can't be is 0."""
    rest = encoding.removesuffix(STOCHASTIC)
    name, _, group = rest.removesuffix(SPIKES).partition("/")
    groups = {"": GROUPS[0]} | {str(n): n for n in GROUPS[1:]}
    return name, groups.get(group, 0), rest.endswith(SPIKES), rest != encoding


def phases(encoding: str) -> tuple[str, str]:
    """The names of :func:`named` of contributions, and of means that are gathered."""
    first, _, second = encoding.partition(_BOTH)
    return first, second or first


def elements_of(encoding: str, dtype: str, payload_bytes: int) -> int:
    """Number of elements that fit into a packet of either phase: see :meth:`Codec.elements`."""
    return min(codec_of(one, dtype).elements(payload_bytes) for one in phases(encoding))


def number_of(encoding: str) -> int:
    """The lc_encoding of a name of :func:`named`, of one phase, with its parameters."""
    name, group, spikes, stochastic = _parts(encoding)
    number = ENCODINGS.index(name) | (_GROUP_32 if group == 32 else 0)
    return number | (_SPIKES if spikes else 0) | (_STOCHASTIC if stochastic else 0)


def codec_of(encoding: str, dtype: str) -> Codec:
    """The codec of an encoding (:func:`named`, of one phase) for elements of a :func:`.wire_type`.
    ValueError: the type doesn't have the encoding."""
    kind = wire_type(dtype)
    if encoding == "same":
        return Codec(encoding, kind, kind)
    name, group, spikes, stochastic = _parts(encoding)
    again = named(name, group, spikes, ROUNDINGS[stochastic])
    if name not in ENCODINGS or encoding != again or not group:
        raise ValueError(f"encoding is {encoding!r}, wanted one of {', '.join(ENCODINGS)}")
    if dtype != ENCODED:
        raise ValueError(f"encoding is {encoding!r} for {dtype}, wanted same: only f32 is encoded")
    if name in LOW:
        return Codec(encoding, kind, kind, LowBit(LOW[name], group, spikes, stochastic))
    return Codec(encoding, kind, _NARROW[name])


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
