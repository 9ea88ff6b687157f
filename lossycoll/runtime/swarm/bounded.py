"""A round whose members leave out contributions and means that have gone too far.

A movement is the distance of values from a reference, where the round before ended. An owner gets
each contribution by itself, and compares its movement with its own and with the median of all. Each
member compares the owners' means likewise. What is beyond ``most`` times that isn't believed.

Sources: Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017 (no linear rule bears
one liar); He, Karimireddy, Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022
(distances from the own values, where no server knows better).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan import Plan, owners, packet_count
from lossycoll.plan.codec import Floats
from lossycoll.runtime.engine.binding import EngineGroup

from .means import rates, shares
from .protocol import Member

MEDIAN_OF: Final = 3
"""Fewest values for a median: of fewer, one liar decides it."""


def movement(values: Floats, reference: Floats, came: NDArray[np.bool_]) -> float:
    """Root of the mean square of what values differ by; infinite where they can't be. ``came``:
    shape (n,): which of them count."""
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.square(values - reference, dtype=np.float64)[came]
    if not len(square):
        return 0.0
    found = float(square.mean())
    return float(np.sqrt(found)) if np.isfinite(found) else float("inf")


def typical(own: float, moved: Sequence[float]) -> float:
    """Reference movement: the own one, or the lower median if that is larger. ``moved``: movements
    of all, the own one included."""
    if len(moved) < MEDIAN_OF:
        return own
    return max(own, sorted(moved)[(len(moved) - 1) // 2])


class BoundedRound:
    """One round of this peer. ``values``: float32, shape (n,), n at least 1. ``reference``: where
    the round before ended, shape (n,). ``most``: how many times the typical movement is believed.
    EngineError: nobody counts.

    Attributes:
        buffer: What the engine reads and writes: values, contributions to this part, means.
        collect: Plan of the first call, from ``contributions[0]`` on.
        spread: Plan of the second one.
        parts: As of :func:`.means.shares`.
        refused: Ranks of which something was left out.
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
        self._rank, self._each, self._most = rank, per_packet, most
        self._reference = reference
        self.parts = shares(members)
        n, world = len(values), len(members)
        self._lengths = owners.owned(n, per_packet, rates(members, self.parts))
        self._gives = [part > 0 for part in self.parts]
        self.collect: Plan = owners.collect(world, rank, self._lengths, self._gives, per_packet)
        self.spread: Plan = owners.spread(world, rank, self._lengths, per_packet)
        own, begin = self._lengths[rank], sum(self._lengths[:rank])
        self._mine = slice(begin, begin + own)
        gathered = self.collect.out_elements
        self.buffer = np.zeros(2 * n + gathered, np.float32)
        self.values, self.means = self.buffer[:n], self.buffer[n + gathered :]
        self.gathered = self.buffer[n : n + gathered]
        self.values[:] = self.means[:] = values
        self.refused: set[int] = set()

    def combine(self, engine: EngineGroup, ticket: int) -> float:
        """Makes this peer's part of the means, after the first call. Returns contributions per
        value; 0: it owns nothing."""
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
            most = self._most * max(base, moved[rank] * steps) if base else np.inf
            if peer != rank and not moved[peer] <= min(most, np.finfo(np.float32).max):
                self.refused.add(peer)
                continue
            np.add(total, np.float32(parts[peer]) * found[peer], out=total, where=came[peer])
            weight += np.float32(parts[peer]) * came[peer]
        self.means[self._mine] = total / weight
        counted = [came[peer] for peer in came if peer not in self.refused]
        return float(sum(np.count_nonzero(one) for one in counted)) / own

    def take(self, engine: EngineGroup, ticket: int, values: Floats) -> float:
        """Writes the means to ``values``, after the second call. Returns the share of values that
        stayed: no mean of them came, or one that isn't believed."""
        whole = np.ones(len(values), np.bool_)
        moved = movement(self.values, self._reference, whole)
        taken, ratios, came = ~whole, {}, {}
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
            ratios[owner] = movement(self.means[part], self._reference[part], some)
            ratios[owner] /= max(own, moved) or 1.0
        found = [ratios[owner] for owner, (_, some) in came.items() if some.any()]
        base = typical(max(float(moved > 0), ratios.get(self._rank, 0.0)), found)
        for owner, (part, some) in came.items():
            if ratios[owner] <= (self._most * base if base else np.finfo(np.float32).max):
                taken[part] = some
            else:
                self.refused.add(owner)
        np.copyto(values, self.means, where=taken)
        return 1.0 - float(np.count_nonzero(taken)) / len(values)

    def _by_value(self, packets: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
        return np.repeat(packets, self._each)[:length]
