"""What becomes of floats in few bits, without sending them: the engine's codecs on memory."""

from __future__ import annotations

import numpy as np

from lossycoll._native import ffi, lib
from lossycoll.plan.codec import ENCODED, codec_of, number_of
from lossycoll.plan.lowbit import GROUPS


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

    Args:
        encoding: A name of plan.codec's, of one phase.
        source: Address of float32, ``count`` of them.
        target: Address of room for as many; may be ``source``.
        count: Elements, up to 2^32 - 1.
        seed: 64 bits, of what is drawn.
        per_packet: Elements of a packet; it makes a difference where they aren't whole groups.

    Raises:
        ValueError: There are too many elements.
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
