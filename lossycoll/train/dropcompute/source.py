"""Where a step's micro-batches come from, and what a step leaves for the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Sampler

from lossycoll.errors import OptionError

from .report import StepRecord

Batch = Any


class RequeueSampler(Sampler[Batch]):
    """Yields the batches of a batch sampler after those that the epoch before has left.

    These are the batches that were drawn and not used, because a loader's workers draw ahead, and
    those that were not drawn. The loader must keep their order (``in_order``, its default): the
    next batch that is :meth:`done` is the first of those drawn.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._drawn: deque[Batch] = deque()  # batches that were drawn and are not done
        self._rest: Iterator[Batch] = iter(())  # batches of this epoch that were not drawn
        self._returned = 0  # number of this epoch's batches that the previous step left
        self._fresh = False  # whether an epoch has begun of which nothing was drawn

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
        if self._drawn:
            self._drawn.popleft()

    def set_epoch(self, epoch: int) -> None:
        """Passes an epoch on to the DistributedSampler that ``batches`` is, or draws from."""
        sampler = getattr(self._batches, "sampler", self._batches)
        sampler.set_epoch(epoch)


T = TypeVar("T")


class PeekingIterator(Generic[T]):
    """An iterator that can say whether there is more."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._next: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._next.pop() if self._next else next(self._source)

    def has_more(self) -> bool:
        if not self._next:
            self._next.extend(_first(self._source))
        return bool(self._next)


class BatchSource:
    """The batches of one step after another, and the leftovers in between.

    A list's leftovers are :attr:`dropped`, and with ``requeue`` the next list follows them. From an
    iterator only the micro-batch that was left for being late was drawn in vain: it comes first in
    the next step.
    """

    def __init__(self, micro_batches: int, requeue: bool) -> None:
        self._micro_batches = micro_batches
        self._requeue = requeue
        self._samplers: list[RequeueSampler] = []
        self._listed: Sequence[Any] | None = None
        """This step's batches, where they were passed as a sequence."""
        self._returned: Sequence[Any] = ()
        """Batches that were drawn from an iterator and are to come again."""
        self._peeking: PeekingIterator[Any] | None = None
        self.dropped: Sequence[Any] = ()  # batches of the last step's sequence that were not used

    @property
    def room(self) -> int:
        """Micro-batches that the next step takes besides those that come again."""
        again = len(self.dropped) if self._requeue else 0
        return max(0, self._micro_batches - again)

    @property
    def wanted(self) -> int:
        """Micro-batches of a full step, of the current step's batches."""
        if self._listed is None:
            return self._micro_batches
        return min(self._micro_batches, len(self._listed))

    def sampler(self, batches: Any) -> RequeueSampler:
        sampler = RequeueSampler(batches)
        self._samplers.append(sampler)
        return sampler

    def open(self, batches: Iterable[T]) -> Iterator[T]:
        if isinstance(batches, DataLoader):
            raise OptionError(
                "a DataLoader starts again with each loop; pass iter(loader), made once per epoch"
            )
        self._peeking = batches if isinstance(batches, PeekingIterator) else None
        if isinstance(batches, Sequence):
            self._listed = [*(self.dropped if self._requeue else ()), *batches]
            opened: Iterator[T] = iter(self._listed)
        else:
            self._listed = None
            opened = chain(self._returned, batches) if self._returned else iter(batches)
        self.dropped, self._returned = (), ()
        return opened

    def used_one(self) -> None:
        """The first micro-batch that a sampler has drawn does not come again."""
        for sampler in self._samplers:
            sampler.done()

    def close(self, record: StepRecord, returned: Sequence[Any]) -> None:
        """Ends the step and keeps what is to come again; ``returned`` was left for being late."""
        if self._listed is None:
            self._returned = returned
        else:
            self.dropped = self._listed[record.used :]

    def has_more(self) -> bool:
        if self._peeking is None:
            return False
        return bool(self._returned) or self._peeking.has_more()


def _first(source: Iterator[T]) -> list[T]:
    for value in source:
        return [value]
    return []
