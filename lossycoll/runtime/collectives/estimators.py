"""Estimators of a mean from the contributions that arrived: what an owner adds, and divides by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lossycoll.options.fields import Options
from lossycoll.plan import Finish
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.reports import PeerStats

from .group_context import Members

ENOUGH: Final = 1000
"""Packets that a link must have been offered before its rate is believed: 1 / rate is then right to
3% (one standard error) at a rate of one half, and its own bias is below 0.1%."""
MEMORY: Final = 100_000
"""Packets after which what a link did counts half: rates change."""
LEAST_RATE: Final = 0.01
"""A link that delivers less is out of use: weights can't replace what never arrives. So no
contribution is multiplied by more than its inverse."""


@dataclass(frozen=True, slots=True)
class Means:
    """Estimator of one operation. ``finish`` is that of its plan (the default where None).

    ``weights``: by rank, what contributions are multiplied by (empty: 1); ``divisor`` is what a
    WEIGHTED finish divides by.
    """

    finish: Finish | None = None
    weights: tuple[float, ...] = ()
    divisor: float = 1.0


BY_COUNT: Final = Means()


@dataclass
class _Link:
    """Delivery rate of one link, older packets counting less. Going out of use clears it: if the
    link comes back, its rate is that of what follows."""

    offered: float = 0.0
    delivered: float = 0.0
    known: int = 0
    """Packets that were offered since the link is in use."""
    silent: int = 0
    """Packets that were offered since one arrived."""
    out_of_use: bool = False
    offered_before: int = 0
    delivered_before: int = 0

    def note(self, offered: int, delivered: int) -> None:
        """Takes in the link's counters, which only grow."""
        new, came = offered - self.offered_before, delivered - self.delivered_before
        self.offered_before, self.delivered_before = offered, delivered
        self.silent = 0 if came else self.silent + new
        if self.out_of_use and not came:
            return
        self.out_of_use = False
        fade = 0.5 ** (new / MEMORY)
        self.offered = self.offered * fade + new
        self.delivered = self.delivered * fade + came
        self.known += new
        rate = self.rate
        if rate is not None and (rate < LEAST_RATE or self.silent >= ENOUGH):
            self.offered = self.delivered = self.known = 0
            self.out_of_use = True

    @property
    def rate(self) -> float | None:
        """The share of packets that arrive; None while too few are known."""
        return self.delivered / self.offered if self.known >= ENOUGH else None


class Estimators:
    """One rank's choice for each operation. ``peer_stats`` are the engine's, of a peer."""

    def __init__(self, world: int, peer_stats: Callable[[int], PeerStats]) -> None:
        self._links = [_Link() for _ in range(world)]
        self._peer_stats = peer_stats
        self._warned: set[int] = set()
        """Ranks whose links have been warned of."""

    def weigh(self, options: Options) -> bool:
        """False if the mean is by count, whatever links did before."""
        return options.delivery == "lossy" and options.estimator != "count"

    def means(self, options: Options, members: Members) -> Means:
        """The way for an operation with these options among these ranks.

        Rates are those that this rank saw in the operations before. As long as some link's rate is
        unknown, the mean is by count: with a guess of 1 it would be too small by what is lost. The
        same holds while some link delivers nothing: the mean would lack all of that rank's
        contribution. This logs a warning, once per link.
        """
        if not self.weigh(options):
            return BY_COUNT
        divisor = float(len(members.ranks))
        if options.estimator == "zero_fill":
            return Means(Finish.WEIGHTED, (), divisor)
        weights = [1.0] * members.world
        unknown = False
        for rank in members.ranks:
            if rank == members.rank:
                continue
            seen, link = self._peer_stats(rank), self._links[rank]
            link.note(seen.offered, seen.delivered)
            if link.out_of_use:
                self._warn(members, seen)
            rate = link.rate
            if rate is None:
                unknown = True
            else:
                weights[rank] = 1 / rate
        return BY_COUNT if unknown else Means(Finish.WEIGHTED, tuple(weights), divisor)

    def _warn(self, members: Members, seen: PeerStats) -> None:
        if seen.rank in self._warned:
            return
        self._warned.add(seen.rank)
        log.warning(
            "rank %d/%d: the link from rank %d (%s) to this rank delivers nothing now, or less "
            "than %g%%, of what is to be reduced (%d of %d packets since the start). No weight "
            "can stand for what never comes, so until that link is back, "
            "estimator='inverse_probability' is the mean by count here, without that rank's data; "
            "repair the link ('lossycoll doctor --peer HOST' checks it)",
            members.rank,
            members.world,
            seen.rank,
            seen.address,
            100 * LEAST_RATE,
            seen.delivered,
            seen.offered,
        )
