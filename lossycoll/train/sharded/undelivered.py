"""Owners too many of whose blocks are missing when a step's rounds of resending are over."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.train.common.staleness import Mask

TOO_MANY: Final = 0.02
"""Stale blocks up to this share cost no quality that can be told, 4% and more do
(docs/quality.md)."""
ENOUGH: Final = 256
"""Blocks that an owner must have sent before its share is believed."""
MEMORY: Final = 1024
"""Blocks after which what came of others counts by 1/e: links change."""


class Behind:
    """By owner, the share of blocks that were missing at rank ``rank``, of those that nobody asked
    for until they came: of the others none ever is."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._sent = np.zeros(world)
        self._missing = np.zeros(world)
        self._ever = np.zeros(world, np.int64)

    def note(self, needed: Mask | None, arrived: Mask) -> None:
        """A bucket's blocks (world, blocks): those that had to come, and those that came."""
        free = np.ones_like(arrived) if needed is None else ~needed
        free[self._rank] = False
        sent = free.sum(axis=1)
        fade = np.exp(-sent / MEMORY)
        self._sent = self._sent * fade + sent
        self._missing = self._missing * fade + (free & ~arrived).sum(axis=1)
        self._ever += sent

    def owners(self) -> NDArray[np.bool_]:
        """Those above TOO_MANY; bool (world,)."""
        return (self._ever >= ENOUGH) & (self._missing > TOO_MANY * self._sent)
