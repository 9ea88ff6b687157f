"""What keeps a training script from using gradients that are not averaged yet."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lossycoll.errors import TrainingError

from .averaging import GradientAveraging
from .loop import MicroBatches


class LoopGuard:
    """Raises TrainingError while a loop is open, or if the averaging at its end has failed.

    It is asked when the next loop begins, and when any optimizer steps that has a parameter whose
    gradient is averaged. The hook of the optimizers goes when the guard does.
    """

    def __init__(self, averaging: GradientAveraging) -> None:
        self._averaging = averaging
        self._loop: weakref.ref[MicroBatches[Any]] | None = None
        self._failure: BaseException | None = None
        before_step = weakref.WeakMethod(self._before_step)
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: (found := before_step()) and found(optimizer)
        )
        weakref.finalize(self, hook.remove)

    def loop_began(self, loop: MicroBatches[Any]) -> None:
        """Takes in that a loop is open; it may be dropped without an end."""
        self._loop = weakref.ref(loop)

    def loop_ended(self) -> None:
        """Takes in that the loop's gradients are averaged."""
        self._loop = None

    def loop_failed(self, error: BaseException) -> None:
        """Takes in an error that could not be raised where it occurred."""
        self._failure = error

    def check(self) -> None:
        """Raises TrainingError if a loop is open; or for a failure, once."""
        rank = self._averaging.collectives
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TrainingError(
                f"{rank}: the last step's gradients could not be averaged when its loop was "
                f"left: {failure}"
            ) from failure
        if self._is_open():
            raise TrainingError(
                f"{rank}: the loop over micro-batches isn't over, so gradients aren't "
                f"averaged yet; call optimizer.step() after it, and the next loop after that. If "
                f"it was left by break while something else still holds its iterator, other ranks "
                f"wait for this one: leave it by `with drop(batches) as step: for batch in step:`"
            )

    def _is_open(self) -> bool:
        loop = None if self._loop is None else self._loop()
        return loop is not None and not loop.over

    def _before_step(self, optimizer: Optimizer) -> None:
        """Any optimizer is about to step."""
        if self._failure is None and not self._is_open():
            return
        if optimizer is not self._averaging.optimizer:
            ours = {id(parameter) for parameter in self._averaging.parameters}
            stepped = (p for entry in optimizer.param_groups for p in entry["params"])
            if not any(id(parameter) in ours for parameter in stepped):
                return
        self.check()
