"""Which rank of a unit gets the unit's sum of which elements, for all-reduces by tiers.

Every element has one *holder* in each unit: the rank that gets the unit's sum of it. The holder is
one of the holders that the unit's parts have for the element. So each rank of a host sends and
receives another share of what leaves the host, and each host of a site another share of what
leaves the site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Final, NamedTuple

from .order import segments
from .tiers import Unit

MOST_PIECES: Final = 4096
"""About how many pieces one tier may cut a buffer into: with units of many sizes, borders of their
pieces lie in many places, and each piece takes three slots."""


class Piece(NamedTuple):
    """Elements ``offset`` to ``offset + length`` of the buffer, in one unit."""

    offset: int  # first element
    length: int  # elements; at least 1
    holders: tuple[int, ...]  # the rank that holds it in each part of the unit
    owner: int  # the one of them that holds it in the unit
    inside: tuple[int, ...]  # by part: the number of the part's piece that it lies in


@dataclass(frozen=True, slots=True)
class Shares:
    """A unit's pieces in the order of their elements, without gaps, and those of its parts."""

    unit: Unit
    pieces: tuple[Piece, ...]
    parts: tuple[Shares, ...] = ()


@lru_cache(maxsize=64)
def shares(root: Unit, elements: int, grain: int, turns: tuple[int, ...] | None) -> Shares:
    """The pieces of all units; all borders but the end are whole numbers of ``grain`` elements.

    ``turns`` are the parts in the order in which the topmost tier is cut among them, some of them
    several times (:func:`drawn_turns`). None: parts get as much of the buffer as each other.
    """
    parts = _parts(root, elements, grain)
    return Shares(root, _pieces(parts, turns or range(len(parts)), grain), parts)


@lru_cache(maxsize=64)
def _parts(unit: Unit, elements: int, grain: int) -> tuple[Shares, ...]:
    # Kept, since the topmost tier is cut anew for each order.
    return tuple(_lower(part, elements, grain) for part in unit.parts)


def _lower(unit: Unit, elements: int, grain: int) -> Shares:
    if not unit.parts:
        (rank,) = unit.ranks
        whole = (Piece(0, elements, (), rank, ()),) if elements else ()
        return Shares(unit, whole)
    parts = _parts(unit, elements, grain)
    return Shares(unit, _pieces(parts, range(len(parts)), grain), parts)


def drawn_turns(root: Unit, order: tuple[int, ...]) -> tuple[int, ...]:
    """Parts in the order of their ranks. Of each part as many ranks stand for it as it takes for
    one to be drawn as often as any rank: with parts of one size a single one.

    So each element goes to a part as if a rank were drawn and the part were the rank's: then the
    mean of what arrives is unbiased, whatever the parts' sizes.
    """
    step = gcd(*[len(part.ranks) for part in root.parts])
    part_of = {rank: i for i, part in enumerate(root.parts) for rank in part.ranks[::step]}
    return tuple([part_of[rank] for rank in order if rank in part_of])


def _pieces(parts: Sequence[Shares], turns: Sequence[int], grain: int) -> tuple[Piece, ...]:
    """Cuts the ranges in which all parts' holders are constant among the parts, by ``turns``.

    Each range begins with another turn: if it is too small to be cut, another part gets it.
    """
    ranges = _common(parts)
    times = min(len(turns), max(1, MOST_PIECES // max(1, len(ranges))))
    found = []
    for number, (begin, end, inside) in enumerate(ranges):
        holders = tuple([part.pieces[at].owner for part, at in zip(parts, inside, strict=True)])
        for i, (offset, length) in enumerate(segments(end - begin, times, grain)):
            if length:
                owner = holders[turns[(number * times + i) % len(turns)]]
                found.append(Piece(begin + offset, length, holders, owner, inside))
    return tuple(found)


def _common(parts: Sequence[Shares]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first element, end, the pieces' numbers by part) of the ranges between all borders."""
    at = [0] * len(parts)
    begin, found = 0, []
    while all(i < len(part.pieces) for i, part in zip(at, parts, strict=True)):
        ends = [
            part.pieces[i].offset + part.pieces[i].length for i, part in zip(at, parts, strict=True)
        ]
        end = min(ends)
        found.append((begin, end, tuple(at)))
        at = [i + (there == end) for i, there in zip(at, ends, strict=True)]
        begin = end
    return found
