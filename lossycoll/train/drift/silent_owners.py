"""Owners of whom no block arrives any more, although they send."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from lossycoll.train.common.staleness import Mask

BLOCKS: Final = 256
"""So many in a row are lost once in 5e11 times, at 90% loss."""
SWEEPS: Final = 2
KNOWN_STEPS: Final = 2


class SilentOwners:
    """By owner, the steps and blocks since one of its blocks last arrived at this rank.

    In ``period`` steps, a sweep, each owner sends its share of everything.
    """

    def __init__(self, rank: int, world: int, period: int) -> None:
        self._rank = rank
        self._period = period
        self._since = np.full(world, np.nan)
        self.blocks = np.zeros(world, np.int64)
        """Blocks that were lost since, by owner."""
        self.steps = np.zeros(world, np.int64)
        """Steps since, by owner."""

    def note(self, arrived: Mask, now: float) -> None:
        """Takes in one more step's arrivals, bool (world, blocks) by owner, at ``now`` seconds."""
        came = arrived.any(axis=1) | (np.arange(len(arrived)) == self._rank)
        self.blocks = np.where(came, 0, self.blocks + arrived.shape[1])
        self.steps = np.where(came, 0, self.steps + 1)
        self._since = np.where(came, now, self._since)
        self._since = np.where(np.isnan(self._since), now, self._since)

    def last_arrival(self, owner: int) -> float:
        """Seconds at which an owner's block last arrived, or should have for the first time."""
        return float(self._since[owner])

    def dead(self, now: float, link_timeout: float, known: Collection[int] = ()) -> list[int]:
        """Ranks, ascending, of owners whose links are dead; times are in seconds.

        Nothing arrived in SWEEPS sweeps and BLOCKS blocks in a row, nor within the link's timeout.
        A link that is away for less has only lost much. Links in ``known``, which the engine has
        found dead, need not be waited for through so many steps.
        """
        silent = (self.steps >= SWEEPS * self._period) & (now - self._since >= link_timeout)
        silent &= self.blocks >= BLOCKS
        for owner in known:
            away = now - self._since[owner] >= link_timeout
            silent[owner] |= away and self.steps[owner] >= KNOWN_STEPS
        return [int(owner) for owner in np.flatnonzero(silent)]
