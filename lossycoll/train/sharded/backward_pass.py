"""State of a backward pass: by autograd, as all ranks know it, and what a GradScaler did to it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from lossycoll.errors import TrainingError
from lossycoll.train.common.collectives import Collectives

from .parameter_store import owners_needed

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


PROBE: Final = 2.0**-90
"""A gradient that only a scale changes: its square, and so its part in a norm, is 0."""


class ScalerProbe:
    """A dummy parameter that observes a GradScaler.

    A GradScaler wants a gradient from each rank, also from one that owns nothing of what had
    gradients. And what it does to the dummy's gradient shows by what it has divided the others, or
    that somebody scales or clips before any gradient has been reduced. The dummy is in a group
    between steps, and never in one during a step.
    """

    def __init__(self) -> None:
        self._parameter: Parameter | None = None
        self._members: list[Any] = []
        self._stamp = GradStamp(None)

    def attach(self, members: list[Any], like: Tensor) -> Tensor:
        """Adds a new dummy parameter to a group's ``members``; returns its gradient, (1,)."""
        self.detach()
        parameter = Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        parameter.grad = torch.full_like(parameter, PROBE)
        members.append(parameter)
        self._parameter, self._members = parameter, members
        self._stamp = GradStamp(parameter.grad)
        return parameter.grad

    def detach(self) -> None:
        if self._parameter is not None:
            self._members[:] = [one for one in self._members if one is not self._parameter]
            self._parameter, self._members = None, []

    def is_dummy(self, parameter: object) -> bool:
        return self._parameter is not None and parameter is self._parameter

    def was_changed(self) -> bool:
        """True if anything but clearing was done to its gradient since it was attached.

        False in float16, and for a scale of 1, where this isn't visible.
        """
        grad = None if self._parameter is None else self._parameter.grad
        if grad is None or float(grad) == 0:
            return False
        return float(grad) != PROBE or not self._stamp.fits(grad)

    def scale(self) -> float:
        """Scale that a GradScaler has divided the gradients by; 1 in float16, which it refuses."""
        grad = None if self._parameter is None else self._parameter.grad
        found = 0.0 if grad is None else float(grad)
        return PROBE / found if found > 0 and math.isfinite(found) else 1.0


def total_norm(
    grads: Sequence[Tensor], norm_type: float, device: torch.device, collectives: Collectives
) -> Tensor:
    """The p-norm of all ranks' gradients together, float64 (), the same on all ranks."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for grad in grads:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        norms.append(norm.to(device))
    own = torch.stack(norms)
    highest = math.isinf(norm_type)
    total = own.max() if highest else own.pow(norm_type).sum()
    op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
    with owners_needed():
        collectives.all_reduce(total, op).wait()
    return total if highest else total.pow(1.0 / norm_type)


_FUNCTION_BACKWARD: Final = BackwardCFunction.apply.__code__


class PassStatus:
    """State of a backward pass at all ranks, once :attr:`flags` have been reduced by MAX."""

    def __init__(self, world: int, count: int) -> None:
        self.flags = torch.zeros(world + count + 1, dtype=torch.uint8, device="cpu")
        """uint8 (world + count + 1,)."""
        self.is_bad, self.used, self.written = torch.split(self.flags, [world, count, 1])
        """Of them by rank, whether it has a bad gradient; by parameter, whether it has a gradient;
        and whether somebody has written to parameters."""

    @property
    def bad(self) -> tuple[int, ...]:
        """Ranks with a bad gradient."""
        return tuple(self.is_bad.nonzero().flatten().tolist())


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


def _flags(values: Iterable[bool]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8, device="cpu")


orders: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, ReducerOrder]] = (
    weakref.WeakKeyDictionary()
)
