"""Works of collectives that were started, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from lossycoll.backend.work import LossyWork

from .staleness import Mask


class Work(Protocol):
    """A collective that may be under way."""

    def wait(self) -> Any:
        """Returns when it is complete; raises its error."""


class BlockGather:
    """An all-gather that may lose blocks. :meth:`wait` returns which ones arrived."""

    def __init__(self, work: Work, arrived: Callable[[], Mask]) -> None:
        self._work = work
        self._arrived = arrived

    def wait(self) -> Mask:
        """bool (world, blocks): True where the block that the owner sent is in the result."""
        self._work.wait()
        return self._arrived()

    def wait_result(self) -> Mask:
        """Wait as :meth:`wait` does, but only until the result can be read. This rank's chunk may
        still be asked for, so no chunk may be written until :meth:`wait` has returned."""
        wait_result(self._work)
        return self._arrived()


class ReportedMean:
    """A mean whose senders learn what of their contributions isn't in it."""

    def __init__(self, work: Work, missed: Callable[[], Tensor | None]) -> None:
        self._work = work
        self._missed = missed

    def wait(self) -> None:
        """Returns when the mean is there."""
        self._work.wait()

    @property
    def missed(self) -> Tensor | None:
        """(world * n,), what of this rank's contribution was lost, or taken away by rounding; waits
        for the mean. None: nothing."""
        self.wait()
        return self._missed()


class OnHost:
    """A collective that is waited for on the host, wherever its tensors lie, so that its error is
    known when :meth:`wait` has returned."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Returns when it is complete; raises its error."""
        if isinstance(self._work, LossyWork):
            self._work.wait_on_host()
        else:
            self._work.wait()


class Complete:
    """The work of a collective that had nothing to do."""

    def wait(self) -> None:
        """Returns at once."""


def wait_result(work: Work) -> None:
    """Waits until what a collective gives can be read, perhaps before ``work.wait()`` would.

    What this rank sends may still be asked for, so no tensor of the collective may be written until
    ``work.wait()`` has returned.
    """
    if isinstance(work, LossyWork | BlockGather):
        work.wait_result()
    else:
        work.wait()


def wait_all(works: Sequence[Work]) -> None:
    """Waits for all, also after one has failed; raises the first failure."""
    failure: Exception | None = None
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
