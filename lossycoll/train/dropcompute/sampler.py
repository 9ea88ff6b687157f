"""A batch sampler whose next epoch begins with what the last one left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import Sampler

Batch = Any


class RequeueSampler(Sampler[Batch]):
    """Yields the batches of a batch sampler after those that the epoch before has left.

    These are the batches that were drawn and not used, because a loader's workers draw ahead, and
    those that were not drawn. The loader must keep their order (``in_order``, its default): the
    next batch that is :meth:`done` is the first of those drawn.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._drawn: deque[Batch] = deque()
        """Batches that were drawn and are not done."""
        self._rest: Iterator[Batch] = iter(())
        """Batches of this epoch that were not drawn."""
        self._returned = 0
        """How many of this epoch's batches the one before has left."""
        self._fresh = False
        """Whether an epoch has begun of which nothing was drawn."""

    def __iter__(self) -> Iterator[Batch]:
        # Not within the generator: an epoch begins with this call, not with its first batch. A
        # loader with workers calls it twice.
        if self._fresh:
            return self._draw(self._rest, self._drawn)
        self._fresh = True
        left = [*self._drawn, *self._rest]
        self._returned = len(left)
        self._drawn = deque()
        self._rest = chain(left, self._batches)
        return self._draw(self._rest, self._drawn)

    def _draw(self, rest: Iterator[Batch], drawn: deque[Batch]) -> Iterator[Batch]:
        for batch in rest:
            self._fresh = False
            drawn.append(batch)
            yield batch

    def __len__(self) -> int:
        """Batches of the epoch that began last, those that the one before has left included."""
        return self._returned + len(self._batches)

    def done(self) -> None:
        """The first of the batches drawn was used."""
        if self._drawn:
            self._drawn.popleft()

    def set_epoch(self, epoch: int) -> None:
        """Passes an epoch on to the DistributedSampler that ``batches`` is, or draws from."""
        sampler = getattr(self._batches, "sampler", self._batches)
        sampler.set_epoch(epoch)
