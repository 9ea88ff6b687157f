"""Cutting tensors into slices of equal bytes, of which each rank owns an equal chunk. Pure.

All tensors lie in one row of bytes, each at a multiple of 16, so that every element is whole in
every chunk. The row is cut into ``period`` slices and each slice into one chunk per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.train.common.layout import round_up

ALIGN: Final = 16
"""Bytes: the largest element's (complex128)."""


@dataclass(frozen=True, slots=True)
class ElementRange:
    """A range of elements of one tensor in a chunk."""

    tensor: int  # the tensor's number
    begin: int  # the first element
    end: int  # after the last
    at: int  # the byte of the chunk at which they begin


@dataclass(frozen=True)
class Slices:
    """All tensors, cut into slices of chunks."""

    period: int  # the number of slices
    world: int  # chunks of each: one for each rank
    chunk_bytes: int
    """Most bytes of a chunk."""
    chunks: tuple[tuple[ElementRange, ...], ...]
    """``chunks[s * world + c]``: the pieces of chunk c of slice s. The last chunks are empty where
    there are fewer bytes than chunks."""

    def of(self, number: int) -> tuple[tuple[ElementRange, ...], ...]:
        """The pieces of each chunk of a slice."""
        return self.chunks[number * self.world : (number + 1) * self.world]

    def empty(self, number: int) -> bool:
        """True if nothing is in a slice: there are fewer bytes than chunks before it."""
        return not any(self.of(number))


def slice_up(sizes: Sequence[tuple[int, int]], period: int, world: int) -> Slices:
    """Cuts tensors into slices, the same on all ranks.

    ``sizes`` has elements and bytes of an element by tensor; the bytes divide ALIGN.
    """
    begins, total = [], 0
    for elements, itemsize in sizes:
        begins.append(total)
        total += round_up(elements * itemsize, ALIGN)
    chunk = max(ALIGN, round_up(-(-total // (period * world)), ALIGN))
    chunks: list[list[ElementRange]] = [[] for _ in range(period * world)]
    for tensor, (begin, (elements, itemsize)) in enumerate(zip(begins, sizes, strict=True)):
        done = 0
        while done < elements:
            number, at = divmod(begin + done * itemsize, chunk)
            end = min(elements, done + (chunk - at) // itemsize)
            chunks[number].append(ElementRange(tensor, done, end, at))
            done = end
    return Slices(period, world, chunk, tuple(tuple(pieces) for pieces in chunks))


def slice_owner(number: int, chunk: int, sweep: int, world: int) -> int:
    """The rank whose values of a chunk all take.

    Over ``world`` sweeps each rank owns each chunk once, and in every slice each rank owns one.
    ``sweep`` is how often all slices were sent before.
    """
    return (chunk + number + sweep) % world
