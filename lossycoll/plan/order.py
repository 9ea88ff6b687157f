"""Ownership: a seeded order of the ranks, and a tensor cut into segments."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

from .rng import key_of, mix

DOMAIN: Final = 0x6F72646572
"""Keeps the order apart from injected faults, which may be given the same seed ("order")."""

STREAM_PACKETS: Final = 256
"""From this length on, parity alone leaves a hundredth of 20% loss in bursts of 8
(docs/theory.md)."""
LONGER_MOST: Final = 8
"""A stream is at most so many times as long as if all ranks were owners."""
FINER_PACKETS: Final = 3
"""Packets are at most so many times as small: headers then take 7% more bytes at 1,448 a packet."""
FINER_STREAMS: Final = 2
"""Smaller packets are for streams of up to so many times ``stream_packets``: 40% loss in bursts of
8 needs 500 (docs/theory.md)."""
ALIGNED: Final = 16
"""Elements of smaller packets are a multiple of it: whole vectors."""


def draw_order(seed: int, group: int, op: int, world: int) -> tuple[int, ...]:
    """A permutation of the ranks 0..world-1, equal on all ranks that share the arguments.

    Fisher and Yates' shuffle over splitmix64. Redrawing it for each operation is what makes the
    mean of what arrived unbiased: the owner's own contribution always counts, so each rank must be
    the owner equally often.

    ``seed``: 64 bits, unsigned. ``group`` and ``op``: numbers of the group and of the operation, 32
    bits, unsigned.
    """
    key = key_of(seed ^ DOMAIN, group, op)
    order = list(range(world))
    for i in range(world - 1, 0, -1):
        # The high bits of the product: uniform on 0..i up to i / 2**64.
        j = (mix(key ^ i) * (i + 1)) >> 64
        order[i], order[j] = order[j], order[i]
    return tuple(order)


def owner_count(world: int, packets: int, stream_packets: int) -> int:
    """Number of ranks that own a part of a buffer of so many packets.

    As many as leave each stream ``stream_packets``, so that a burst can't take a stream as a whole
    with its parity; but so many that none is more than ``LONGER_MOST`` times as long as if all
    ranks were owners, since what an owner sends grows as much. 0: all ranks.
    """
    if not stream_packets:
        return world
    return min(world, max(1, -(-world // LONGER_MOST), packets // stream_packets))


def finer_elements(per_packet: int, packets: int, stream_packets: int, most: int) -> int:
    """Elements of a packet, in place of ``per_packet``, for a stream of so many such packets.

    A burst takes packets, whatever their size, and is a smaller part of a stream that has more of
    them. As many as ``FINER_STREAMS`` times ``stream_packets``, but none of them more than ``most``
    times as small.
    """
    if not packets:
        return per_packet
    finer = max(1, min(most, -(-FINER_STREAMS * stream_packets // packets)))
    return min(per_packet, -(-per_packet // (finer * ALIGNED)) * ALIGNED)


@lru_cache(maxsize=256)
def segments(elements: int, parts: int, elements_per_packet: int) -> tuple[tuple[int, int], ...]:
    """(offset, length) of ``parts`` contiguous segments of ``elements``.

    Borders are multiples of ``elements_per_packet``, so that no packet is cut, and sizes differ by
    at most one packet. With fewer packets than parts the last segments are empty (length 0).
    """
    share, extra = divmod(-(-elements // elements_per_packet), parts)
    packets = [i * share + min(i, extra) for i in range(parts + 1)]
    borders = [min(end * elements_per_packet, elements) for end in packets]
    return tuple([(begin, end - begin) for begin, end in pairwise(borders)])
