"""Element types as they travel, and as they are added up, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
"""By the names that the reference executor takes."""


def wire_type(name: str) -> WireType:
    """The type of that name; ValueError if there is none."""
    if name not in WIRE_TYPES:
        raise ValueError(f"dtype is {name!r}, wanted one of {', '.join(WIRE_TYPES)}")
    return WIRE_TYPES[name]
