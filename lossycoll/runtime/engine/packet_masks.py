"""Blocks: parts of a buffer of which a rank knows one by one what became of them."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan import Plan, Slot, packet_count
from lossycoll.plan.validation import starts

from .binding import EngineGroup


class Blocks:
    """Blocks that one rank needs and gets in an all-gather, ``plan``, of ``chunks``, elements by
    rank. A block has ``size`` elements of a chunk; packets may be smaller.

    ``needed``: bool (world, blocks), by owner, as many blocks as the longest chunk has. None: none
    is. This rank's own row says nothing. ``arrived`` is of the same shape once the operation is
    done: own row True, that of a rank that is lost False, and True where a chunk has no such block.

    In a plan of several levels, the ranks of a host get the same blocks of other hosts, and each
    asks for what it needs of those chunks that it passes on. So they must need the same, as those
    do that have got the same.
    """

    meaning: Final = "Blocks"
    """Name that ranks compare; part of the signature on the wire."""
    feedback: Final = False

    def __init__(
        self,
        plan: Plan,
        chunks: Sequence[int],
        size: int,
        needed: NDArray[np.bool_] | None = None,
    ) -> None:
        self._received = [slot for slot in plan.slots if slot.sources]
        self._starts = starts(tuple(chunks))
        self._size = size
        self._packets = [level.elements_per_packet for level in plan.all_levels]
        self._needed = needed if needed is not None and needed.any() else None
        self.arrived: NDArray[np.bool_] = ~existing(chunks, size)
        self.arrived[plan.rank] = True

    def encoded(self) -> bytes:
        """``needed`` as the engine reads it: of what comes on the level that may lose packets."""
        if self._needed is None:
            return b""
        each, size = self._packets[0], self._size
        rows = [
            overlapping(self._needed[self._owner(slot)], size, each, slot.length)
            for slot in self._received
            if slot.level == 0
        ]
        return np.concatenate(rows).astype(np.uint8).tobytes() if rows else b""

    def note(self, engine: EngineGroup, ticket: int) -> None:
        """Takes what arrived from the engine, of an operation that has its result."""
        for slot in self._received:
            (sender,) = slot.sources
            each = self._packets[slot.level]
            came = engine.arrived(ticket, slot.number, sender, packet_count(slot.length, each))
            lacking = overlapping(~came, each, self._size, slot.length)
            self.arrived[self._owner(slot), : len(lacking)] = ~lacking

    def _owner(self, slot: Slot) -> int:
        """Owner of the chunk that a slot receives; another rank may have passed it on."""
        return bisect_right(self._starts, slot.offset) - 1


def existing(chunks: Sequence[int], size: int) -> NDArray[np.bool_]:
    """Which blocks of ``size`` elements there are: bool (world, blocks), by owner, as many as the
    longest of ``chunks``, elements by rank, has."""
    blocks = np.array([packet_count(chunk, size) for chunk in chunks])
    return np.arange(blocks.max()) < blocks[:, None]


def overlapping(marks: NDArray[np.bool_], each: int, size: int, length: int) -> NDArray[np.bool_]:
    """Which pieces of ``size`` elements of ``length`` overlap a marked one of ``each`` elements."""
    begins = np.arange(packet_count(length, size)) * size
    first, last = begins // each, (np.minimum(begins + size, length) - 1) // each
    before = np.concatenate([[0], np.cumsum(marks)])
    found: NDArray[np.bool_] = before[last + 1] > before[first]
    return found


class Contributions:
    """Fate of a rank's contributions to a reduce-scatter of equal chunks, ``plan``.

    ``lost``: bool (world, blocks), by owner, once the operation is done: the blocks of this rank's
    contribution that the owner did without, each a packet of ``block_bytes``. Own row False. In a
    plan of several levels the rank's contribution is what it sends to owners of other hosts: its
    host's sum of some chunks, and nothing of the others. ``sent``: bool (world,), of which owners
    it has sent a contribution.

    ``result``: (address of the mean, where it is wanted, bytes), for plans in one buffer.
    """

    meaning: Final = "Contributions"
    """Name that ranks compare; part of the signature on the wire."""
    feedback: Final = True
    """Whether owners say what they have given up, until the operation is done; without, receivers
    may need single packets, and all is known once the result is there."""

    def __init__(
        self, plan: Plan, itemsize: int, result: tuple[int, int, int] | None = None
    ) -> None:
        self._sent = [dest for slot in plan.slots if slot.level == 0 for dest in slot.dests]
        self._result = result
        self.block_bytes: Final = plan.elements_per_packet * itemsize
        blocks = packet_count(plan.in_elements // plan.world, plan.elements_per_packet)
        self.lost: NDArray[np.bool_] = np.zeros((plan.world, blocks), np.bool_)
        self.sent: NDArray[np.bool_] = np.zeros(plan.world, np.bool_)
        self.sent[[dest.peer for dest in self._sent]] = True

    def encoded(self) -> bytes:
        return b""

    def note(self, engine: EngineGroup, ticket: int) -> None:
        """Takes what was given up from the engine, of an operation that is done."""
        for dest in self._sent:
            row = self.lost[dest.peer]
            row[:] = engine.given_up(ticket, dest.slot, dest.peer, len(row))
        if self._result is not None:
            source, wanted, nbytes = self._result
            ctypes.memmove(wanted, source, nbytes)
