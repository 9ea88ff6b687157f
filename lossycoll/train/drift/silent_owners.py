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
    """By owner, what it has sent since a block of it last arrived at one rank.

    Args:
        rank: This rank.
        world: The number of ranks.
        period: The steps of a sweep, in which each owner sends its share of everything.
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
        """Takes in one more step.

        Args:
            arrived: bool (world, blocks), by owner.
            now: Seconds.
        """
        came = arrived.any(axis=1) | (np.arange(len(arrived)) == self._rank)
        self.blocks = np.where(came, 0, self.blocks + arrived.shape[1])
        self.steps = np.where(came, 0, self.steps + 1)
        self._since = np.where(came, now, self._since)
        self._since = np.where(np.isnan(self._since), now, self._since)

    def last_arrival(self, owner: int) -> float:
        """When a block last arrived, or should have for the first time.

        Args:
            owner: Of whom.

        Returns:
            Seconds, as ``now`` of :meth:`note`.
        """
        return float(self._since[owner])

    def dead(self, now: float, link_timeout: float, known: Collection[int] = ()) -> list[int]:
        """Owners whose links are dead.

        Nothing arrived in SWEEPS sweeps and BLOCKS blocks in a row, nor within the link's
        timeout. A link that is away for less has only lost much.

        Args:
            now: Seconds.
            link_timeout: Seconds.
            known: Owners whose links the engine has found dead: those need not be waited for
                through so many steps.

        Returns:
            Their ranks, in rising order.
        """
        silent = (self.steps >= SWEEPS * self._period) & (now - self._since >= link_timeout)
        silent &= self.blocks >= BLOCKS
        for owner in known:
            away = now - self._since[owner] >= link_timeout
            silent[owner] |= away and self.steps[owner] >= KNOWN_STEPS
        return [int(owner) for owner in np.flatnonzero(silent)]
