"""State of the backward pass that is running, by autograd, and as all ranks know it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lossycoll.errors import TrainingError
from lossycoll.train.common.collectives import Collectives


class GradStamp:
    """The identity and version of a parameter's ``grad`` as it is now."""

    __slots__ = ("_grad", "_version")

    def __init__(self, grad: Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def fits(self, grad: Tensor | None) -> bool:
        """True if a gradient is the same tensor, not written to since, or None as it was then."""
        if grad is None or self._grad is None:
            return grad is None and self._grad is None
        return grad is self._grad() and grad._version == self._version


_FUNCTION_BACKWARD: Final = BackwardCFunction.apply.__code__


class PassStatus:
    """State of a backward pass at all ranks, once :attr:`flags` have been reduced by MAX."""

    def __init__(self, world: int, count: int) -> None:
        self.flags = torch.zeros(world + count + 1, dtype=torch.uint8)
        """uint8 (world + count + 1,): ranks with a bad gradient, parameters with a gradient, and
        whether somebody has written to parameters."""
        self._world = world

    def note_used(self, index: int) -> None:
        """Takes in that the parameter ``index`` has a gradient at this rank."""
        self.flags[self._world + index] = 1

    def note_bad(self, rank: int) -> None:
        """Takes in that a rank's gradients hold NaN or infinity."""
        self.flags[rank] = 1

    @property
    def bad(self) -> tuple[int, ...]:
        """The ranks whose own gradients hold NaN or infinity."""
        return tuple(self.flags[: self._world].nonzero().flatten().tolist())

    @property
    def used(self) -> list[bool]:
        """Flag of each parameter: True if any rank had a gradient of it."""
        return [bool(flag) for flag in self.flags[self._world : -1].tolist()]

    def note_written(self) -> None:
        """Takes in that parameters were written to at this rank since the last step."""
        self.flags[-1] = 1

    @property
    def written(self) -> bool:
        """True if parameters were written to since the last step, at any rank."""
        return bool(self.flags[-1])


def pass_number() -> int:
    """Autograd's number of the backward pass that this code runs in."""
    return torch._C._current_graph_task_id()


def at_end(callback: Callable[[], None]) -> None:
    """Has something called when the running backward pass ends, unless that raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def is_nested() -> bool:
    """True if the running backward pass is inside another one, as with a reentrant checkpoint.

    The stack of this thread is the only place that shows it. Autograd counts the depth, but doesn't
    expose it; the number of a pass says nothing of an outer one; in a hook the current node is the
    inner pass's; the outer pass is run by torch's checkpoint, so nothing can be passed along; and
    no callback tells that a pass has raised, which looks the same otherwise. False outside of a
    pass.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION_BACKWARD:
            return True
        frame = frame.f_back
    return False


class OrderedReducer(Protocol):
    """Reducer as the order needs it."""

    @property
    def is_open(self) -> bool:
        """True if a pass has touched it that it hasn't sent."""

    @property
    def is_used(self) -> bool:
        """True if it still has any of its parameters."""

    def send(self) -> None:
        """Sends all buckets."""


class ReducerOrder:
    """The reducers of one group, in the order in which they were made, the same on all ranks.

    A single reducer sends its buckets while the backward pass goes on. Of several, one rank's pass
    may touch some and another's pass others. So they wait until the pass ends, the ranks agree on
    which were touched anywhere, and those send. The ranks agree on who is among them, too: one rank
    may have deleted an optimizer that another's garbage still contains.
    """

    def __init__(self) -> None:
        self._reducers: list[weakref.ref[OrderedReducer]] = []

    @property
    def is_single(self) -> bool:
        """True if there are no others to wait for."""
        return len(self._reducers) < 2

    def join(self, reducer: OrderedReducer, collectives: Collectives) -> None:
        """Adds one that was made. All ranks must call this."""
        if self._reducers:
            used = _flags(found is not None and found.is_used for found in self._found())
            collectives.all_reduce(used, dist.ReduceOp.MAX).wait()
            self._keep(used)
        self._reducers.append(weakref.ref(reducer))

    def finish(self, reducer: OrderedReducer, collectives: Collectives) -> None:
        """Sends a reducer whose pass has ended, and all others that a pass has touched at any rank.

        TrainingError: one of those is at some ranks only.
        """
        found = self._found()
        if self.is_single or reducer not in found:
            reducer.send()
            return
        flags = torch.stack([
            _flags(one is not None and (one is reducer or one.is_open) for one in found),
            _flags(one is not None and one.is_used for one in found),
            _flags(one is None for one in found),
        ])  # fmt: skip
        collectives.all_reduce(flags, dist.ReduceOp.MAX).wait()
        touched, used, gone = flags
        if bool((touched & gone).any()):
            raise TrainingError(
                f"{collectives}: a backward pass has gradients for a ShardedOptimizer that not all "
                f"ranks have any more; delete it on all ranks, or on none"
            )
        failure: Exception | None = None
        for one, flag in zip(found, touched.tolist(), strict=True):
            if flag and one is not None:
                try:
                    one.send()
                except Exception as error:  # the others send on all ranks
                    failure = failure or error
        self._keep(used)
        if failure is not None:
            raise failure

    def _found(self) -> Sequence[OrderedReducer | None]:
        return [reference() for reference in self._reducers]

    def _keep(self, used: Tensor) -> None:
        """Keeps the reducers that any rank still uses."""
        self._reducers = [one for one, flag in zip(self._reducers, used, strict=True) if flag]


def order_of(group: dist.ProcessGroup) -> ReducerOrder:
    """The order of a group's reducers; there is one for each group."""
    return _orders.setdefault(group, ReducerOrder())


def _flags(values: Iterable[bool]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)


_orders: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, ReducerOrder]] = (
    weakref.WeakKeyDictionary()
)
