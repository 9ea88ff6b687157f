"""Parameters on their way: from their owners to all replicas, where a lost packet leaves the value
that was there, and counts how old it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from lossycoll.errors import LinkError
from lossycoll.train.common.collectives import Exchange, settle
from lossycoll.train.common.staleness import AUTO, MAX_AGE, Ages, Mask, histogram

from .shard import Shard
from .undelivered import Behind


@dataclass(frozen=True, slots=True)
class ShardedFigures:
    """What :meth:`.sharded.ShardedOptimizer.figures` returns: sums over all steps at this rank.

    ``steps`` that were taken, and ``skipped`` because of NaN or infinity (those that a GradScaler
    skips not counted). ``blocks`` of parameters that other ranks sent here; of those, ``stale``
    ones didn't arrive and left what was there, and ``repaired`` ones were due by max_age: they were
    sent as often as it took.
    """

    steps: int = 0
    skipped: int = 0
    blocks: int = 0
    stale: int = 0
    repaired: int = 0


class Copies:
    """``max_age``: see :class:`.ages.Ages`. "auto": MAX_AGE, and 0 for owners that are behind,
    which each rank finds for itself: a receiver asks for what it needs."""

    def __init__(self, exchange: Exchange, max_age: int | str | None) -> None:
        self._exchange = exchange
        self._behind = Behind(exchange.rank, exchange.world) if max_age == AUTO else None
        self._max_age = MAX_AGE if isinstance(max_age, str) else max_age
        self._shards: list[Shard] = []
        self._ages: list[Ages] = []
        self.figures = ShardedFigures()

    def add(self, shards: Sequence[Shard]) -> None:
        """Buckets that are equal on all ranks."""
        for shard in shards:
            blocks = self._exchange.blocks(shard.bucket.chunk * shard.flat.element_size())
            ages = Ages(self._exchange.rank, self._exchange.world, blocks, self._max_age)
            self._shards.append(shard)
            self._ages.append(ages)

    def spread(self, model: Sequence[Parameter]) -> None:
        """Sends every rank's chunk of every bucket to all, all buckets at once.

        Raises LinkError when a block that was due didn't come, and PeerLostError, on all ranks
        alike, once all know that its owner is lost.
        """
        behind = None if self._behind is None else self._behind.owners()
        asked = [ages.needed(behind) for ages in self._ages]
        pairs = zip(self._shards, asked, strict=True)
        with self._exchange.owners_needed():
            works = [self._exchange.gather(shard.flat, needed) for shard, needed in pairs]
            settle(works)
            masks = [work.wait() for work in works]
        torch.autograd.graph.increment_version(model)
        dead: LinkError | None = None
        for ages, needed, arrived in zip(self._ages, asked, masks, strict=True):
            self._count(needed, arrived)
            if self._behind is not None:
                self._behind.note(needed, arrived)
            ages.advance(arrived)
            missing = None if needed is None else needed & ~arrived
            if missing is not None:
                missing[list(self._exchange.lost_here())] = False  # no link's fault
                if missing.any():
                    dead = dead or self._dead_link(ages, missing, behind)
        self.figures = replace(self.figures, steps=self.figures.steps + 1)
        self._exchange.check_owners()
        if dead is not None:
            raise dead

    def synchronize(self, model: Sequence[Parameter]) -> None:
        """Brings all chunks to all ranks, reliably."""
        with self._exchange.owners_needed():
            works = [self._exchange.copy(shard.flat) for shard in self._shards]
            settle([work for work in works if work is not None])
        torch.autograd.graph.increment_version(model)
        for ages in self._ages:
            ages.reset()

    def skip(self) -> None:
        """Counts a step that no rank took."""
        self.figures = replace(self.figures, skipped=self.figures.skipped + 1)

    def ages(self) -> tuple[int, ...]:
        """How many blocks of other ranks are 0, 1, 2, ... steps old."""
        return histogram(self._ages, self._exchange.rank)

    def _count(self, needed: Mask | None, arrived: Mask) -> None:
        repaired = 0 if needed is None else int((needed & arrived).sum())
        self.figures = replace(
            self.figures,
            blocks=self.figures.blocks + arrived.size - arrived.shape[1],
            stale=self.figures.stale + int((~arrived).sum()),
            repaired=self.figures.repaired + repaired,
        )

    def _dead_link(self, ages: Ages, missing: Mask, behind: NDArray[np.bool_] | None) -> LinkError:
        """``missing``: what was needed and didn't come."""
        owner = int(missing.any(axis=1).argmax())
        wanted = 0 if behind is not None and behind[owner] else self._max_age
        return LinkError(
            f"{self._exchange}: parameters of {self._exchange.peer(owner)} are "
            f"{int(ages.values[owner][missing[owner]].max())} steps old, wanted at most "
            f"{wanted} (max_age), and didn't come though they were asked for again: that "
            f"link is dead, or loses everything; repair it, or restart without that rank from the "
            f"last checkpoint",
            peer=owner,
        )
