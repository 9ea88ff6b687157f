"""Sends parameters from their owners to all replicas.

A lost packet leaves the value that was there, and counts how old it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from lossycoll.errors import LinkError
from lossycoll.train.common.collectives import Collectives, wait_all
from lossycoll.train.common.staleness import AUTO, MAX_AGE, Mask, Staleness, histogram

from .figures import ShardedFigures
from .owner_loss import check_owners, owners_needed
from .shard import Shard
from .undelivered import UndeliveredShare


@dataclass(frozen=True, eq=False)
class _BucketCopies:
    """A bucket, and how old the other ranks' parts of it are here."""

    shard: Shard
    staleness: Staleness


class ParameterSync:
    """Keeps the replicas of one optimizer's parameters together.

    Args:
        collectives: The group's.
        max_age: The staleness bound (:class:`.Staleness`); None: no bound. "auto": MAX_AGE, and 0
            for owners with too large an undelivered share, which each rank finds for itself: a
            receiver asks for what it needs.
    """

    def __init__(self, collectives: Collectives, max_age: int | str | None) -> None:
        self._collectives = collectives
        self._undelivered: UndeliveredShare | None = None
        if max_age == AUTO:
            self._undelivered = UndeliveredShare(collectives.rank, collectives.world)
        self._max_age = MAX_AGE if isinstance(max_age, str) else max_age
        self._buckets: list[_BucketCopies] = []
        self.figures = ShardedFigures()

    def add(self, shards: Sequence[Shard]) -> None:
        """Adds buckets that are equal on all ranks.

        Args:
            shards: The buckets.
        """
        for shard in shards:
            blocks = self._collectives.blocks(shard.bucket.chunk * shard.flat.element_size())
            rank, world = self._collectives.rank, self._collectives.world
            staleness = Staleness(rank, world, blocks, self._max_age)
            self._buckets.append(_BucketCopies(shard, staleness))

    def spread(self, model: Sequence[Parameter]) -> None:
        """Sends every rank's chunk of every bucket to all, all buckets at once.

        Args:
            model: All parameters, whose versions rise.

        Raises:
            LinkError: A block that was due didn't arrive.
            PeerLostError: Its owner is lost; on all ranks alike, once all know.
        """
        strict = None if self._undelivered is None else self._undelivered.owners()
        needed = [bucket.staleness.needed(strict) for bucket in self._buckets]
        with owners_needed():
            works = [
                self._collectives.all_gather_blocks(bucket.shard.flat, mask)
                for bucket, mask in zip(self._buckets, needed, strict=True)
            ]
            wait_all(works)
            arrived = [work.wait() for work in works]
        torch.autograd.graph.increment_version(model)
        dead: LinkError | None = None
        for bucket, due, came in zip(self._buckets, needed, arrived, strict=True):
            self._count(due, came)
            if self._undelivered is not None:
                self._undelivered.note(due, came)
            bucket.staleness.advance(came)
            missing = None if due is None else due & ~came
            if missing is not None:
                missing[list(self._collectives.known_lost())] = False  # no link's fault
                if missing.any():
                    dead = dead or self._dead_link(bucket.staleness, missing, strict)
        self.figures = replace(self.figures, steps=self.figures.steps + 1)
        check_owners(self._collectives)
        if dead is not None:
            raise dead

    def synchronize(self, model: Sequence[Parameter]) -> None:
        """Brings all chunks to all ranks, reliably.

        Args:
            model: All parameters, whose versions rise.
        """
        with owners_needed():
            wait_all([
                self._collectives.all_gather_chunks(bucket.shard.flat) for bucket in self._buckets
            ])  # fmt: skip
        torch.autograd.graph.increment_version(model)
        for bucket in self._buckets:
            bucket.staleness.reset()

    def skip(self) -> None:
        """Counts a step that no rank took."""
        self.figures = replace(self.figures, skipped=self.figures.skipped + 1)

    def ages(self) -> tuple[int, ...]:
        """How many blocks of other ranks are 0, 1, 2, ... steps old."""
        return histogram((bucket.staleness for bucket in self._buckets), self._collectives.rank)

    def _count(self, needed: Mask | None, arrived: Mask) -> None:
        repaired = 0 if needed is None else int((needed & arrived).sum())
        self.figures = replace(
            self.figures,
            blocks=self.figures.blocks + arrived.size - arrived.shape[1],
            stale=self.figures.stale + int((~arrived).sum()),
            repaired=self.figures.repaired + repaired,
        )

    def _dead_link(
        self, staleness: Staleness, missing: Mask, strict: NDArray[np.bool_] | None
    ) -> LinkError:
        """``missing``: the blocks that were needed and didn't arrive; ``strict``: the owners of
        whom no block may be stale."""
        owner = int(missing.any(axis=1).argmax())
        wanted = 0 if strict is not None and strict[owner] else self._max_age
        return LinkError(
            f"{self._collectives}: parameters of {self._collectives.peer(owner)} are "
            f"{int(staleness.values[owner][missing[owner]].max())} steps old, wanted at most "
            f"{wanted} (max_age), and didn't arrive though they were asked for again: that "
            f"link is dead, or loses everything; repair it, or restart without that rank from the "
            f"last checkpoint",
            peer=owner,
        )
