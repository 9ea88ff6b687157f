"""What becomes of floats in few bits, without sending them: the engine's codecs on memory."""

from __future__ import annotations

import numpy as np

from lossycoll._native import ffi, lib
from lossycoll.plan.codec import number_of


def rounded(encoding: str, source: int, target: int, count: int, seed: int = 0) -> None:
    """Writes what a receiver would make of elements that travel in one packet.

    Where packets begin makes no difference, as long as they begin with a group.

    Args:
        encoding: A name of plan.codec's, of one phase.
        source: Address of float32, ``count`` of them.
        target: Address of room for as many; may be ``source``.
        count: Elements, up to 2^32 - 1.
        seed: 64 bits, of what is drawn.

    Raises:
        ValueError: There are too many elements.
    """
    if not 0 <= count < 1 << 32:
        raise ValueError(f"{count} elements, wanted up to 2**32 - 1: encode them in parts")
    number = number_of(encoding)
    room = np.empty(lib.lc_encoding_bytes(number, lib.LC_F32, count), np.uint8)
    packet = ffi.from_buffer(room)
    lib.lc_encode(number, lib.LC_F32, 1, packet, ffi.cast("void *", source), count, seed)
    lib.lc_decode(number, lib.LC_F32, 1, ffi.cast("void *", target), packet, count)
