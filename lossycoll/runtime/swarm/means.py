"""Means of a group's values by the weights that the directory has told, in packets of any encoding.

An owner adds what comes, each contribution times its peer's weight, and divides by the weights of
just those that came: weights themselves never travel, so nothing rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import EngineError
from lossycoll.plan import Plan, owners, packet_count
from lossycoll.plan.codec import STOCHASTIC, Floats, codec_of, elements_of, number_of, phases
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.codecs import rounded

from .protocol import Member

LEAST_WEIGHT: Final = 1e-9  # share of a group's greatest weight; in float32 sums, less is like 0
ZERO: Final = np.zeros(1, np.float32)
UNBOUNDED: Final = np.full(1, np.inf, np.float32)
NOTHING: Final = np.zeros(0, np.float32)
MOST_MADE_UP: Final = 64
"""A peer makes up for what its means have lost by so many times that, at most."""
BLOCK: Final = 1 << 15
"""Values that are rounded at a time: few enough to stay in a core's cache from step to step."""
ROUNDING: Final = 8 * float(np.finfo(np.float32).eps)
MEDIAN_OF: Final = 3  # fewest values for a median: of fewer, one liar decides it
Run: TypeAlias = Callable[[Plan, Floats, Floats], tuple[int, float]]


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
    """Encoding of this peer's values, and the rounding errors that it still owes the others. What
    is taken from a contribution is added to the next one; so is what a mean loses that this peer
    owns, times the sum of the weights over its own. What would make the next grid coarser waits. So
    no value is a step away from where it belongs for long. Where elements are rounded at random
    nothing is remembered: their mean is right by itself."""

    def __init__(self, encoding: str, payload_bytes: int) -> None:
        self.encoding = encoding
        self.per_packet = elements_of(encoding, "f32", payload_bytes)
        self.first, self.second = phases(encoding)
        self.numbers = number_of(self.first), number_of(self.second)
        self.remembers = encoding != "same" and STOCHASTIC not in encoding
        self.part = 0  # which part of a peer's values a round has: each has a memory of its own
        self.memory: dict[int, Floats] = {}
        """Amount of each value that the others lack, of each part."""

    @property
    def owed(self) -> Floats:
        """What is owed of the present part; empty: nothing."""
        return self.memory.get(self.part, NOTHING)

    @owed.setter
    def owed(self, owed: Floats) -> None:
        self.memory[self.part] = owed

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
    """One round of this peer. ``parts``: as of :func:`shares`. ``buffer``: what the engine reads
    and writes. ``contributions``: per value; ``kept``: the share of values that stayed;
    ``refused``: ranks of which something wasn't believed. EngineError: nobody counts."""

    buffer: Floats

    def __init__(self, members: Sequence[Member], rank: int, values: int, per_packet: int) -> None:
        self._rank, self._each = rank, per_packet
        self.parts = shares(members)
        self._gives = [part > 0 for part in self.parts]
        self._lengths = owners.owned(values, per_packet, rates(members, self.parts))
        begin = sum(self._lengths[:rank])
        self._mine = slice(begin, begin + self._lengths[rank])
        self.contributions, self.kept = 0.0, 1.0
        self.refused: set[int] = set()

    def exchange(self, engine: EngineGroup, run: Run, values: Floats) -> None:
        """Averages, and writes the means to ``values``. ``run``: runs a plan from one buffer to
        another; returns the operation, and its mean contributions. LossyError: it fails."""
        raise NotImplementedError

    def _write(self, values: Floats, means: Floats, taken: NDArray[np.bool_]) -> None:
        np.copyto(values, means, where=taken)
        self.kept = 1.0 - float(np.count_nonzero(taken)) / len(values)


class MeanRound(Round):
    """A round that believes all. ``values``: float32, shape (n,), n at least 1."""

    def __init__(
        self, means: MeanEncoding, members: Sequence[Member], rank: int, values: Floats
    ) -> None:
        each = means.per_packet
        super().__init__(members, rank, len(values), each)
        self._means = means
        self.plan: Plan = owners.all_reduce(len(members), rank, self._lengths, self._gives, each)
        self.buffer = values.copy()
        self._owes = means.remembers and self._gives[rank]
        if self._owes:
            self._owed, self._most = np.empty_like(values), np.empty_like(values)
            owed = means.owed if len(means.owed) == len(values) else np.zeros_like(values)
            for block in _blocks(slice(0, len(values)), each):
                wanted = values[block] + owed[block]
                low, high = means.ends(values[block])
                sent = np.clip(wanted, low, high, out=self.buffer[block])
                self._most[block] = high - low
                self._owed[block] = _missing(wanted, means.got(sent, means.first), high - low)
            # What this peer owns isn't rounded on the way to its owner.
            for block in _blocks(self._mine, each):
                wanted = values[block] + owed[block]
                self._owed[block] = _missing(wanted, self.buffer[block], UNBOUNDED)

    def exchange(self, engine: EngineGroup, run: Run, values: Floats) -> None:
        """Values stay of which no mean came, or a packet with one that isn't finite."""
        ticket, self.contributions = run(self.plan, self.buffer, self.buffer)
        means, each = self._means, self._each
        came = np.ones(packet_count(len(values), each), np.bool_)
        for slot in self.plan.slots:
            if slot.number >= self.plan.world:  # what another owns
                (owner,) = slot.sources
                n = packet_count(slot.length, each)
                first = slot.offset // each
                came[first : first + n] = engine.arrived(ticket, slot.number, owner, n)
        if means.remembers:
            self._remember()
        finite = np.isfinite(self.buffer)
        if not finite.all():
            came &= np.logical_and.reduceat(finite, np.arange(0, len(values), each))
        if came.all():
            values[:], self.kept = self.buffer, 0.0
        else:
            self._write(values, self.buffer, np.repeat(came, each)[: len(values)])

    def _remember(self) -> None:
        """This peer has what it owns as the others do, and knows what they lack."""
        for block in _blocks(self._mine, self._each):
            own = self.buffer[block]
            got = self._means.got(own, self._means.second)
            if self._owes:
                times = min(sum(self.parts) / self.parts[self._rank], MOST_MADE_UP)
                owed = self._owed[block] + np.float32(times) * _missing(own, got, UNBOUNDED)
                self._owed[block] = _missing(owed, ZERO, self._most[block])
            own[:] = got
        if self._owes:
            self._means.owed = self._owed


def _blocks(of: slice, per_packet: int) -> Iterator[slice]:
    """Whole packets of a slice, and its last one, some at a time."""
    step = max(1, BLOCK // per_packet) * per_packet
    return (slice(at, min(of.stop, at + step)) for at in range(of.start, of.stop, step))


def _missing(x: Floats, got: Floats, most: Floats) -> Floats:
    """Difference that others lack of ``x``, up to ``most``; 0 where nobody can tell."""
    with np.errstate(invalid="ignore", over="ignore"):
        found: Floats = np.clip(x - got, -most, most)
    found[~np.isfinite(found)] = 0
    return found


def movement(values: Floats, reference: Floats, came: NDArray[np.bool_]) -> float:
    """Root of the mean square of what values differ by; infinite where they can't be. ``came``:
    shape (n,): which of them count."""
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.square(values - reference, dtype=np.float64)[came]
    if not len(square):
        return 0.0
    found = float(square.mean())
    return float(np.sqrt(found)) if np.isfinite(found) else float("inf")


def is_rounding(moved: float, reference: Floats) -> bool:
    """True if a movement is no more than what adding up and dividing equal values may make."""
    size = movement(reference, np.zeros_like(reference), np.ones(len(reference), np.bool_))
    return moved <= ROUNDING * size < np.inf


def typical(own: float, moved: Sequence[float]) -> float:
    """Reference movement: the own one, or the lower median if that is larger. ``moved``: movements
    of all, the own one included."""
    if len(moved) < MEDIAN_OF:
        return own
    return max(own, sorted(moved)[(len(moved) - 1) // 2])


class BoundedRound(Round):
    """A round whose members leave out contributions and means that have gone too far. ``values``
    and ``reference``, where the round before ended: float32, shape (n,), n at least 1. ``most``:
    how many times the typical movement is believed.

    A movement is the distance from the reference. An owner gets each contribution by itself, and
    compares its movement with its own and with the median of all. Each member compares the owners'
    means likewise. What is beyond ``most`` times that isn't believed. Where the typical movement is
    0, as in frozen parts, nothing that has moved is.

    Sources: Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017 (no linear rule
    bears one liar); He, Karimireddy, Jaggi, "Byzantine-Robust Decentralized Learning via
    ClippedGossip", 2022 (distances from the own values, where no server knows better).
    """

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        values: Floats,
        reference: Floats,
        most: float,
        per_packet: int,
    ) -> None:
        n, world = len(values), len(members)
        super().__init__(members, rank, n, per_packet)
        self._most, self._reference = most, reference
        self.collect: Plan = owners.collect(world, rank, self._lengths, self._gives, per_packet)
        self.spread: Plan = owners.spread(world, rank, self._lengths, per_packet)
        gathered = self.collect.out_elements
        self.buffer = np.zeros(2 * n + gathered, np.float32)
        self.values, self.means = self.buffer[:n], self.buffer[n + gathered :]
        self.gathered = self.buffer[n : n + gathered]
        self.values[:] = self.means[:] = values

    def exchange(self, engine: EngineGroup, run: Run, values: Floats) -> None:
        ticket, _ = run(self.collect, self.values, self.gathered)
        self.contributions = self.combine(engine, ticket)
        ticket, _ = run(self.spread, self.means, self.means)
        self._write(values, self.means, self._believed(engine, ticket))

    def combine(self, engine: EngineGroup, ticket: int) -> float:
        """Makes this peer's part of the means. Returns contributions per value; 0: it owns none."""
        own, rank, parts = self._lengths[self._rank], self._rank, self.parts
        if not own:
            return 0.0
        packets, reference = packet_count(own, self._each), self._reference[self._mine]
        came = {
            peer: self._by_value(engine.arrived(ticket, peer, peer, packets), own)
            for peer in range(len(parts))
            if self._gives[peer] and peer != rank
        }
        came[rank] = np.ones(own, np.bool_)
        found = {peer: self.gathered[peer * own : (peer + 1) * own] for peer in came}
        moved = {peer: movement(found[peer], reference, came[peer]) for peer in came}
        base = typical(moved[rank], [moved[peer] for peer in came if came[peer].any()])
        total, weight = np.zeros(own, np.float32), np.zeros(own, np.float32)
        for peer in sorted(came):
            steps = max(1.0, parts[peer] / parts[rank])
            most = min(self._most * max(base, moved[rank] * steps), np.finfo(np.float32).max)
            is_believed = peer == rank or moved[peer] <= most
            if not (is_believed or is_rounding(moved[peer], reference)):
                self.refused.add(peer)
                continue
            np.add(total, np.float32(parts[peer]) * found[peer], out=total, where=came[peer])
            weight += np.float32(parts[peer]) * came[peer]
        self.means[self._mine] = total / weight
        counted = [came[peer] for peer in came if peer not in self.refused]
        return float(sum(np.count_nonzero(one) for one in counted)) / own

    def _believed(self, engine: EngineGroup, ticket: int) -> NDArray[np.bool_]:
        """Of which values a mean came that is believed."""
        whole = np.ones(len(self.values), np.bool_)
        moved = movement(self.values, self._reference, whole)
        taken, means, ratios, came = ~whole, {}, {}, {}
        begin = 0
        for owner, length in enumerate(self._lengths):
            part = slice(begin, begin + length)
            begin += length
            if not length:
                continue
            came[owner] = part, np.ones(length, np.bool_)
            if owner != self._rank:
                packets = packet_count(length, self._each)
                arrived = engine.arrived(ticket, len(self.parts) + owner, owner, packets)
                came[owner] = part, self._by_value(arrived, length)
            some = came[owner][1]
            own = movement(self.values[part], self._reference[part], some)
            means[owner] = movement(self.means[part], self._reference[part], some)
            ratios[owner] = means[owner] / (max(own, moved) or 1.0)
        found = [ratios[owner] for owner, (_, some) in came.items() if some.any()]
        weight = self.parts[self._rank]
        # Of the own part, where no median says what is typical, as far as contributions may go.
        own = min(ratios.get(self._rank, 0.0), self._most / weight) if weight else 0.0
        base = typical(max(float(moved > 0), own), found)
        # One that brings nothing, and hasn't moved, has nothing to compare with.
        most = self._most * base if base or weight else np.finfo(np.float32).max
        for owner, (part, some) in came.items():
            if ratios[owner] <= most or is_rounding(means[owner], self._reference[part]):
                taken[part] = some
            else:
                self.refused.add(owner)
        return taken

    def _by_value(self, packets: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
        return np.repeat(packets, self._each)[:length]
