"""A batch sampler that gives back what an epoch has left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import Sampler

Batch = Any


class Requeue(Sampler[Batch]):
    """Yields what ``batches`` does (a batch sampler: lists of indices), but first, in each epoch,
    what the epoch before has left: batches that were drawn and not done, as a loader's workers draw
    ahead, and those that were not drawn any more.

    For a DataLoader that keeps their order (``in_order``, its default): the next one that is
    :meth:`done` is the first of those that were drawn.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._drawn: deque[Batch] = deque()
        self._rest: Iterator[Batch] = iter(())
        self._given_back = 0
        self._fresh = False
        """Whether an epoch has begun of which nothing was drawn."""

    def __iter__(self) -> Iterator[Batch]:
        # Not within the generator: an epoch begins with this call, not with its first batch. A
        # loader with workers calls it twice.
        if self._fresh:
            return self._draw(self._rest, self._drawn)
        self._fresh = True
        left = [*self._drawn, *self._rest]
        self._given_back = len(left)
        self._drawn = deque()
        self._rest = chain(left, self._batches)
        return self._draw(self._rest, self._drawn)

    def _draw(self, rest: Iterator[Batch], drawn: deque[Batch]) -> Iterator[Batch]:
        for batch in rest:
            self._fresh = False
            drawn.append(batch)
            yield batch

    def __len__(self) -> int:
        """Of the epoch that has begun last, batches that were given back included."""
        return self._given_back + len(self._batches)

    def done(self) -> None:
        """The first of the batches that were drawn has been handed out to be trained on."""
        if self._drawn:
            self._drawn.popleft()

    def set_epoch(self, epoch: int) -> None:
        """Passed on to a DistributedSampler, which ``batches`` draws from or is."""
        sampler = getattr(self._batches, "sampler", self._batches)
        sampler.set_epoch(epoch)
