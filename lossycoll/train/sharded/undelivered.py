"""The share of each owner's blocks that is missing when a step's rounds of resending are over."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.train.common.staleness import Mask

TOO_MANY: Final = 0.02
"""Stale blocks up to this share have no measurable cost in quality, 4% and more do
(docs/quality.md)."""
ENOUGH: Final = 256
"""Blocks that an owner must have sent before its share is believed."""
MEMORY: Final = 1024
"""Blocks after which what came of others counts by 1/e: links change."""


class UndeliveredShare:
    """The undelivered share at one rank, by owner.

    Only blocks that weren't needed count: a needed one is resent until it arrives.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._sent = np.zeros(world)
        self._missing = np.zeros(world)
        self._ever = np.zeros(world, np.int64)

    def note(self, needed: Mask | None, arrived: Mask) -> None:
        """Counts one bucket's blocks in one step, both bool (world, blocks)."""
        free = np.ones_like(arrived) if needed is None else ~needed
        free[self._rank] = False
        sent = free.sum(axis=1)
        fade = np.exp(-sent / MEMORY)
        self._sent = self._sent * fade + sent
        self._missing = self._missing * fade + (free & ~arrived).sum(axis=1)
        self._ever += sent

    def owners(self) -> NDArray[np.bool_]:
        """The owners whose share is above TOO_MANY, bool (world,)."""
        return (self._ever >= ENOUGH) & (self._missing > TOO_MANY * self._sent)
