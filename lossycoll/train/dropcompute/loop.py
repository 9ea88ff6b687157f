"""One step's micro-batches, handed out one by one until the threshold has passed.

And where they come from, and what a step leaves for the next one.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import DataLoader, Sampler

from lossycoll.errors import OptionError
from lossycoll.train.sharded.backward_pass import GradStamp

from .report import StepRecord

if TYPE_CHECKING:
    from .controller import DropCompute


class Stopwatch:
    """Measures laps, in seconds.

    A lap of less than 0 s by the clock counts as 0 s. A reading that isn't finite counts as no time
    since the last one. Both are counted in :attr:`jumps`. ``synchronize`` is called before each
    reading, and returns when the work so far is done.
    """

    def __init__(
        self, clock: Callable[[], float], synchronize: Callable[[], object] | None = None
    ) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._started: float | None = None
        self._last = 0.0
        self.elapsed = 0.0  # seconds of all laps since the start
        self.jumps = 0

    def start(self) -> float | None:
        """Starts again; returns the seconds since the last start, or None if they are unknown."""
        now = self._read()
        since = None if self._started is None else now - self._started
        self._started = self._last = now
        self.elapsed = 0.0
        return since if since is not None and since >= 0 else None

    def lap(self) -> float:
        now = self._read()
        seconds = now - self._last
        self._last = now
        if seconds < 0:
            self.jumps += 1
            return 0.0
        self.elapsed += seconds
        return seconds

    def passed(self) -> float:
        return self.elapsed + max(0.0, self._read() - self._last)

    def _read(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if math.isfinite(now):
            return now
        self.jumps += 1
        return self._last


T = TypeVar("T")


class MicroBatches(Generic[T]):
    """The micro-batches of one step: an iterator, and a context manager for leaving it early.

    Hands out the first micro-batch always, and others until more than the threshold's seconds have
    passed. When it ends, by ``break`` or an exception as well, this rank takes part in the
    averaging with what it has done, because the other ranks wait for it. :class:`DropCompute` makes
    these. A micro-batch is completed when the gradient of a parameter has changed.
    """

    def __init__(self, drop: DropCompute, batches: Iterator[T]) -> None:
        self._drop = drop
        self._batches = batches
        self._record = StepRecord(drop._source.wanted)
        self._threshold = drop.threshold
        self._watch = drop._watch
        self._parameters = drop._averaging.parameters
        self._stamps: list[GradStamp] = []
        self._pending: list[T] = []
        self._thread = threading.get_ident()
        self.over = False

    def __iter__(self) -> MicroBatches[T]:
        return self

    def __next__(self) -> T:
        if self.over:
            raise StopIteration
        self._finish_pending()
        if self._has_room and not self._record.stopped:
            for batch in self._batches:
                self._stamps = [GradStamp(parameter.grad) for parameter in self._parameters]
                self._pending = [batch]
                return batch
        self.close()
        raise StopIteration

    @property
    def late(self) -> bool:
        """True if the threshold has passed by now; False within a step's first micro-batch.

        A micro-batch that you leave for being late, before its backward pass, is dropped and comes
        again::

            step = drop(batches)
            for inputs, targets in step:
                value = loss(model(inputs), targets) / drop.micro_batches
                if step.late:
                    continue  # ends the loop
                value.backward()
        """
        return bool(self._record.laps) and self._watch.passed() > self._threshold

    def __enter__(self) -> MicroBatches[T]:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._close_quietly()

    def __del__(self) -> None:
        # After ``break``, or an exception in the loop's body, the iterator is gone at once.
        if not getattr(self, "over", True) and not sys.is_finalizing():
            self._close_quietly()

    def close(self) -> None:
        if self.over:
            return
        self._finish_pending()
        self.over = True
        self._drop._loop_ended(self._record)

    @property
    def _has_room(self) -> bool:
        return len(self._record.laps) < self._drop.micro_batches

    def _close_quietly(self) -> None:
        """Where an error can't be raised, or another one is on its way."""
        try:
            if threading.get_ident() != self._thread:
                self.over = True
                raise RuntimeError("the loop over micro-batches was given up in another thread")
            self.close()
        except BaseException as error:
            self._drop._failure = error

    def _finish_pending(self) -> None:
        """Finds out what became of the micro-batch that was handed out last."""
        if not self._pending:
            return
        record, pending, self._pending = self._record, self._pending, []
        record.laps.append(self._watch.lap())
        late = self._watch.elapsed > self._threshold
        grads = [parameter.grad for parameter in self._parameters]
        pairs = zip(self._stamps, grads, strict=True)
        if any(grad is not None and not mark.fits(grad) for mark, grad in pairs):
            record.completed += 1
        elif late:
            record.returned = pending
        if not record.returned:
            self._drop._source.used_one()
        record.stopped = late and (self._has_room or bool(record.returned))
        self._stamps = []


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
            self._next.extend(islice(self._source, 1))
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

    def close(self, record: StepRecord) -> None:
        """Ends the step and keeps what is to come again."""
        if self._listed is None:
            self._returned = record.returned
        else:
            self.dropped = self._listed[record.used :]

    def has_more(self) -> bool:
        if self._peeking is None:
            return False
        return bool(self._returned) or self._peeking.has_more()
