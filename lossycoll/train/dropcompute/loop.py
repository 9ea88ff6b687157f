"""One step's micro-batches, handed out one by one until the threshold has passed."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from torch.nn import Parameter

from lossycoll.train.sharded.backward_pass import GradStamp

from .report import StepRecord

if TYPE_CHECKING:
    from .runner import StepRunner


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
    these. ``most`` is the micro-batches of a full step; ``watch`` has been started. A micro-batch
    is completed when the gradient of one of ``parameters`` has changed.
    """

    def __init__(
        self,
        listener: StepRunner,
        source: Iterator[T],
        most: int,
        threshold: float,
        watch: Stopwatch,
        parameters: Sequence[Parameter],
    ) -> None:
        self._listener = listener
        self._source = source
        self._most = most
        self._threshold = threshold
        self._watch = watch
        self._parameters = parameters
        self._stamps: list[GradStamp] = []
        self._pending: list[T] = []
        self._thread = threading.get_ident()
        self._completed = 0
        self._stopped = False
        self.laps: list[float] = []  # seconds of each micro-batch that was handed out
        self.returned: list[T] = []
        """The last micro-batch, if it was left before its backward pass for being late."""
        self.over = False

    def __iter__(self) -> MicroBatches[T]:
        return self

    def __next__(self) -> T:
        if self.over:
            raise StopIteration
        self._finish_pending()
        if len(self.laps) < self._most and not self._stopped:
            for batch in self._source:
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
        return bool(self.laps) and self._watch.passed() > self._threshold

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
        self._listener.loop_ended(self)

    def record(self, wanted: int) -> StepRecord:
        return StepRecord(
            tuple(self.laps), self._completed, len(self.returned), wanted, self._stopped
        )

    def _close_quietly(self) -> None:
        """Where an error can't be raised, or another one is on its way."""
        try:
            if threading.get_ident() != self._thread:
                self.over = True
                raise RuntimeError("the loop over micro-batches was given up in another thread")
            self.close()
        except BaseException as error:
            self._listener.loop_failed(error)

    def _finish_pending(self) -> None:
        """Finds out what became of the micro-batch that was handed out last."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self.laps.append(self._watch.lap())
        late = self._watch.elapsed > self._threshold
        grads = [parameter.grad for parameter in self._parameters]
        pairs = zip(self._stamps, grads, strict=True)
        if any(grad is not None and not mark.fits(grad) for mark, grad in pairs):
            self._completed += 1
        elif late:
            self.returned = pending
        if not self.returned:
            self._listener.batch_used()
        self._stopped = late and (len(self.laps) < self._most or bool(self.returned))
        self._stamps = []
