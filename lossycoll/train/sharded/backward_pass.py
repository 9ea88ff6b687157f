"""What autograd tells of the backward pass that is running, and what all ranks know of one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction

_FUNCTION_BACKWARD: Final = BackwardCFunction.apply.__code__


class PassStatus:
    """What all ranks know of a backward pass, once :attr:`flags` have been reduced by MAX."""

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
        """By parameter, whether any rank had a gradient of it."""
        return [bool(flag) for flag in self.flags[self._world : -1].tolist()]

    def note_written(self) -> None:
        """Takes in that parameters were written to at this rank since the last step."""
        self.flags[-1] = 1

    @property
    def written(self) -> bool:
        """Whether parameters were written to since the last step, at any rank."""
        return bool(self.flags[-1])


def pass_number() -> int:
    """Autograd's number of the backward pass that this code runs in."""
    return torch._C._current_graph_task_id()


def at_end(callback: Callable[[], None]) -> None:
    """Has something called when the running backward pass ends, unless that raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def is_nested() -> bool:
    """Whether the running backward pass is inside another one, as with a reentrant checkpoint.

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
