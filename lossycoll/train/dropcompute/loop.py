"""One step's micro-batches, handed out one by one while there is time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from torch.nn import Parameter

from lossycoll.train.common.grad_stamp import Mark

from .stopwatch import Stopwatch

T = TypeVar("T")


class Owner(Protocol):
    """Whom a loop tells what becomes of it."""

    def used(self) -> None:
        """A micro-batch was, so it isn't given back."""

    def ended(self, loop: MicroBatches[Any]) -> None:
        """The loop is over: the ranks are to average what they have. May raise."""

    def failed(self, error: BaseException) -> None:
        """:meth:`ended` raised where nobody could catch it."""


class MicroBatches(Generic[T]):
    """An iterator over at most ``most`` of the batches of ``source``, and a context for those who
    leave it early.

    Hands out no more once more than ``threshold`` seconds have passed; the first one always. When
    there are no more, and as well when the loop is left by ``break`` or by an exception, this rank
    takes part in the averaging with what it has done: others wait for it.
    """

    def __init__(
        self,
        owner: Owner,
        source: Iterator[T],
        most: int,
        threshold: float,
        watch: Stopwatch,
        parameters: Sequence[Parameter],
    ) -> None:
        self._owner = owner
        self._source = source
        self._most = most
        self._threshold = threshold
        self._watch = watch
        self._parameters = parameters
        self._marks: list[Mark] = []
        self._out: list[T] = []
        """The micro-batch whose end hasn't been seen."""
        self._thread = threading.get_ident()
        self.laps: list[float] = []
        """Seconds of each that was handed out."""
        self.completed = 0
        """Those of them in which a backward pass added to a gradient."""
        self.given_up: list[T] = []
        """The last one, where it was left without a backward pass since it was late."""
        self.stopped = False
        """Whether the threshold has ended it."""
        self.over = False

    def __iter__(self) -> MicroBatches[T]:
        return self

    def __next__(self) -> T:
        if self.over:
            raise StopIteration
        self._look()
        if len(self.laps) < self._most and not self.stopped:
            for batch in self._source:
                self._marks = [Mark(parameter.grad) for parameter in self._parameters]
                self._out = [batch]
                return batch
        self.close()
        raise StopIteration

    @property
    def late(self) -> bool:
        """Whether the threshold has passed by now, within a micro-batch that isn't the first. One
        that is left for that before its backward pass is dropped as well, and given back::

            step = drop(batches)
            for inputs, targets in step:
                value = loss(model(inputs), targets) / drop.micro_batches
                if step.late:
                    continue  # which ends the loop
                value.backward()
        """
        return bool(self.laps) and self._watch.passed() > self._threshold

    def __enter__(self) -> MicroBatches[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_quietly()

    def __del__(self) -> None:
        # After ``break``, or an exception in the loop's body, the iterator is gone at once.
        if not getattr(self, "over", True) and not sys.is_finalizing():
            self._close_quietly()

    def close(self) -> None:
        """Ends it, if it hasn't ended, with what was done so far."""
        if self.over:
            return
        self._look()
        self.over = True
        self._owner.ended(self)

    def _close_quietly(self) -> None:
        """Where an error can't be raised, or another one is on its way."""
        try:
            if threading.get_ident() != self._thread:
                self.over = True
                raise RuntimeError("the loop over micro-batches was given up in another thread")
            self.close()
        except BaseException as error:
            self._owner.failed(error)

    def _look(self) -> None:
        """Notes what became of the micro-batch that was handed out last."""
        if not self._out:
            return
        out, self._out = self._out, []
        self.laps.append(self._watch.lap())
        late = self._watch.elapsed > self._threshold
        grads = [parameter.grad for parameter in self._parameters]
        pairs = zip(self._marks, grads, strict=True)
        if any(grad is not None and not mark.fits(grad) for mark, grad in pairs):
            self.completed += 1
        elif late:
            self.given_up = out
        if not self.given_up:
            self._owner.used()
        self.stopped = late and (len(self.laps) < self._most or bool(self.given_up))
        self._marks = []


class Peeking(Generic[T]):
    """An iterator that can tell whether there is more."""

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


def _first(source: Iterator[T]) -> list[T]:
    for value in source:
        return [value]
    return []
