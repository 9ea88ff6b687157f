"""Encodings of elements in packets: names, numbers, sizes.

native/codec.c and native/lowbit.c encode; tests/oracle has the same in numpy.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PLANES: Final = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths that an index is split into, low bits first, by its bits."""
GROUPS: Final = (128, 32)
"""Numbers of elements that may share a grid."""


@dataclass(frozen=True)
class LowBit:
    """Encoding of float32 in indices of a few bits."""

    bits: int  # of an index
    group: int  # elements that share a grid
    spikes: bool = False  # whether the least and the greatest of a group travel as floats
    # whether indices are rounded up or down at random, such that their mean is the element; else to
    # the nearest
    stochastic: bool = False

    @property
    def levels(self) -> int:
        return (1 << self.bits) - 1

    @property
    def number(self) -> int:
        """The lc_encoding, with LC_ENCODING_GROUP_32, _SPIKES and _STOCHASTIC."""
        parameters = (self.group == 32) << 4 | self.spikes << 5 | self.stochastic << 6
        return ENCODINGS.index(f"int{self.bits}") | parameters

    def groups(self, n: int) -> int:
        return -(-n // self.group)

    def wire_bytes(self, n: int) -> int:
        """Bytes of ``n`` elements in one packet."""
        planes = sum(-(-n * width // 8) for width in PLANES[self.bits])
        return planes + (5 + 8 if self.spikes else 5) * self.groups(n)

    def elements(self, payload_bytes: int) -> int:
        """The most elements that fit, in whole groups where one fits."""
        every = range(8 * payload_bytes + 1)
        fit = bisect_right(every, payload_bytes, key=self.wire_bytes) - 1
        return fit - fit % self.group if fit > self.group else fit


SIZES: Final = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "bytes": 1}
"""Bytes of an element, by the dtype's name."""
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
SPIKES: Final = "+spikes"
STOCHASTIC: Final = "+stochastic"
ROUNDINGS: Final = ("nearest", "stochastic")
"""Rounding of elements to indices of few bits."""
ENCODED: Final = "f32"
"""The only type that is encoded; elements of any other travel as they are."""


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


_LOW_BITS: Final = {
    named(name, group, spikes, rounding): LowBit(bits, group, bool(spikes), rounding != "nearest")
    for (name, bits), group, spikes, rounding in product(LOW.items(), GROUPS, (0, 1), ROUNDINGS)
}
"""Encodings of few bits, by their names with parameters."""


def phases(encoding: str) -> tuple[str, str]:
    """The names of :func:`named` of contributions, and of means that are gathered."""
    first, _, second = encoding.partition(_BOTH)
    return first, second or first


def number_of(encoding: str) -> int:
    """The lc_encoding of a name of :func:`named`, of one phase, with its parameters."""
    low = _LOW_BITS.get(encoding)
    return low.number if low else ENCODINGS.index(encoding)


@dataclass(frozen=True)
class Codec:
    """One encoding of one element type; :func:`codec_of` makes it."""

    encoding: str  # one of :data:`ENCODINGS`, with its parameters
    itemsize: int  # bytes of an element that travels, unless indices do
    low: LowBit | None = None  # how elements become indices of a few bits; None: they don't

    def wire_bytes(self, n: int) -> int:
        return self.low.wire_bytes(n) if self.low else n * self.itemsize

    def elements(self, payload_bytes: int) -> int:
        """The most elements that fit into a packet's payload; in whole groups, where one fits."""
        return self.low.elements(payload_bytes) if self.low else payload_bytes // self.itemsize


def codec_of(encoding: str, dtype: str) -> Codec:
    """The codec of an encoding (:func:`named`, of one phase) for a dtype of :data:`SIZES`.
    ValueError: the type doesn't have the encoding."""
    if dtype not in SIZES:
        raise ValueError(f"dtype is {dtype!r}, wanted one of {', '.join(SIZES)}")
    if encoding == "same":
        return Codec(encoding, SIZES[dtype])
    low = _LOW_BITS.get(encoding)
    if low is None and encoding not in ENCODINGS:
        raise ValueError(f"encoding is {encoding!r}, wanted one of {', '.join(ENCODINGS)}")
    if dtype != ENCODED:
        raise ValueError(f"encoding is {encoding!r} for {dtype}, wanted same: only f32 is encoded")
    return Codec(encoding, SIZES["bf16"], low)


def elements_of(encoding: str, dtype: str, payload_bytes: int) -> int:
    """Number of elements that fit into a packet of either phase: see :meth:`Codec.elements`."""
    return min(codec_of(one, dtype).elements(payload_bytes) for one in phases(encoding))
