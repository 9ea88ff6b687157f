"""State of the backward pass that is running, by autograd, and as all ranks know it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lossycoll.errors import TrainingError
from lossycoll.train.common.collectives import Collectives

if TYPE_CHECKING:
    from .gradient_reducer import GradientReducer


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
        self.flags = torch.zeros(world + count + 1, dtype=torch.uint8, device="cpu")
        """uint8 (world + count + 1,): ranks with a bad gradient, parameters with a gradient, and
        whether somebody has written to parameters."""
        self._world = world

    def note_used(self, index: int) -> None:
        self.flags[self._world + index] = 1

    def note_bad(self, rank: int) -> None:
        self.flags[rank] = 1

    @property
    def bad(self) -> tuple[int, ...]:
        return tuple(self.flags[: self._world].nonzero().flatten().tolist())

    @property
    def used(self) -> list[bool]:
        return [bool(flag) for flag in self.flags[self._world : -1].tolist()]

    def note_written(self) -> None:
        self.flags[-1] = 1

    @property
    def written(self) -> bool:
        return bool(self.flags[-1])


def pass_number() -> int:
    """Autograd's number of the backward pass that this code runs in."""
    return torch._C._current_graph_task_id()


def at_end(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def is_nested() -> bool:
    """True if the running backward pass is inside another one, as with a reentrant checkpoint.

    The stack of this thread is the only place that shows it: autograd doesn't expose the depth,
    and no callback tells that a pass has raised, which looks the same otherwise.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION_BACKWARD:
            return True
        frame = frame.f_back
    return False


class ReducerOrder:
    """The reducers of one group, in the order in which they were made, the same on all ranks.

    A single reducer sends while the backward pass goes on. Of several, ranks' passes may touch
    different ones: they wait until the pass ends, the ranks agree on which were touched anywhere,
    and those send. They agree on who is among them, too: garbage may still contain an optimizer.
    """

    def __init__(self) -> None:
        self._reducers: list[weakref.ref[GradientReducer]] = []

    @property
    def is_single(self) -> bool:
        return len(self._reducers) < 2

    def join(self, reducer: GradientReducer, collectives: Collectives) -> None:
        if self._reducers:
            used = _flags(found is not None and found.is_used for found in self._found())
            collectives.all_reduce(used, dist.ReduceOp.MAX).wait()
            self._keep(used)
        self._reducers.append(weakref.ref(reducer))

    def finish(self, reducer: GradientReducer, collectives: Collectives) -> None:
        """Sends a reducer whose pass has ended, and all others that a pass has touched anywhere."""
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

    def _found(self) -> Sequence[GradientReducer | None]:
        return [reference() for reference in self._reducers]

    def _keep(self, used: Tensor) -> None:
        self._reducers = [one for one, flag in zip(self._reducers, used, strict=True) if flag]


def order_of(group: dist.ProcessGroup) -> ReducerOrder:
    return _orders.setdefault(group, ReducerOrder())


def _flags(values: Iterable[bool]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8, device="cpu")


_orders: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, ReducerOrder]] = (
    weakref.WeakKeyDictionary()
)
