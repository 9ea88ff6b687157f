"""Owners of whom nothing comes any more, although they send."""

from __future__ import annotations

from typing import Final

import numpy as np

from lossycoll.train.common.staleness import Mask

BLOCKS: Final = 256
"""So many in a row are lost once in 5e11 times, at 90% loss."""
SWEEPS: Final = 2


class Unheard:
    """What each owner has sent since a block of it last came to rank ``rank``.

    ``period``: the steps of a sweep, in which each owner's share of all that there is comes.
    """

    def __init__(self, rank: int, world: int, period: int) -> None:
        self._rank = rank
        self._period = period
        self._since = np.full(world, np.nan)
        self.blocks = np.zeros(world, np.int64)
        self.steps = np.zeros(world, np.int64)

    def note(self, arrived: Mask, now: float) -> None:
        """One more step, in which ``arrived`` (world, blocks) came; ``now`` in seconds."""
        came = arrived.any(axis=1) | (np.arange(len(arrived)) == self._rank)
        self.blocks = np.where(came, 0, self.blocks + arrived.shape[1])
        self.steps = np.where(came, 0, self.steps + 1)
        self._since = np.where(came, now, self._since)
        self._since = np.where(np.isnan(self._since), now, self._since)

    def heard(self, owner: int) -> float:
        """When a block of ``owner`` last came, or should have for the first time."""
        return float(self._since[owner])

    def dead(self, now: float, patience: float) -> list[int]:
        """Owners of whom nothing came in SWEEPS sweeps and BLOCKS blocks in a row, nor within
        ``patience`` seconds: a link that is away for less has only lost much."""
        long = (self.steps >= SWEEPS * self._period) & (now - self._since >= patience)
        return [int(owner) for owner in np.flatnonzero(long & (self.blocks >= BLOCKS))]
