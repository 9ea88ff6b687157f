"""Groups of float32 in a few bits each, in numpy: docs/wire-format.md has the format.

native/lowbit.c is the same to the bit. All steps are float32 operations, of which only those of
:func:`_places` round; decoding is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan.codec import PLANES, Bytes, Floats, LowBit

CONSTANT: Final = 255
"""In place of an exponent: all elements of the group are one float."""
MOST: Final = 32767
"""The largest anchor, in units."""
TOP: Final = 141
"""A unit is 2 to the power of the exponent less this: the largest element is 2^14 units or more."""
NO_PLACE: Final = 255
"""In place of a spike's: the group has none."""
NAN: Final = np.uint32(0x7FC00000).view(np.float32)


def encode(how: LowBit, x: Floats, seed: int = 0) -> Bytes:
    """The bytes of one packet's elements, shape (n,). ``seed``: 64 bits, of what is drawn."""
    n, rows = len(x), _rows(x, how.group)
    taken = Spikes.of(rows) if how.spikes else None
    rest = taken.rest(rows, n) if taken else rows
    ends = _Ends.of(rest)
    grid, coarse = _grids(ends, how.levels, how.bits)
    place = _places(rest, grid, how.levels, how.bits)
    if how.stochastic:  # ends stay ends: then what a group is decoded to has the same grid
        drawn = np.where(rest == ends.far[:, None], np.float32(0), place)
        drawn = np.where(rest == ends.other[:, None], np.float32(how.levels), drawn)
        place = np.where(coarse[:, None], place, drawn + draws(seed, rest.shape))
    constant = (grid.exponent == CONSTANT)[:, None]
    indices = np.where(constant, 0, np.rint(place)).astype(np.uint8)
    if taken:
        indices[taken.marks(how.group)] = 0
    planes = split(indices.reshape(-1)[:n], how.bits)
    return np.concatenate([*planes, grid.bytes(), *(taken.parts() if taken else ())])


def decode(how: LowBit, data: Bytes, n: int) -> Floats:
    """The ``n`` elements that :meth:`encode`'s bytes stand for."""
    indices, at = joined(data, how.bits, n)
    grid = Grids.of(data[at:], how.groups(n))
    padded = np.zeros(how.groups(n) * how.group, np.float32)
    padded[:n] = indices
    rows = grid.values(padded.reshape(-1, how.group), how.bits)
    if how.spikes:
        rows = Spikes.from_bytes(data[at + 5 * len(rows) :], len(rows)).put(rows)
    return rows.reshape(-1)[:n]


@dataclass(frozen=True)
class Grids:
    """Grid of the indices of each group."""

    # code 0, in units: the end of the group that is farthest from zero; int16
    anchor: NDArray[np.int16]
    # from one index to the next, towards zero and beyond, in 2^(1 - bits) units; uint16
    step: NDArray[np.uint16]
    # of the unit, or CONSTANT: then anchor and step are the halves of a float; uint8
    exponent: Bytes

    @classmethod
    def of(cls, data: Bytes, groups: int) -> Grids:
        """From their bytes."""
        halves = data[: 4 * groups].view("<u2")
        return cls(halves[:groups].view(np.int16), halves[groups:], data[4 * groups : 5 * groups])

    def bytes(self) -> Bytes:
        """Bytes of the grids, as they stand behind the planes."""
        return np.concatenate([self.anchor.view(np.uint8), self.step.view(np.uint8), self.exponent])

    def values(self, indices: Floats, bits: int) -> Floats:
        """Values that indices stand for; a row is a group."""
        unit = np.ldexp(np.float32(1), self.exponent.astype(np.int32) - TOP)
        sign = np.where(self.anchor < 0, np.float32(-1), np.float32(1))
        step = self.step.astype(np.float32) * (sign * np.float32(2.0 ** (1 - bits)))
        in_units = self.anchor.astype(np.float32)[:, None] - indices * step[:, None]
        with np.errstate(over="ignore", invalid="ignore"):  # what isn't ours may be any pattern
            on_grid = in_units * unit[:, None]
        halves = self.anchor.view(np.uint16).astype(np.uint32) << np.uint32(16) | self.step
        found: Floats = np.where(
            (self.exponent == CONSTANT)[:, None], halves.view(np.float32)[:, None], on_grid
        )
        return found


@dataclass(frozen=True)
class Spikes:
    """The ends of groups, which travel as the upper three bytes of float32."""

    low: Floats  # the least of each group, rounded down; float32
    high: Floats  # the greatest, rounded up
    low_place: Bytes  # where it stands in the group; NO_PLACE: the group has no spikes
    high_place: Bytes  # the same

    @classmethod
    def of(cls, rows: Floats) -> Spikes:
        """Grids of the groups that hold two different numbers, and no NaN or infinity."""
        one = ~np.isfinite(rows).all(axis=1) | (rows.min(axis=1) == rows.max(axis=1))
        usable = np.where(one[:, None], np.float32(0), rows)
        low, high = usable.min(axis=1), usable.max(axis=1)
        places = [np.where(one, NO_PLACE, usable.argmin(axis=1)).astype(np.uint8)]
        places.append(np.where(one, NO_PLACE, usable.argmax(axis=1)).astype(np.uint8))
        return cls(_cut_down(low), np.float32(0) - _cut_down(-high), *places)

    @classmethod
    def from_bytes(cls, data: Bytes, groups: int) -> Spikes:
        """From their bytes."""
        ends = np.zeros((2 * groups, 4), np.uint8)
        ends[:, 1:] = data[: 6 * groups].reshape(-1, 3)
        floats = ends.view("<f4")[:, 0]
        places = data[6 * groups : 8 * groups]
        return cls(floats[:groups], floats[groups:], places[:groups], places[groups:])

    def parts(self) -> list[Bytes]:
        """Bytes of the spikes, as they stand behind the grids."""
        one = self.low_place == NO_PLACE
        ends = [np.where(one, np.float32(0), x).view(np.uint8) for x in (self.low, self.high)]
        cut = [x.reshape(-1, 4)[:, 1:].reshape(-1) for x in ends]
        return [*cut, self.low_place, self.high_place]

    def marks(self, group: int) -> NDArray[np.bool_]:
        """Mask of spikes; a row is a group."""
        at = np.arange(group)
        found: NDArray[np.bool_] = (at == self.low_place[:, None]) | (
            at == self.high_place[:, None]
        )
        return found

    def rest(self, rows: Floats, n: int) -> Floats:
        """The groups with other elements of theirs in the places of spikes; zeros if there are no
        others."""
        inside = (np.arange(rows.size) < n).reshape(rows.shape)
        others = inside & ~self.marks(rows.shape[1])
        first = rows[np.arange(len(rows)), others.argmax(axis=1)]
        fill = np.where(others.any(axis=1), first, np.float32(0))
        one = (self.low_place == NO_PLACE)[:, None]
        return np.where(others | one, rows, fill[:, None])

    def put(self, rows: Floats) -> Floats:
        """Decoded groups with their spikes. A grid may end beyond them, but no element does."""
        there = (self.low_place != NO_PLACE)[:, None]
        low, high = self.low[:, None], self.high[:, None]
        held = np.where(there & (rows < low), low, rows)
        held = np.where(there & (held > high), high, held)
        at = np.arange(rows.shape[1])
        held = np.where(there & (at == self.low_place[:, None]), low, held)
        return np.where(there & (at == self.high_place[:, None]), high, held)


def _cut_down(x: Floats) -> Floats:
    """To what three bytes hold, downwards. No zero is negative, and nothing infinite."""
    bits = (x + np.float32(0)).view(np.uint32)
    bits = (bits + np.where(bits >> np.uint32(31), np.uint32(255), np.uint32(0))) & ~np.uint32(255)
    infinite = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    cut: Floats = np.where(infinite, np.uint32(0xFF7FFF00), bits).astype(np.uint32).view(np.float32)
    return cut


def _rows(x: Floats, group: int) -> Floats:
    """A row for each group; a short one is filled up with its first element."""
    rows = -(-len(x) // group)
    if len(x) == rows * group:
        return x.reshape(rows, group)
    first = x[(rows - 1) * group]
    fill = np.full(rows * group - len(x), first, np.float32)
    return np.concatenate([x, fill]).reshape(rows, group)


def _scaled(rows: Floats, exponent: NDArray[np.int32]) -> Floats:
    """In units. Two factors, since one may be beyond float32."""
    power = TOP - exponent
    first = np.ldexp(np.float32(1), np.minimum(power, 127))
    second = np.ldexp(np.float32(1), power - np.minimum(power, 127))
    scaled: Floats = rows * first[:, None] * second[:, None]
    return scaled


@dataclass(frozen=True)
class _Ends:
    """Ends of groups."""

    far: Floats  # the end that is farthest from zero; float32
    other: Floats  # the other one
    # whether there is no NaN nor infinity. The ends are 0 where there is.
    finite: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Floats) -> _Ends:
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(rows).all(axis=1))
        rows = np.where(finite[:, None], rows, np.float32(0))
        low = rows.min(axis=1, initial=np.inf) + np.float32(0)  # no negative zeros
        high = rows.max(axis=1, initial=-np.inf) + np.float32(0)
        upper = high >= -low
        return cls(np.where(upper, high, low), np.where(upper, low, high), finite)


def draws(seed: int, shape: tuple[int, ...]) -> Floats:
    """2^14 numbers evenly between -1/2 and 1/2, one for each element. ``seed``: 64 bits."""
    w = np.arange(np.prod(shape), dtype=np.uint32) + np.uint32(seed & 0xFFFFFFFF)
    w = (w ^ (w >> np.uint32(16))) * np.uint32(0x7FEB352D)
    w ^= np.uint32(seed >> 32)
    w = (w ^ (w >> np.uint32(15))) * np.uint32(0x846CA68B)
    w = (w ^ (w >> np.uint32(16))) * np.uint32(0x9E3779B9)
    whole = (w >> np.uint32(18)).astype(np.float32)
    found: Floats = whole * np.float32(2.0**-14) + np.float32(2.0**-15 - 0.5)
    return found.reshape(shape)


def _grids(ends: _Ends, levels: int, bits: int) -> tuple[Grids, NDArray[np.bool_]]:
    """The grids, and which go on beyond their groups, since a step is two units at least. These are
    rounded to the nearest."""
    sign = np.where(ends.far < 0, np.float32(-1), np.float32(1))
    # A group of zeros has no exponent.
    exponent = np.maximum((sign * ends.far).view(np.uint32) >> np.uint32(23), 1).astype(np.int32)
    far, other = _scaled(np.stack([ends.far, ends.other], axis=1) * sign[:, None], exponent).T
    anchor = np.minimum(np.rint(far), np.float32(MOST))
    wanted, least = _steps(anchor, other, levels, bits), np.float32(1 << bits)
    step = np.maximum(wanted, least)
    alone = np.where(ends.finite, ends.far, NAN).view(np.uint32)
    is_float = (ends.far == ends.other) | ~ends.finite
    grids = Grids(
        np.where(is_float, alone >> np.uint32(16), (anchor * sign).astype(np.int32))
        .astype(np.uint16)
        .view(np.int16),
        np.where(is_float, alone, step.astype(np.uint32)).astype(np.uint16),
        np.where(is_float, CONSTANT, exponent).astype(np.uint8),
    )
    return grids, wanted < least


def _steps(anchor: Floats, other: Floats, levels: int, bits: int) -> Floats:
    """Such that the last index is at the other end, but no farther from zero than the anchor."""
    parts = np.float32(1 << (bits - 1))
    nearest = np.rint((anchor - other) * parts / np.float32(levels))
    most = np.floor(anchor * (2 * parts) / np.float32(levels))
    steps: Floats = np.minimum(nearest, most)
    return steps


def _places(rows: Floats, grid: Grids, levels: int, bits: int) -> Floats:
    """Place of each element on its grid, not rounded yet."""
    constant = (grid.exponent == CONSTANT)[:, None]
    rows = np.where(constant, np.float32(0), rows)
    exponent = np.where(constant[:, 0], 1, grid.exponent).astype(np.int32)
    sign = np.where(grid.anchor < 0, np.float32(-1), np.float32(1))
    step = np.where(constant[:, 0], np.uint16(1), grid.step).astype(np.float32)
    inverse = sign * (np.float32(1 << (bits - 1)) / step)
    away = grid.anchor.astype(np.float32)[:, None] - _scaled(rows, exponent)
    place: Floats = np.clip(away * inverse[:, None], np.float32(0), np.float32(levels))
    return place


def split(indices: Bytes, bits: int) -> list[Bytes]:
    """The bit planes of indices of so many bits. In each the first element has the lowest bits."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        part = indices >> np.uint8(shift) & np.uint8((1 << width) - 1)
        each = part[:, None] >> np.arange(width, dtype=np.uint8) & np.uint8(1)
        planes.append(np.packbits(each.reshape(-1), bitorder="little"))
        shift += width
    return planes


def joined(data: Bytes, bits: int, n: int) -> tuple[NDArray[Any], int]:
    """The indices of ``n`` elements, and where the bytes behind their planes begin."""
    indices, at, shift = np.zeros(n, np.uint8), 0, 0
    for width in PLANES[bits]:
        size = -(-n * width // 8)
        each = np.unpackbits(data[at : at + size], count=n * width, bitorder="little")
        weights = np.uint8(1) << np.arange(width, dtype=np.uint8)
        part = (each.reshape(n, width) * weights).sum(axis=1, dtype=np.uint8)
        indices |= part << np.uint8(shift)
        at, shift = at + size, shift + width
    return indices, at
