"""The staleness of a replica's values, block by block, and its bound.

A block is what one packet carries of one rank's chunk. Its age at a replica is the number of steps
since it last arrived there from its owner: 0 if the last step's arrived. With independent loss p
the age is k with probability (1 - p) p^k. "Distributed Training under Packet Loss" (Weintraub,
Banner, Orda, arXiv 2507.07114) keeps a stale value however old; the bound is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

AUTO: Final = "auto"
MAX_AGE: Final = 3
"""Of "auto", where a link delivers well. Of blocks, p^3 are repaired in a step: one in 1000 at 10%
loss, one in 16 at 40%. Less repairs so much that little is left of a lossy step, more lets the rare
old value weigh: with p^K shrinking so fast, what is gained from waiting longer soon is nothing."""

PROBE_EVERY: Final = 16
"""Share of an owner's blocks that needn't arrive: one in so many, another each step."""

Mask = NDArray[np.bool_]


class Staleness:
    """The ages of one bucket's blocks at one rank; its own have age 0."""

    def __init__(self, rank: int, world: int, blocks: int, max_age: int | None) -> None:
        self._rank = rank
        self._max_age = max_age
        self._probes = np.arange(blocks) % PROBE_EVERY
        self._steps = 0
        self.values = np.zeros((world, blocks), np.int32)  # steps, int32 (world, blocks), by owner

    def needed(self, strict: NDArray[np.bool_] | None = None) -> Mask | None:
        """The blocks, bool (world, blocks), that the next step must bring; None: none.

        Of the owners in ``strict``, bool (world,), these are all blocks but a sample.
        """
        if self._max_age is None:
            return None
        mask: Mask = self.values >= self._max_age
        if strict is not None and strict.any():
            mask |= strict[:, None] & (self._probes != self._steps % PROBE_EVERY)
        mask[self._rank] = False
        return mask if mask.any() else None

    def advance(self, arrived: Mask) -> None:
        self._steps += 1
        self.values += 1
        self.values[arrived] = 0
        self.values[self._rank] = 0

    def reset(self) -> None:
        self.values[:] = 0


def histogram(ages: Iterable[Staleness], rank: int) -> tuple[int, ...]:
    """The numbers of other ranks' blocks of age 0, 1, ..., over several buckets."""
    values = [np.delete(entry.values, rank, axis=0).ravel() for entry in ages]
    joined = np.concatenate(values) if values else np.zeros(0, np.int32)
    return tuple(int(count) for count in np.bincount(joined))
