"""Means of a group's values by the weights that the directory has told, in packets of any encoding.

An owner adds what comes, each contribution times its peer's weight, and divides by the weights of
just those that came: weights themselves never travel, so nothing rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from lossycoll.errors import EngineError
from lossycoll.plan import Plan, owners, packet_count
from lossycoll.plan.codec import STOCHASTIC, Floats, codec_of, elements_of, number_of, phases
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.codecs import rounded

from .protocol import Member

LEAST_WEIGHT: Final = 1e-9
"""Share of a group's greatest weight; in float32 sums, less is like 0."""
ZERO: Final = np.zeros(1, np.float32)
UNBOUNDED: Final = np.full(1, np.inf, np.float32)
NOTHING: Final = np.zeros(0, np.float32)
MOST_MADE_UP: Final = 64
"""A peer makes up for what its means have lost by so many times that, at most."""


def shares(members: Sequence[Member]) -> tuple[float, ...]:
    """Weights of members, of 1 for the one that counts most; 0: nothing. EngineError: nobody
    counts."""
    most = max((member.weight for member in members), default=0.0)
    if not most > 0:
        raise EngineError("the directory told of a group of which nobody has a weight")
    parts = [member.weight / most for member in members]
    return tuple(part if part >= LEAST_WEIGHT else 0.0 for part in parts)


def rates(members: Sequence[Member], parts: Sequence[float]) -> tuple[int, ...]:
    """Rates by which members own parts: those of their links, or 1 where one isn't known."""
    known = all(member.rate for member, part in zip(members, parts, strict=True) if part)
    return tuple(
        (member.rate if known else 1) if part else 0
        for member, part in zip(members, parts, strict=True)
    )


class MeanEncoding:
    """Encoding of this peer's values, and the rounding errors that it still owes the others.

    What is taken from a contribution is added to the next one; so is what a mean loses that this
    peer owns, times the sum of the weights over its own. What would make the next grid coarser
    waits. So no value is a step away from where it belongs for long. Where elements are rounded at
    random nothing is remembered: their mean is right by itself.
    """

    def __init__(self, encoding: str, payload_bytes: int) -> None:
        self.encoding = encoding
        self.per_packet = elements_of(encoding, "f32", payload_bytes)
        self.first, self.second = phases(encoding)
        self.remembers = encoding != "same" and STOCHASTIC not in encoding
        self.part = 0
        """Which part of a peer's values a round has: each has a memory of its own."""
        self.memory: dict[int, Floats] = {}
        """Amount of each value that the others lack, of each part."""

    @property
    def owed(self) -> Floats:
        """That of the present part; empty: nothing."""
        return self.memory.get(self.part, NOTHING)

    @owed.setter
    def owed(self, owed: Floats) -> None:
        self.memory[self.part] = owed

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the encodings, as engines know them."""
        return tuple(number_of(one) for one in (self.first, self.second))

    def got(self, x: Floats, encoding: str) -> Floats:
        """Return values as others get them in one of the phases' encodings, from the begin of a
        packet."""
        out = np.empty_like(x)
        if len(x):
            rounded(encoding, x.ctypes.data, out.ctypes.data, len(x), 0, self.per_packet)
        return out

    def ends(self, values: Floats) -> tuple[Floats, Floats]:
        """Between which what travels of values is to stay: those of their grid. If what is owed
        could go beyond them, the next grid would be coarser, and so on without an end."""
        how = codec_of(self.first, "f32").low
        if how is None:
            return -UNBOUNDED, UNBOUNDED
        begins = np.arange(0, len(values), how.group)
        low, high = (find.reduceat(values, begins) for find in (np.minimum, np.maximum))
        n = len(values)
        return np.repeat(low, how.group)[:n], np.repeat(high, how.group)[:n]


class Round:
    """One round of this peer. ``values``: float32, shape (n,), n at least 1. ``buffer``: what the
    engine reads and writes, in place. ``parts``: as of :func:`shares`.
    EngineError: nobody counts."""

    def __init__(
        self, means: MeanEncoding, members: Sequence[Member], rank: int, values: Floats
    ) -> None:
        self._means, self._rank = means, rank
        self.parts = shares(members)
        each = means.per_packet
        lengths = owners.owned(len(values), each, rates(members, self.parts))
        gives = [part > 0 for part in self.parts]
        self.plan: Plan = owners.all_reduce(len(members), rank, lengths, gives, each)
        begin = sum(lengths[:rank])
        self._mine = slice(begin, begin + lengths[rank])
        self.buffer = values.copy()
        self._owes = means.remembers and gives[rank]
        if self._owes:
            wanted = values + means.owed if len(means.owed) == len(values) else values
            low, high = means.ends(values)
            np.clip(wanted, low, high, out=self.buffer)
            got = means.got(self.buffer, means.first)
            self._most = high - low
            self._owed = _missing(wanted, got, self._most)
            # What this peer owns isn't rounded on the way to its owner.
            mine = self._mine
            self._owed[mine] = _missing(wanted[mine], self.buffer[mine], UNBOUNDED)

    def take(self, engine: EngineGroup, ticket: int, values: Floats) -> float:
        """Writes the means to ``values``, once the operation has ended well. Returns the share of
        them that stayed: no mean came of their packet, or one that isn't finite."""
        means, each = self._means, self._means.per_packet
        came = np.ones(packet_count(len(values), each), np.bool_)
        for slot in self.plan.slots:
            if slot.number >= self.plan.world:  # what another owns
                (owner,) = slot.sources
                n = packet_count(slot.length, each)
                first = slot.offset // each
                came[first : first + n] = engine.arrived(ticket, slot.number, owner, n)
        if means.remembers:
            self._remember()
        came &= np.logical_and.reduceat(np.isfinite(self.buffer), np.arange(0, len(values), each))
        taken = np.repeat(came, each)[: len(values)]
        np.copyto(values, self.buffer, where=taken)
        return 1.0 - float(np.count_nonzero(taken)) / len(values)

    def _remember(self) -> None:
        """This peer has what it owns as the others do, and knows what they lack."""
        own = self.buffer[self._mine]
        got = self._means.got(own, self._means.second)
        if self._owes:
            times = min(sum(self.parts) / self.parts[self._rank], MOST_MADE_UP)
            lost = np.float32(times) * _missing(own, got, UNBOUNDED)
            most = np.broadcast_to(self._most, self._owed.shape)[self._mine]
            self._owed[self._mine] = _missing(self._owed[self._mine] + lost, ZERO, most)
            self._means.owed = self._owed
        own[:] = got


def _missing(x: Floats, got: Floats, most: Floats) -> Floats:
    """Difference that others lack of ``x``, up to ``most``; 0 where nobody can tell."""
    with np.errstate(invalid="ignore", over="ignore"):
        found: Floats = np.clip(x - got, -most, most)
    found[~np.isfinite(found)] = 0
    return found
