"""Floats in few bits without sending them: the engine's codecs on memory."""

from __future__ import annotations

import numpy as np

from lossycoll._native import ffi, lib
from lossycoll.plan.codec import ENCODED, GROUPS, Bytes, Floats, LowBit, codec_of, number_of


def rounded(
    encoding: str,
    source: int,
    target: int,
    count: int,
    seed: int = 0,
    per_packet: int = GROUPS[0],
) -> None:
    """Writes what a receiver would make of elements that travel encoded.

    Where packets begin makes no difference, as long as they begin with a group.

    ``source``: address of float32, ``count`` of them. ``target``: address of room for as many; may
    be ``source``. ``seed``: 64 bits, of what is drawn.
    """
    if not 0 <= count < 1 << 32:
        raise ValueError(f"{count} elements, wanted up to 2**32 - 1: encode them in parts")
    number, low = number_of(encoding), codec_of(encoding, ENCODED).low
    each = per_packet if low and per_packet % low.group else max(1, count)
    room = np.empty(lib.lc_encoding_bytes(number, lib.LC_F32, each), np.uint8)
    packet = ffi.from_buffer(room)
    for at in range(0, count, each):
        n, begin = min(each, count - at), 4 * at
        lib.lc_encode(number, lib.LC_F32, 1, packet, ffi.cast("void *", source + begin), n, seed)
        lib.lc_decode(number, lib.LC_F32, 1, ffi.cast("void *", target + begin), packet, n)


def encode(how: LowBit, x: Floats, out: Bytes, seed: int = 0) -> None:
    """Writes one packet's elements. ``seed``: of what is drawn, rounding at random: 64 bits."""
    lib.lc_encode(how.number, lib.LC_F32, 1, _address(out), _address(x), len(x), seed)


def decode(how: LowBit, data: Bytes, out: Floats) -> None:
    """Decodes ``data`` to ``out``: the reverse of :func:`encode`."""
    lib.lc_decode(how.number, lib.LC_F32, 1, _address(out), _address(data), len(out))


def _address(array: Bytes | Floats) -> object:
    return ffi.cast("void *", array.ctypes.data)
