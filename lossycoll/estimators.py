"""How a mean is formed from the contributions that arrived: what an owner adds, and divides by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .figures import PeerStats
from .options import Options
from .plan import Finish
from .turns import Roster

ENOUGH: Final = 1000
"""Packets that a link must have been offered before its rate is believed: 1 / rate is then right to
3% (one standard error) at a rate of one half, and its own bias is below 0.1%."""
MEMORY: Final = 100_000
"""Packets after which what a link did counts half: rates change."""
LEAST_RATE: Final = 0.01
"""No contribution is multiplied by more than its inverse."""


@dataclass(frozen=True, slots=True)
class Means:
    """How one operation forms its means. ``finish`` is that of its plan (the default where None).

    ``weights``: by rank, what contributions are multiplied by (empty: 1); ``divisor`` is what a
    WEIGHTED finish divides by.
    """

    finish: Finish | None = None
    weights: tuple[float, ...] = ()
    divisor: float = 1.0


BY_COUNT: Final = Means()


@dataclass
class _Link:
    """What one link did, older packets counting less."""

    offered: float = 0.0
    delivered: float = 0.0
    offered_before: int = 0
    delivered_before: int = 0

    def note(self, offered: int, delivered: int) -> None:
        """Takes in the link's counters, which only grow."""
        new = offered - self.offered_before
        fade = 0.5 ** (new / MEMORY)
        self.offered = self.offered * fade + new
        self.delivered = self.delivered * fade + delivered - self.delivered_before
        self.offered_before, self.delivered_before = offered, delivered

    @property
    def rate(self) -> float | None:
        """The share of packets that arrive; None while too few are known."""
        return self.delivered / self.offered if self.offered_before >= ENOUGH else None


class Estimators:
    """One rank's choice for each operation. ``peer_stats`` are the engine's, of a peer."""

    def __init__(self, world: int, peer_stats: Callable[[int], PeerStats]) -> None:
        self._links = [_Link() for _ in range(world)]
        self._peer_stats = peer_stats

    def means(self, options: Options, who: Roster) -> Means:
        """The way for an operation with these options among these ranks.

        Rates are those that this rank saw in the operations before. As long as some link is unknown
        the mean is that by count: a guess of 1 would make it too small by what is lost.
        """
        if options.delivery != "lossy" or options.estimator == "count":
            return BY_COUNT
        divisor = float(len(who.members))
        if options.estimator == "zero_fill":
            return Means(Finish.WEIGHTED, (), divisor)
        weights = [1.0] * who.world
        for rank in who.members:
            if rank == who.rank:
                continue
            seen = self._peer_stats(rank)
            self._links[rank].note(seen.offered, seen.delivered)
            rate = self._links[rank].rate
            if rate is None:
                return BY_COUNT
            weights[rank] = 1 / max(rate, LEAST_RATE)
        return Means(Finish.WEIGHTED, tuple(weights), divisor)
